"""Hugging Face Transformers: LUCID in its architectures (`dropin`), our own decoder (`decoder`), checkpoints."""
