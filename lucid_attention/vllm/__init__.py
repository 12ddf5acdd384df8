"""A plug-in for vLLM: checkpoints with LUCID, and the attention that keeps keys and y = P⁻¹v in its paged cache."""
