"""LUCID attention: softmax attention that reads decorrelated values, o = softmax(q kᵀ/√d) P⁻¹ v."""

# Nothing is imported here: `lucid` handles Ctrl-C only after this file has run. Type checkers take this name for true.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .models.decoder.configuration import LucidConfig
    from .models.decoder.modeling import LucidForCausalLM
    from .models.subclasses import enable_lucid
    from .models.values import set_sharpness, set_strength
    from .nn.attention import ATTENTIONS, LucidAttention
    from .nn.causal import CausalAttention
    from .ops.keys import KeyMap, calibrated_key_map
    from .ops.linear.delta import delta_attention
    from .ops.linear.gated import gla_attention, gsa_attention
    from .ops.lucid.api import lucid_attention, precondition, preconditioner
    from .ops.lucid.decode import inverse_key_norms, lucid_decode
    from .ops.path.api import lucid_path_attention, path_attention
    from .ops.softmax.diff import diff_attention
del TYPE_CHECKING

__all__ = [
    "ATTENTIONS",
    "CausalAttention",
    "KeyMap",
    "LucidAttention",
    "LucidConfig",
    "LucidForCausalLM",
    "calibrated_key_map",
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
    "set_sharpness",
    "set_strength",
]
__version__ = "0.2.0.dev0"

# The public names of every module, which is imported when one of them is asked for: `lucid --help` needs no torch, and
# only what is below .models needs Transformers.
_NAMES = {
    ".models.decoder.configuration": ["LucidConfig"],
    ".models.decoder.modeling": ["LucidForCausalLM"],
    ".models.values": ["set_sharpness", "set_strength"],
    ".models.subclasses": ["enable_lucid"],
    ".nn.attention": ["ATTENTIONS", "LucidAttention"],
    ".nn.causal": ["CausalAttention"],
    ".ops.keys": ["KeyMap", "calibrated_key_map"],
    ".ops.linear.delta": ["delta_attention"],
    ".ops.linear.gated": ["gla_attention", "gsa_attention"],
    ".ops.lucid.api": ["lucid_attention", "precondition", "preconditioner"],
    ".ops.lucid.decode": ["inverse_key_norms", "lucid_decode"],
    ".ops.path.api": ["lucid_path_attention", "path_attention"],
    ".ops.softmax.diff": ["diff_attention"],
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> "Any":
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        value = getattr(import_module(_MODULES[name], __name__), name)
    except ModuleNotFoundError as missing:
        from .messages import missing_package

        package = missing_package(missing)
        if package is None:
            raise
        extra = "[transformers]" if _MODULES[name].startswith(".models") else ""
        raise ImportError(
            f"lucid_attention.{name} needs {package!r}: in a checkout of lucid-attention, pip install '.{extra}'"
        ) from missing
    # The next access finds the name in the module, without this function.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
