"""Softmax attention as a module."""

from ..causal import CausalAttention


class SoftmaxAttention(CausalAttention):
    """Causal softmax attention, `scaled_dot_product_attention` on projections: `CausalAttention` as it stands."""

    title = "softmax"
