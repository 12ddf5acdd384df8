"""Training: a thin layer over transformers.Trainer."""
