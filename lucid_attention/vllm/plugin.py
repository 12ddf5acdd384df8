"""The entry point in vLLM's group of plug-ins, which every process of vLLM calls before it opens a model."""

from typing import Any

# vLLM has no stable interface for attention backends of others: these releases are tested, and no others are tried.
TESTED = ("0.32.0",)
BACKEND = "LUCID"


def register() -> None:
    """Make LUCID's configurations, models and attention backend known to vLLM. May be called again.

    With another release of vLLM plain models work as before, and a checkpoint with LUCID is refused.
    """
    import vllm
    from transformers import AutoConfig

    from ..ops import numba_runtime
    from .configs import SealedConfig, served

    # An engine that starts looks through all modules, and fails at one of llvmlite's, which Numba imports.
    numba_runtime.switch_off("vLLM cannot start a second engine in a process that has imported Numba")
    version = vllm.__version__
    if version.partition("+")[0] not in TESTED:
        _refuse_lucid(version)
        return
    from vllm import ModelRegistry
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from .configs import CLASSES, LucidDecoderConfig

    AutoConfig.register(SealedConfig.model_type, SealedConfig, exist_ok=True)
    _read_configurations_through(served)
    room = __name__.rpartition(".")[0]
    configs: list[Any] = [*CLASSES.values(), LucidDecoderConfig]
    for name in (config.architecture for config in configs):
        # By name: these modules must not be imported before vLLM has chosen its devices.
        ModelRegistry.register_model(name, f"{room}.models:{name}")
    if BACKEND not in AttentionBackendEnum.__members__:
        register_backend(BACKEND, f"{room}.backend.LucidBackend")


def _read_configurations_through(check: Any) -> None:
    """Let vLLM use `check(config)` instead of every configuration that it reads from a config.json."""
    from vllm.transformers_utils.config import _CONFIG_FORMAT_TO_CONFIG_PARSER, HFConfigParser

    class Parser(HFConfigParser):
        def parse(self, *inputs: Any, **options: Any) -> tuple[dict[str, Any], Any]:
            content, config = super().parse(*inputs, **options)
            return content, check(config)

    # vLLM's own function for this warns at every start, also of plain models.
    _CONFIG_FORMAT_TO_CONFIG_PARSER["hf"] = Parser


def _refuse_lucid(version: str) -> None:
    from importlib.metadata import version as installed

    from transformers import AutoConfig, PreTrainedConfig

    from ..models.saved import SENTENCE
    from .configs import served

    ours = f"lucid-attention {installed('lucid-attention')}"
    reason = (
        f"{ours} serves LUCID with vLLM {', '.join(TESTED)}, got vLLM {version}: install vllm=={TESTED[-1]}, or a "
        f"lucid-attention for vLLM {version}"
    )

    class Refused(PreTrainedConfig):
        model_type = SENTENCE

        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
            raise RuntimeError(reason)

    def check(config: Any) -> Any:
        if served(config) is not config:
            raise RuntimeError(reason)
        return config

    AutoConfig.register(SENTENCE, Refused, exist_ok=True)
    try:
        _read_configurations_through(check)
    except (ImportError, AttributeError) as missing:
        # Without it, a process that has called enable_lucid would read a LUCID model as a plain one.
        raise RuntimeError(reason) from missing
