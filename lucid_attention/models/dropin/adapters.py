"""Adapters of PEFT (LoRA and others) that were trained with LUCID are saved, and loaded, with LUCID.

adapter_config.json of such an adapter holds the true configuration under one key, together with LUCID's settings. Its
peft_type is a sentence, with which PEFT stops in a process without this package. The hooks below write this form, read
it, and switch the model that gets the adapter over to LUCID. They change nothing for adapters without LUCID.
"""

import inspect
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.peft import PeftAdapterMixin

from ...files import read_json, write_whole
from ..decoder.configuration import MODEL_TYPE
from .hooks import layer_types, wrap
from .settings import NAME, LucidSettings, full_layers, uses_lucid

CONFIG_FILE = "adapter_config.json"
# The peft_type in the file. PEFT prints it in a process without this package.
SAVED_AS = "LUCID adapter (pip install lucid-attention, and call lucid_attention.enable_lucid() before loading)"
# The key of the true configuration in the file, and of LUCID's settings in it.
KEY = "lucid_adapter"
# Attributes of an adapter's configuration: settings that its file asks for (None: it was saved without LUCID), and the
# configuration of the model that has the adapter.
REQUIRED, BASE = "_lucid_required", "_lucid_base"
SUPPORTED = "0.21 and later"

Switch = Callable[..., Any]
Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


def follow_peft(switch: Switch) -> None:
    """Install the hooks: now if PEFT is imported, otherwise after its import. Further calls change nothing.

    switch: `enable_lucid`.
    """
    if "peft" in sys.modules:
        install_adapter_hooks(switch)
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(partial(install_adapter_hooks, switch)))


