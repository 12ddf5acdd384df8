"""`lucid convert`: from a checkpoint of an existing architecture to one that uses LUCID."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from lucid_attention import enable_lucid
from lucid_attention.models import convert as conversion
from lucid_attention.models.convert import ConversionError, convert, read_layers
from lucid_lab import cli
from tests.models.decoder.cases import decoder

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS = ["sliding_attention", "full_attention", "full_attention"]
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "gemma3": Gemma3TextConfig(**SIZES, sliding_window=4, layer_types=KINDS),
}
IDS = torch.arange(2, 22).repeat(2, 1) % 7 + 3


@pytest.fixture(params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(tmp_path / "original", CONFIGS[request.param])


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write(tmp_path / "original", CONFIGS["llama"])


def write(folder: Path, config: Any) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.ndim == 2 else 1)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder).eval()(IDS).logits


def test_strength_zero_is_exactly_the_original_model_and_one_is_lucid(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, tmp_path / "zero", strength=0)
    convert(checkpoint, tmp_path / "one")
    original = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    with torch.no_grad():
        before = original(IDS).logits
        after = enable_lucid(original)(IDS).logits
    assert torch.equal(logits(tmp_path / "zero"), before)
    assert torch.equal(logits(tmp_path / "one"), after)
    assert (after - before).abs().max() > 0.01 * before.abs().max()


def test_chosen_layers_are_those_of_the_checkpoint(llama: Path, tmp_path: Path) -> None:
    settings = convert(llama, tmp_path / "out", layers=[2], strength=0.5, sharpness=3.0)
    assert settings.layers == (2,)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.lucid == {
        "layers": [2],
        "strength": 0.5,
        "sharpness": 3.0,
        "learned": [],
        "center": "none",
        "whiten": False,
    }
    assert not torch.equal(logits(tmp_path / "out"), logits(llama))


def test_a_converted_checkpoint_can_be_converted_again(llama: Path, tmp_path: Path) -> None:
    convert(llama, tmp_path / "out", layers=[1], strength=0)
    settings = convert(tmp_path / "out", tmp_path / "again", strength=1)
    assert (settings.layers, settings.strength) == ((1,), 1), "what is not given stays"
    assert convert(tmp_path / "out", tmp_path / "all", layers="all").layers is None


def test_everything_but_the_configuration_is_copied_byte_by_byte(llama: Path, tmp_path: Path) -> None:
    (llama / "checkpoint-5").mkdir()
    (llama / "checkpoint-5" / "model.safetensors").write_bytes(b"of a training run")
    (llama / ".cache").write_text("hidden")
    (llama / "original").mkdir()
    (llama / "original" / "params.json").write_text("{}")
    convert(llama, tmp_path / "out")
    copied = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert copied == {
        "README.md",
        "config.json",
        "generation_config.json",
        "lucid_checkpoint.py",
        "model.safetensors",
        "original/params.json",
        "softmax_config.json",
        "tokenizer.json",
    }
    for name in copied - {"README.md", "config.json", "lucid_checkpoint.py", "softmax_config.json"}:
        assert (tmp_path / "out" / name).read_bytes() == (llama / name).read_bytes()
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (llama, tmp_path / "out"))
    assert (after.pop("model_type"), after.pop("architectures")) == ("lucid_llama", ["LucidLlamaForCausalLM"])
    assert after.pop("lucid") == {
        "layers": None,
        "strength": 1.0,
        "sharpness": None,
        "learned": [],
        "center": "none",
        "whiten": False,
    }
    assert after.pop("attn_implementation") == "lucid"
    assert after.pop("auto_map") == {"AutoConfig": "lucid_checkpoint.LucidLlamaConfig"}
    assert after == {name: value for name, value in before.items() if name not in ("model_type", "architectures")}


def test_to_softmax_gives_the_plain_checkpoint_back(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, tmp_path / "lucid", strength=0.5)
    assert convert(tmp_path / "lucid", tmp_path / "plain", to="softmax") is None
    for file in (path for path in checkpoint.rglob("*") if path.is_file()):
        assert (tmp_path / "plain" / file.name).read_bytes() == file.read_bytes(), file.name
    assert torch.equal(logits(tmp_path / "plain"), logits(checkpoint))


CARD = "---\nlicense: mit\n---\n# The original\n\nIts text.\n"


def test_the_model_card_says_what_lucid_is_and_keeps_the_original(llama: Path, tmp_path: Path) -> None:
    (llama / "README.md").write_text(CARD)
    convert(llama, tmp_path / "out", layers=[0, 2], strength=0.5, sharpness=3.0)
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n---\n")
    assert card.endswith("# The original\n\nIts text.\n")
    for fact in ("enable_lucid()", "from_pretrained", "0, 2 of 3", "| strength s | 0.5", "| sharpness c | 3 |"):
        assert fact in card
    convert(tmp_path / "out", tmp_path / "again", strength=1, layers="all")
    again = (tmp_path / "again" / "README.md").read_text()
    assert "0, 1, 2 of 3" in again
    assert "| strength s | 1 (" in again
    assert again.count("enable_lucid()") == again.count("# The original") == 1
    convert(tmp_path / "again", tmp_path / "plain", to="softmax")
    assert (tmp_path / "plain" / "README.md").read_text() == CARD


def test_the_model_card_warns_of_large_heads_at_the_default_sharpness(tmp_path: Path) -> None:
    large = write(tmp_path / "large", LlamaConfig(**{**SIZES, "head_dim": 64, "num_hidden_layers": 1}))
    convert(large, tmp_path / "default")
    convert(large, tmp_path / "sharp", sharpness=4.0)
    assert "nearly softmax attention" in (tmp_path / "default" / "README.md").read_text()
    assert "nearly softmax attention" not in (tmp_path / "sharp" / "README.md").read_text()


def test_to_softmax_is_for_checkpoints_with_lucid_and_takes_no_settings(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConversionError, match="has no LUCID"):
        convert(llama, out, to="softmax")
    with pytest.raises(ConversionError, match=r"to must be one of lucid, softmax, got 'sdpa'"):
        convert(llama, out, to="sdpa")
    convert(llama, tmp_path / "lucid")
    with pytest.raises(ConversionError, match=r"--strength is a setting of LUCID.*got 0\.5"):
        convert(tmp_path / "lucid", out, to="softmax", strength=0.5)
    decoder().save_pretrained(tmp_path / "own")
    with pytest.raises(ConversionError, match="is a LucidForCausalLM"):
        convert(tmp_path / "own", out, to="softmax")
    assert not out.exists()


def test_a_conversion_that_cannot_be_made_is_refused_with_the_reason(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"local folder.*hf download org/model"):
        convert("org/model", out)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=r"config\.json"):
        convert(empty, out)
    (empty / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="weights"):
        convert(empty, out)
    with pytest.raises(ConversionError, match=r"OUT must be new.*original"):
        convert(llama, llama)
    with pytest.raises(ConversionError, match="inside"):
        convert(llama, llama / "inside")
    with pytest.raises(ConversionError, match="0 to 2, got 3"):
        convert(llama, out, layers=[3])
    with pytest.raises(ConversionError, match="strength"):
        convert(llama, out, strength=1.5)
    (llama / "config.json").write_text("{ not json")
    with pytest.raises(ValueError, match=r"config\.json: not JSON"):
        convert(llama, out)
    assert not out.exists()
    assert not list(tmp_path.glob("*.partial"))


def test_a_window_is_refused(tmp_path: Path) -> None:
    gemma = write(tmp_path / "gemma", CONFIGS["gemma3"])
    with pytest.raises(ConversionError, match=r"layer 0 has 'sliding_attention'.*\[1, 2\]"):
        convert(gemma, tmp_path / "out", layers=[0])


def test_an_interrupted_conversion_leaves_nothing_behind(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(conversion.shutil, "copy2", full)
    with pytest.raises(OSError, match="No space"):
        convert(llama, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["original"]


def test_too_little_disk_space_is_noticed_before_anything_is_copied(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda path: argparse.Namespace(free=10))
    with pytest.raises(ConversionError, match=r"OUT needs .* GB"):
        convert(llama, tmp_path / "out")


@pytest.mark.parametrize(("text", "layers"), [("all", "all"), ("3", [3]), ("0,2,8-11", [0, 2, 8, 9, 10, 11])])
def test_layers_are_read(text: str, layers: list[int] | str) -> None:
    assert read_layers(text) == layers


@pytest.mark.parametrize("text", ["", "a", "1-", "5-3", "1;2", "-1", "0-1000000000000"])
def test_other_layers_are_refused(text: str) -> None:
    with pytest.raises(ConversionError, match="0,2,8-11"):
        read_layers(text)


def test_the_command_says_what_it_did_and_how_to_go_on(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert cli.main(["convert", str(llama), str(out), "--layers", "1-2", "--strength", "0"]) == 0
    shown = capsys.readouterr().out
    assert "strength 0 in 2 of 3 layers" in shown
    assert "enable_lucid()" in shown
    assert cli.main(["convert", str(llama), str(out)]) == 1
    assert "lucid convert: error: OUT must be new" in capsys.readouterr().err
    assert cli.main(["convert", str(out), str(tmp_path / "plain"), "--to", "softmax"]) == 0
    assert "a plain llama with softmax attention" in capsys.readouterr().out
