"""LUCID in Transformers' continuous batching: keys and y = P⁻¹v in a paged cache, many requests in one pass."""
