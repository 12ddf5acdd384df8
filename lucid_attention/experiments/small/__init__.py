"""Small models that learn in seconds, their tasks, and how they are compared."""
