"""Small models of text: training prompts, runs and comparisons."""
