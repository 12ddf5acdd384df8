"""LUCID attention: softmax attention that reads decorrelated values, o = softmax(q kᵀ/√d) P⁻¹ v."""

from .nn.attention import ATTENTIONS, LucidAttention
from .ops.decoding import DecodeStep
from .ops.delta.api import delta_attention
from .ops.diff import diff_attention
from .ops.gla.api import gla_attention
from .ops.gsa.api import gsa_attention
from .ops.lucid.api import lucid_attention, precondition, preconditioner
from .ops.lucid.decode import decode_step, key_scalars
from .ops.path.api import lucid_path_attention, path_attention, path_precondition, rebase_keys
from .ops.path.decode import PathStep, flush_keys, no_factors, path_decode_step

__all__ = [
    "ATTENTIONS",
    "DecodeStep",
    "LucidAttention",
    "PathStep",
    "decode_step",
    "delta_attention",
    "diff_attention",
    "flush_keys",
    "gla_attention",
    "gsa_attention",
    "key_scalars",
    "lucid_attention",
    "lucid_path_attention",
    "no_factors",
    "path_attention",
    "path_decode_step",
    "path_precondition",
    "precondition",
    "preconditioner",
    "rebase_keys",
]
__version__ = "0.1.0"
