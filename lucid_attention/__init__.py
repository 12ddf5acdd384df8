"""LUCID attention: softmax attention that reads decorrelated values, o = softmax(q kᵀ/√d) P⁻¹ v."""

from .nn.attention import ATTENTIONS, LucidAttention
from .ops.delta.api import delta_attention
from .ops.diff import diff_attention
from .ops.gla.api import gla_attention
from .ops.gsa.api import gsa_attention
from .ops.lucid.api import lucid_attention, precondition, preconditioner
from .ops.lucid.decode import DecodeStep, decode_step, key_scalars

__all__ = [
    "ATTENTIONS",
    "DecodeStep",
    "LucidAttention",
    "decode_step",
    "delta_attention",
    "diff_attention",
    "gla_attention",
    "gsa_attention",
    "key_scalars",
    "lucid_attention",
    "precondition",
    "preconditioner",
]
__version__ = "0.1.0"
