"""Training: recipes on transformers.Trainer."""
