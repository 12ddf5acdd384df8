"""LUCID attention: softmax attention that reads decorrelated values, o = softmax(q kᵀ/√d) P⁻¹ v."""

import typing as _typing
from importlib import import_module as _import_module

from .nn.attention import ATTENTIONS, LucidAttention
from .ops.linear.delta import delta_attention
from .ops.linear.gla import gla_attention
from .ops.linear.gsa import gsa_attention
from .ops.lucid.api import lucid_attention, precondition, preconditioner
from .ops.lucid.decode import inverse_key_norms, lucid_decode
from .ops.path.api import lucid_path_attention, path_attention
from .ops.softmax.diff import diff_attention

if _typing.TYPE_CHECKING:
    from .models.decoder.configuration import LucidConfig
    from .models.decoder.modeling import LucidForCausalLM
    from .models.dropin.api import enable_lucid
    from .models.ramps import StrengthRamp, set_strength

__all__ = [
    "ATTENTIONS",
    "LucidAttention",
    "LucidConfig",
    "LucidForCausalLM",
    "StrengthRamp",
    "delta_attention",
    "diff_attention",
    "enable_lucid",
    "gla_attention",
    "gsa_attention",
    "inverse_key_norms",
    "lucid_attention",
    "lucid_decode",
    "lucid_path_attention",
    "path_attention",
    "precondition",
    "preconditioner",
    "set_strength",
]
__version__ = "0.1.0"

# What needs Transformers, imported when it is asked for: everything else works with torch alone.
_WITH_TRANSFORMERS = {
    "LucidConfig": ".models.decoder.configuration",
    "LucidForCausalLM": ".models.decoder.modeling",
    "StrengthRamp": ".models.ramps",
    "enable_lucid": ".models.dropin.api",
    "set_strength": ".models.ramps",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _WITH_TRANSFORMERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(_import_module(_WITH_TRANSFORMERS[name], __name__), name)
    except ModuleNotFoundError as missing:
        if missing.name not in ("transformers", "accelerate", "safetensors"):
            raise
        raise ImportError(
            f'lucid_attention.{name} needs {missing.name!r}: pip install "lucid-attention[transformers]"'
        ) from missing


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
