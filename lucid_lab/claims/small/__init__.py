"""Models that learn in seconds: the model, its tasks, its training, and contestants side by side."""
