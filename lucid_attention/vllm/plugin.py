"""The entry point in vLLM's group of plug-ins, which every process of vLLM calls before it opens a model."""

from typing import Any

# vLLM has no stable interface for attention backends of others: these releases are tested, and no others are tried.
TESTED = ("0.32.0",)
BACKEND = "LUCID"
# Architectures of Transformers that are served.
SERVED = {
    "llama": "LucidLlamaForCausalLM",
    "mistral": "LucidMistralForCausalLM",
    "qwen2": "LucidQwen2ForCausalLM",
    "qwen3": "LucidQwen3ForCausalLM",
    "gemma3_text": "LucidGemma3ForCausalLM",
}


def register() -> None:
    """Make LUCID's configurations, models and attention backend known to vLLM. May be called again.

    With another release of vLLM plain models work as before, and a checkpoint with LUCID is refused.
    """
    from importlib.metadata import version as installed

    import vllm
    from transformers import AutoConfig

    from ..models.decoder.configuration import MODEL_TYPE
    from ..models.subclasses import PREFIX, lucid_config_class
    from ..ops.softmax import fused_step

    # An engine that starts looks through all modules, and fails at one of llvmlite's, which Numba imports.
    fused_step.switch_off("vLLM cannot start a second engine in a process that has imported Numba")
    _refuse(MODEL_TYPE, "vLLM serves a LucidForCausalLM as a Llama: make one with `lucid convert CHECKPOINT OUT`")
    version = vllm.__version__
    if version.partition("+")[0] not in TESTED:
        ours = f"lucid-attention {installed('lucid-attention')}"
        for kind in SERVED:
            _refuse(
                PREFIX + kind,
                f"{ours} serves LUCID with vLLM {', '.join(TESTED)}, got vLLM {version}: install vllm=={TESTED[-1]}, "
                f"or a lucid-attention for vLLM {version}",
            )
        return
    from vllm import ModelRegistry
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for kind in SERVED:
        config_class: Any = lucid_config_class(kind)
        # vLLM's Transformers prints a configuration next to its defaults, and Mistral's have no layer for LUCID.
        config_class.has_no_defaults_at_init = True
        AutoConfig.register(PREFIX + kind, config_class, exist_ok=True)
    room = __name__.rpartition(".")[0]
    for name in SERVED.values():
        # By name: these modules must not be imported before vLLM has chosen its devices.
        ModelRegistry.register_model(name, f"{room}.models:{name}")
    if BACKEND not in AttentionBackendEnum.__members__:
        register_backend(BACKEND, f"{room}.backend.LucidBackend")


def _refuse(model_type: str, reason: str) -> None:
    """Register a configuration that says why it cannot be read."""
    from transformers import AutoConfig, PreTrainedConfig

    def refuse(cls: type, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        raise RuntimeError(reason)

    made: Any = type("RefusedConfig", (PreTrainedConfig,), {"model_type": model_type, "from_dict": classmethod(refuse)})
    AutoConfig.register(model_type, made, exist_ok=True)
