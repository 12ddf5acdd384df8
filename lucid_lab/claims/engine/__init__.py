"""The machinery that runs experiments: scales, jobs, processes, studies, results, full recipes, commands."""