class _AfterImport:
    """Runs `action` after the import of PEFT, which takes half a second and is not done for it."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The other finders' answer. Programs also ask whether PEFT is there without importing it."""
        if name != "peft":
            return None
        finders = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            run = loader.exec_module

            def run_and_act(module: Any) -> None:
                del loader.exec_module
                run(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                self.action()

            loader.exec_module = run_and_act
        return spec


def install_adapter_hooks(switch: Switch) -> None:
    """Wrap functions of PEFT, and tell it the modules of our own decoder."""
    import peft

    try:
        from peft.utils import constants

        for owner, name, wrapper in adapter_hooks(switch):
            wrap(owner, name, wrapper)
    except (AttributeError, ImportError) as error:
        raise RuntimeError(
            f"LUCID needs functions of PEFT that version {peft.__version__} does not have ({error}). This release of "
            f"lucid-attention supports PEFT {SUPPORTED}: install one of those, or a newer lucid-attention"
        ) from error
    for name, modules in vars(constants).items():
        # Our decoder has Llama's modules.
        if name.startswith("TRANSFORMERS_MODELS_TO_") and "llama" in modules:
            modules.setdefault(MODEL_TYPE, modules["llama"])


def adapter_hooks(switch: Switch) -> list[tuple[Any, str, Wrapper]]:
    """What is wrapped: the owner of a function, the function's name, and its wrapper."""
    from peft import PeftModel
    from peft.config import PeftConfigMixin
    from peft.tuners.tuners_utils import BaseTuner
    from peft.utils import hotswap

    return [
        (PeftConfigMixin, "save_pretrained", _save_config),
        (PeftConfigMixin, "from_json_file", _read_config),
        (PeftConfigMixin, "from_peft_type", _keep_required),
        (BaseTuner, "inject_adapter", partial(_check_injected, switch)),
        (PeftModel, "load_adapter", partial(_check_loaded, switch)),
        (PeftAdapterMixin, "load_adapter", partial(_check_loaded, switch)),
        (PeftModel, "save_pretrained", _bind_adapters),
        (PreTrainedModel, "save_pretrained", _bind_adapters),
        (hotswap, "check_hotswap_configs_compatible", _check_swapped),
    ]


def settings_of(config: Any) -> LucidSettings | None:
    """The settings of a model with this configuration, with every layer named; None if it does not use LUCID."""
    if not isinstance(config, PreTrainedConfig):
        return None
    text = config.get_text_config(decoder=True)
    if not uses_lucid(text):
        return None
    return _with_layers(LucidSettings.from_dict(getattr(text, NAME, None)), config)


def _with_layers(settings: LucidSettings, config: PreTrainedConfig) -> LucidSettings:
    if settings.layers is not None:
        return settings
    return replace(settings, layers=tuple(full_layers(layer_types(config.get_text_config(decoder=True)))))


def require(settings: LucidSettings, model: Any, others: list[str], switch: Switch, *, reload: bool = False) -> None:
    """Make a model attend as the adapter that it gets was trained.

    others: names of adapters that the model has already. reload: the adapter takes the place of one in the model, as
    where a Trainer resumes or loads its best checkpoint; the strength may have changed in between.
    """
    found = settings_of(getattr(model, "config", None))
    if found is None:
        if others:
            raise ValueError(
                f"the adapter was trained with LUCID, and the model has adapters of softmax attention, {others}: load "
                "each into a model of its own"
            )
        switch(model, **settings.to_dict())
        return
    wanted = _with_layers(settings, model.config)
    if reload and not others and replace(found, strength=wanted.strength) == wanted:
        switch(model, **settings.to_dict())
    elif found != wanted:
        raise ValueError(
            f"the adapter was trained with LUCID's settings {wanted.to_dict()}, and the model has {found.to_dict()}: "
            "call enable_lucid(model, ...) with the adapter's settings before loading it"
        )


def _save_config(original: Callable[..., Any]) -> Callable[..., Any]:
    def save_pretrained(self: Any, save_directory: Any, **kwargs: Any) -> Any:
        config: Any = getattr(self, BASE, None)
        if settings_of(config) is None:
            return original(self, save_directory, **kwargs)
        with TemporaryDirectory() as folder:
            result = original(self, folder, **kwargs)
            true = read_json(Path(folder) / CONFIG_FILE)
        settings = LucidSettings.from_dict(getattr(config.get_text_config(decoder=True), NAME, None))
        written = {
            # AutoModelForCausalLM.from_pretrained(adapter) reads this field without PEFT.
            "base_model_name_or_path": true.get("base_model_name_or_path"),
            "peft_type": SAVED_AS,
            KEY: {**true, NAME: settings.to_dict()},
        }
        write_whole(Path(save_directory) / CONFIG_FILE, json.dumps(written, indent=2, sort_keys=True))
        return result

    return save_pretrained


def _read_config(original: Callable[..., Any]) -> Callable[..., Any]:
    def from_json_file(cls: type, path_json_file: Any, **kwargs: Any) -> dict[str, Any]:
        found = original(cls, path_json_file, **kwargs)
        if KEY not in found:
            return found
        true = found[KEY]
        if not isinstance(true, dict) or not isinstance(true.get(NAME), dict):
            raise ValueError(f"{path_json_file}: {KEY} must be an object with LUCID's settings under {NAME!r}")
        # Transformers reads the outer name. A name that somebody has edited there holds for PEFT too.
        return {**true, "base_model_name_or_path": found.get("base_model_name_or_path")}

    return from_json_file


def _keep_required(original: Callable[..., Any]) -> Callable[..., Any]:
    """PEFT makes configurations of saved adapters here."""

    def from_peft_type(cls: type, **kwargs: Any) -> Any:
        saved = kwargs.pop(NAME, None)
        config = original(cls, **kwargs)
        setattr(config, REQUIRED, None if saved is None else LucidSettings.from_dict(saved))
        return config

    return from_peft_type


def _check_injected(switch: Switch, original: Callable[..., Any]) -> Callable[..., Any]:
    """Every adapter with modules of its own in the model is put there by this function."""

    def inject_adapter(self: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        config = self.peft_config[adapter_name]
        required = getattr(config, REQUIRED, None)
        if required is not None:
            require(required, model, [name for name in self.peft_config if name != adapter_name], switch)
        elif hasattr(config, REQUIRED) and settings_of(getattr(model, "config", None)) is not None:
            warnings.warn(
                f"the adapter {adapter_name!r} was saved from a model without LUCID, and this model attends with LUCID",
                stacklevel=2,
            )
        setattr(config, BASE, getattr(model, "config", None))
        return original(self, model, adapter_name, *args, **kwargs)

    return inject_adapter


def _check_loaded(switch: Switch, original: Callable[..., Any]) -> Callable[..., Any]:
    """Here an adapter's weights are loaded, also into one of the same name, whose configuration is kept."""
    signature = inspect.signature(original)

    def load_adapter(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        required = _required_by(given)
        if required is not None:
            name, present = given.get("adapter_name") or "default", getattr(self, "peft_config", None) or {}
            require(required, _base(self), [one for one in present if one != name], switch, reload=name in present)
        return original(self, *args, **kwargs)

    return load_adapter


def _required_by(given: dict[str, Any]) -> LucidSettings | None:
    """The settings of the file that is loaded. given: arguments of PEFT's or of Transformers' load_adapter."""
    from peft import PeftConfig

    place = given.get("model_id", given.get("peft_model_id"))
    if place is None:
        return None
    hub = {
        **(getattr(given.get("load_config"), "download_kwargs", None) or {}),
        **(given.get("adapter_kwargs") or {}),
        **given.get("kwargs", {}),
    }
    try:
        return getattr(PeftConfig.from_pretrained(place, **hub), REQUIRED)
    except ValueError as error:
        # No file is needed where the caller gives a configuration.
        if "Can't find" in str(error):
            return None
        raise


def _base(model: Any) -> Any:
    """The model of Transformers in a model of PEFT."""
    if isinstance(model, PreTrainedModel):
        return model
    return model.base_model if isinstance(model.base_model, PreTrainedModel) else model.base_model.model


def _bind_adapters(original: Callable[..., Any]) -> Callable[..., Any]:
    """Tell configurations of adapters which model they are saved with, also if they are older than the hooks."""

    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        for config in (getattr(self, "peft_config", None) or {}).values():
            setattr(config, BASE, getattr(_base(self), "config", None))
        return original(self, *args, **kwargs)

    return save_pretrained


def _check_swapped(original: Callable[..., Any]) -> Callable[..., Any]:
    """PEFT exchanges weights of an adapter for those of another if this function does not refuse."""

    def check(config0: Any, config1: Any) -> None:
        required, config = getattr(config1, REQUIRED, None), getattr(config0, BASE, None)
        found = settings_of(config)
        if required is not None and (found is None or found != _with_layers(required, config)):
            raise ValueError(
                f"the new adapter was trained with LUCID's settings {required.to_dict()}, which the model does not "
                "have: call enable_lucid(model, ...) with them before the swap"
            )
        original(config0, config1)

    return check
