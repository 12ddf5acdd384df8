"""The functions of Transformers that are wrapped. If a release moves one, a test here fails with its name."""

import inspect
import types

import pytest
import transformers

from lucid_attention.models.dropin.api import enable_lucid
from lucid_attention.models.dropin.hooks import HOOKS, check_hook, install_hooks

NAMES = [str(hook) for hook in HOOKS]


def test_five_functions_are_wrapped():
    assert NAMES == [
        "transformers.cache_utils.get_layer_types_and_kwargs",
        "transformers.PreTrainedModel._check_and_adjust_attn_implementation",
        "transformers.QuantizedCache.__init__",
        "transformers.PreTrainedConfig.to_json_file",
        "transformers.PreTrainedConfig._dict_from_json_file",
    ]


@pytest.mark.parametrize("hook", HOOKS, ids=NAMES)
def test_transformers_has_the_function_with_its_parameters(hook):
    check_hook(hook)


def test_no_configuration_and_no_model_of_transformers_overrides_a_wrapped_method():
    """An override would not pass through the wrapper. Seen on the classes that the tests of this folder load."""
    overrides = set()
    for hook in (hook for hook in HOOKS if inspect.isclass(hook.owner)):
        classes = [hook.owner]
        for cls in classes:
            classes.extend(cls.__subclasses__())
        overrides |= {f"{cls.__module__}.{cls.__name__}" for cls in classes[1:] if hook.name in vars(cls)}
    assert {name for name in overrides if name.startswith("transformers.")} == set()


@pytest.mark.parametrize("hook", HOOKS, ids=NAMES)
def test_a_release_without_the_function_is_refused_by_name(hook, monkeypatch):
    monkeypatch.delattr(hook.owner, hook.name)
    # Every class has some __init__, that of the class above it.
    missing = (
        "has with the parameters" if hook.name == "__init__" else r"does not have\. This release .* supports.*5\.20"
    )
    with pytest.raises(RuntimeError, match=missing) as caught:
        enable_lucid()
    assert str(hook) in str(caught.value)
    assert transformers.__version__ in str(caught.value)


@pytest.mark.parametrize("hook", HOOKS, ids=NAMES)
def test_a_release_with_other_parameters_is_refused_by_name(hook, monkeypatch):
    monkeypatch.setattr(hook.owner, hook.name, lambda self, another: None)
    before = [inspect.getattr_static(other.owner, other.name) for other in HOOKS]
    with pytest.raises(RuntimeError, match="has with the parameters self, another") as caught:
        install_hooks()
    assert str(hook) in str(caught.value)
    assert [inspect.getattr_static(other.owner, other.name) for other in HOOKS] == before, "nothing was wrapped"


def test_the_functions_are_wrapped_once():
    enable_lucid()
    before = [inspect.getattr_static(hook.owner, hook.name) for hook in HOOKS]
    enable_lucid()
    assert [inspect.getattr_static(hook.owner, hook.name) for hook in HOOKS] == before
    for function in before:
        original = (function.__func__ if isinstance(function, classmethod) else function).__wrapped__
        assert isinstance(original, types.FunctionType)
        assert original.__module__.startswith("transformers.")
