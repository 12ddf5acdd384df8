"""Softmax attention as a module."""

from ..causal import CausalAttention


class SoftmaxAttention(CausalAttention):
    """Causal softmax attention: `CausalAttention` without changes."""

    title = "softmax"
