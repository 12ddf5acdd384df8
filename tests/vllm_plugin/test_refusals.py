"""What vLLM must not do with a LUCID checkpoint is refused in words: never softmax attention by accident."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vllm
from transformers import CONFIG_MAPPING, AutoConfig
from vllm.transformers_utils.config import get_config

from lucid_attention.models.subclasses import lucid_config_class
from lucid_attention.vllm import plugin


@pytest.fixture(autouse=True)
def registered() -> Any:
    """The plug-in, as vLLM loads it, before and after every test."""
    plugin.register()
    yield
    plugin.register()


def changed(folder: Path, target: Path, **fields: Any) -> Path:
    """A copy of a checkpoint with other fields in its configuration."""
    shutil.copytree(folder, target)
    content = json.loads((target / "config.json").read_text())
    content.update(fields)
    (target / "config.json").write_text(json.dumps(content))
    return target


def in_a_new_process(code: str, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=600)


OPEN = """
import sys
from vllm import LLM
LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=64)
print("opened")
"""


def test_without_the_plug_in_the_checkpoint_does_not_open(checkpoints: Path) -> None:
    done = in_a_new_process(OPEN, checkpoints / "llama", VLLM_PLUGINS="")
    assert done.returncode != 0
    assert "opened" not in done.stdout
    assert "lucid_llama" in done.stderr


def test_another_vllm_is_refused_with_both_versions(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    plugin.register()
    with pytest.raises(RuntimeError, match=r"serves LUCID with vLLM 0\.32\.0, got vLLM 0\.99\.1"):
        get_config(str(checkpoints / "llama"), trust_remote_code=False)
    # Plain models work as before.
    assert get_config(str(checkpoints / "plain"), trust_remote_code=False).architectures == ["LlamaForCausalLM"]


@pytest.mark.parametrize(
    "options", [{"hf_overrides": {"architectures": ["LlamaForCausalLM"]}}, {"model_impl": "transformers"}]
)
def test_another_implementation_of_the_model_is_refused(options: dict[str, Any], engine: Callable[..., Any]) -> None:
    with pytest.raises(Exception, match="Lucid"), engine("llama", **options):
        pass


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("llama", {"lucid": {"layers": [7]}}, "0 to 2, got 7"),
        ("llama", {"lucid": {"sharpnes": 2}}, "unexpected keyword argument 'sharpnes'"),
        ("gemma3", {"lucid": {"layers": [0]}}, "layer 0 has 'sliding_attention'"),
    ],
)
def test_what_cannot_be_served_is_said(
    name: str, fields: dict[str, Any], words: str, checkpoints: Path, tmp_path: Path
) -> None:
    folder = changed(checkpoints / name, tmp_path / name, **fields)
    with pytest.raises((ValueError, TypeError), match=words):
        get_config(str(folder), trust_remote_code=False)


def test_our_own_decoder_is_refused_with_the_way_to_serve_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "lucid_attention", "attention": "lucid"}))
    with pytest.raises(RuntimeError, match="lucid convert CHECKPOINT OUT"):
        get_config(str(tmp_path), trust_remote_code=False)


def test_a_checkpoint_without_its_map_of_the_keys_is_refused(
    checkpoints: Path, tmp_path: Path, engine: Callable[..., Any]
) -> None:
    lucid = json.loads((checkpoints / "gemma3" / "config.json").read_text())["lucid"] | {"center": "calibrated"}
    folder = changed(checkpoints / "gemma3", tmp_path / "gemma3", lucid=lucid)
    with pytest.raises(ValueError, match="must have center of layer 1"), engine(folder):
        pass


def test_a_quantized_cache_is_refused(engine: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype = 'auto', got 'fp8"), engine("llama", kv_cache_dtype="fp8"):
        pass


def test_the_architecture_of_a_configuration_with_lucid_stays() -> None:
    config = lucid_config_class("llama")(architectures=["LucidLlamaForCausalLM"])
    with pytest.raises(ValueError, match="softmax attention"):
        config.update({"architectures": ["LlamaForCausalLM"]})


def test_the_plug_in_is_found_by_vllm_and_may_load_twice() -> None:
    from importlib.metadata import entry_points

    assert "lucid_attention" in entry_points(group="vllm.general_plugins").names
    plugin.register()
    plugin.register()
    assert CONFIG_MAPPING["lucid_llama"] is lucid_config_class("llama")
    assert AutoConfig.for_model("llama").architectures is None
