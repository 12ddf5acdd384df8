"""Hugging Face Transformers: the only room that imports it at top level."""
