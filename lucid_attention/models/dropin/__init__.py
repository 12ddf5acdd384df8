"""LUCID in architectures of Transformers: attn_implementation="lucid"."""
