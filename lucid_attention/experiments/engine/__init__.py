"""What runs an experiment: jobs, processes, progress, studies, results, commands."""
