"""Labels of tokens."""

IGNORED = -100
"""The label of a token that no loss and no score counts: torch's and Transformers' default."""
