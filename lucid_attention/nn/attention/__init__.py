"""One file per attention variant."""

from .lucid import LucidAttention

__all__ = ["LucidAttention"]
