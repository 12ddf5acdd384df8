"""The entry point in vLLM's group of plug-ins, which every process of vLLM calls before it opens a model."""

from typing import Any

# vLLM has no stable interface for attention backends of others: these releases are tested, and no others are tried.
TESTED = ("0.32.0",)
BACKEND = "LUCID"
# Architectures of Transformers that are served, and our own decoder.
SERVED = {
    "llama": "LucidLlamaForCausalLM",
    "mistral": "LucidMistralForCausalLM",
    "qwen2": "LucidQwen2ForCausalLM",
    "qwen3": "LucidQwen3ForCausalLM",
    "gemma3_text": "LucidGemma3ForCausalLM",
}
DECODER = "LucidForCausalLM"


def register() -> None:
    """Make LUCID's configurations, models and attention backend known to vLLM. May be called again.

    With another release of vLLM plain models work as before, and a checkpoint with LUCID is refused.
    """
    import vllm
    from transformers import AutoConfig

    from ..models.decoder.configuration import MODEL_TYPE
    from ..models.subclasses import PREFIX, lucid_config_class
    from ..ops.softmax import fused_step
    from .configs import DecoderReader

    # An engine that starts looks through all modules, and fails at one of llvmlite's, which Numba imports.
    fused_step.switch_off("vLLM cannot start a second engine in a process that has imported Numba")
    version = vllm.__version__
    if version.partition("+")[0] not in TESTED:
        for model_type in (MODEL_TYPE, *(PREFIX + kind for kind in SERVED)):
            AutoConfig.register(model_type, _refusal(model_type, version), exist_ok=True)
        return
    from vllm import ModelRegistry
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for kind in SERVED:
        config_class: Any = lucid_config_class(kind)
        # vLLM's Transformers prints a configuration next to its defaults, and Mistral's have no layer for LUCID.
        config_class.has_no_defaults_at_init = True
        AutoConfig.register(PREFIX + kind, config_class, exist_ok=True)
    AutoConfig.register(MODEL_TYPE, DecoderReader, exist_ok=True)
    room = __name__.rpartition(".")[0]
    for name in (*SERVED.values(), DECODER):
        # By name: these modules must not be imported before vLLM has chosen its devices.
        ModelRegistry.register_model(name, f"{room}.models:{name}")
    if BACKEND not in AttentionBackendEnum.__members__:
        register_backend(BACKEND, f"{room}.backend.LucidBackend")


def _refusal(model_type: str, version: str) -> Any:
    """A configuration that says why it cannot be read."""
    from importlib.metadata import version as installed

    from transformers import PreTrainedConfig

    def refuse(cls: type, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        raise RuntimeError(
            f"lucid-attention {installed('lucid-attention')} serves LUCID with vLLM {', '.join(TESTED)}, got vLLM "
            f"{version}: install vllm=={TESTED[-1]}, or a lucid-attention for vLLM {version}"
        )

    return type("RefusedConfig", (PreTrainedConfig,), {"model_type": model_type, "from_dict": classmethod(refuse)})
