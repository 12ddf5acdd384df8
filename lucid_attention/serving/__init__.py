"""Serving: an OpenAI-compatible server for checkpoints with LUCID."""
