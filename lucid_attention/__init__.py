"""LUCID attention: softmax attention that reads decorrelated values, o = softmax(q kᵀ/√d) P⁻¹ v."""

from .nn.attention import LucidAttention
from .ops.lucid.api import lucid_attention, precondition, preconditioner
from .ops.lucid.decode import DecodeStep, decode_step, key_scalars

__all__ = [
    "DecodeStep",
    "LucidAttention",
    "decode_step",
    "key_scalars",
    "lucid_attention",
    "precondition",
    "preconditioner",
]
__version__ = "0.1.0"
