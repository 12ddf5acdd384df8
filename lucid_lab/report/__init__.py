"""Pictures, tables and the HTML page, from the files of experiments, training runs and evaluations."""
