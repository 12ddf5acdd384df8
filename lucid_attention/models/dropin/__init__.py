"""LUCID in existing architectures of Transformers: attn_implementation="lucid"."""
