"""A Llama-shaped decoder of our own, with any attention of `ATTENTIONS`."""
