"""Hugging Face Transformers: LUCID in its architectures (`dropin`), our own decoder (`decoder`), checkpoints."""

# Values of --dtype; "auto" is the dtype that the weights were saved in.
DTYPES = ("auto", "float32", "bfloat16", "float16")
