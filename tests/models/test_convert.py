"""`lucid convert`: from a checkpoint of an existing architecture to one that uses LUCID."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from lucid_attention import enable_lucid
from lucid_attention.models import convert as conversion
from lucid_attention.models.checkpoint import load_tokenizer
from lucid_attention.models.convert import ConversionError, as_dropin, convert, sample
from lucid_attention.models.preconditioner import LucidSettings
from lucid_lab import cli
from lucid_lab.analysis import conversion as report
from lucid_lab.analysis.conversion import read_layers
from lucid_lab.data.tokenize import train
from tests.models.decoder.cases import decoder

SIZES: dict[str, Any] = {
    "vocab_size": 320,
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
    train([Path(__file__).read_text()], 300).save_pretrained(folder)
    return folder


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder).eval()(IDS).logits


def test_strength_zero_is_exactly_the_original_model_and_one_is_lucid(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, tmp_path / "zero", strength=0)
    convert(checkpoint, tmp_path / "one", keys="raw")
    original = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    with torch.no_grad():
        before = original(IDS).logits
        after = enable_lucid(original)(IDS).logits
    assert torch.equal(logits(tmp_path / "zero"), before)
    assert torch.equal(logits(tmp_path / "one"), after)
    assert (after - before).abs().max() > 0.01 * before.abs().max()


def test_chosen_layers_are_those_of_the_checkpoint(llama: Path, tmp_path: Path) -> None:
    settings = convert(llama, tmp_path / "out", layers=[2], strength=0.5, sharpness=3.0)
    assert settings == LucidSettings((2,), 0.5, 3.0, (), "calibrated", True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.lucid == settings.to_dict()
    assert not torch.equal(logits(tmp_path / "out"), logits(llama))


def keys_of(model: Any, ids: torch.Tensor) -> dict[int, tuple[Any, torch.Tensor]]:
    """By layer: its preconditioner, and the keys [B, H, T, D] that it gets, with softmax attention below it."""
    found = {}
    for module in model.modules():
        if hasattr(module, "lucid"):
            module.lucid.strength.fill_(0)
            index = module.layer_idx
            module.lucid.register_forward_pre_hook(lambda one, k, index=index: found.update({index: (one, k[0])}))
    model(ids)
    return found


@torch.no_grad()
@pytest.mark.parametrize("kind", ["whitened", "centered"])
def test_keys_of_the_sample_are_centred_and_whitened_in_every_layer_and_head(
    kind: str, checkpoint: Path, tmp_path: Path
) -> None:
    texts = [Path(__file__).read_text() * 2, "to in and the x a y z of is " * 90]
    ids, held_out = sample(load_tokenizer(checkpoint), texts)
    assert (ids.shape, held_out.shape) == ((8, 512), (2, 512))
    convert(checkpoint, tmp_path / "out", keys=kind, texts=texts)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    found = keys_of(model, ids)
    assert list(found) == ([1, 2] if "gemma3" in model.config.model_type else [0, 1, 2])
    for one, k in found.values():
        k = k.transpose(0, 1).flatten(1, 2).double()
        u = k - k.mean(1, keepdim=True)
        expected = u
        if kind == "whitened":
            n, D = u.shape[1:]
            scatter = u.mT @ u + D * u.square().mean((1, 2))[:, None, None] * torch.eye(D)
            values, vectors = torch.linalg.eigh(scatter / (n + D))
            expected = u @ (vectors * values.rsqrt()[:, None]) @ vectors.mT
        mapped = (k - one.center.double()[:, None]) @ (torch.eye(8) if one.matrix is None else one.matrix).double()
        torch.testing.assert_close(mapped, expected, rtol=1e-3, atol=1e-3)
        assert k.mean(1).abs().max() > 0.01


def test_a_trained_lucid_model_gets_what_opens_it_and_loses_lucid_again(llama: Path, tmp_path: Path) -> None:
    convert(llama, tmp_path / "out", layers=[1])
    # Training moves the maps into the weights, and drops the code that opens the checkpoint.
    AutoModelForCausalLM.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "trained", max_shard_size="30KB")
    settings = convert(tmp_path / "trained", tmp_path / "again")
    assert settings == LucidSettings((1,), center="calibrated", whiten=True)
    assert (tmp_path / "again" / "lucid_checkpoint.py").exists()
    assert torch.equal(logits(tmp_path / "again"), logits(tmp_path / "out"))
    convert(tmp_path / "again", tmp_path / "plain", to="softmax")
    assert torch.equal(logits(tmp_path / "plain"), logits(llama))
    assert not [path for path in (tmp_path / "plain").rglob("*") if b"lucid" in path.read_bytes()]
    with pytest.raises(ConversionError, match=r"only a checkpoint of another attention .*got strength"):
        convert(tmp_path / "out", tmp_path / "more", strength=0.5)


OWN: dict[str, dict[str, Any]] = {
    "llama": {
        "attention": ["lucid", "softmax"],
        "attention_options": {"lucid": {"strength": 0.8, "center": "learned", "whiten": True, "learn_sharpness": True}},
        "rope_parameters": {"rope_type": "linear", "factor": 2.0},
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "qwen2": {"attention_options": {"sharpness": 4.0}, "attention_bias": "qkv"},
    "qwen3": {"qk_norm": True},
    "plain": {"attention": "softmax"},
}


@pytest.mark.parametrize("kind", OWN)
def test_the_own_decoder_becomes_an_architecture_of_transformers(kind: str, tmp_path: Path) -> None:
    own = decoder(head_dim=8, **OWN[kind])
    with torch.no_grad():
        for name, x in own.state_dict().items():
            if "key_" in name:
                x.add_(0.3 * torch.randn_like(x))
    own.save_pretrained(tmp_path / "own")
    train([Path(__file__).read_text()], 300).save_pretrained(tmp_path / "own")
    settings = convert(tmp_path / "own", tmp_path / "out")
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert made.config.model_type == ("llama" if kind == "plain" else f"lucid_{kind}")
    assert (settings is None) == (kind == "plain")
    assert (tmp_path / "out" / "lucid_checkpoint.py").exists() == (kind != "plain")
    assert (tmp_path / "out" / "tokenizer.json").exists()
    with torch.no_grad():
        expected = own(IDS).logits
        torch.testing.assert_close(made(IDS).logits, expected, rtol=1e-4, atol=1e-4)
        inputs = {"input_ids": IDS, "max_new_tokens": 8, "do_sample": False}
        assert torch.equal(made.generate(**inputs, cache_implementation="static"), own.generate(**inputs))


NOT_LLAMA: list[tuple[dict[str, Any], str]] = [
    ({"attention": "delta"}, r"expected attention = set\(\), got \{'delta'\}"),
    ({"attention_options": {"norm": "qk"}}, "expected norm = 'key', got 'qk'"),
    ({"attention_options": {"learn_beta": True}}, "expected learn_beta = False, got True"),
    ({"attention_options": {"block": 4}}, "expected block = 1, got 4"),
    ({"attention_options": {"rope_base": 5.0}}, "expected rope_base = 'left out', got 5.0"),
    ({"attention": "softmax", "attention_options": {"rope_base": 5.0}}, "options of softmax"),
    ({"rope_parameters": None}, "rope_parameters"),
    ({"head_dim": 8, "rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"qk_norm": True, "attention_bias": "qkv"}, "attention_bias with qk_norm"),
    ({"qk_norm": True, "rms_norm_eps": 1e-5}, "rms_norm_eps with qk_norm = 1e-06, got 1e-05"),
]


@pytest.mark.parametrize(("fields", "complaint"), NOT_LLAMA)
def test_an_own_decoder_that_no_architecture_has_is_refused(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConversionError, match=complaint):
        as_dropin(decoder(**fields))


def test_weights_in_parts_get_one_more_part_and_lose_it_again(tmp_path: Path, llama: Path) -> None:
    AutoModelForCausalLM.from_pretrained(llama).save_pretrained(tmp_path / "parts", max_shard_size="30KB")
    load_tokenizer(llama).save_pretrained(tmp_path / "parts")
    convert(tmp_path / "parts", tmp_path / "out")
    convert(llama, tmp_path / "whole")
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "whole"))
    convert(tmp_path / "out", tmp_path / "plain", to="softmax")
    files = {path.name: path.read_bytes() for path in (tmp_path / "parts").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "plain").iterdir()} == files
    assert len(files) > 5


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
        "lucid.safetensors",
        "lucid_checkpoint.py",
        "model.safetensors.index.json",
        "original/params.json",
        "softmax.safetensors",
        "softmax_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    for name in ("generation_config.json", "original/params.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (llama / name).read_bytes()
    for name in ("model.safetensors", "config.json"):
        kept = tmp_path / "out" / name.replace("model.", "softmax.").replace("config.", "softmax_config.")
        assert kept.read_bytes() == (llama / name).read_bytes()
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (llama, tmp_path / "out"))
    assert (after.pop("model_type"), after.pop("architectures")) == ("lucid_llama", ["LucidLlamaForCausalLM"])
    assert after.pop("lucid") == LucidSettings(center="calibrated", whiten=True).to_dict()
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
    for fact in (
        "enable_lucid()",
        "from_pretrained",
        "0, 2 of 3",
        "| strength s | 0.5",
        "| sharpness c | 3 |",
        "| whitened |",
    ):
        assert fact in card
    convert(tmp_path / "out", tmp_path / "again")
    assert (tmp_path / "again" / "README.md").read_text() == card
    convert(tmp_path / "again", tmp_path / "plain", to="softmax")
    assert (tmp_path / "plain" / "README.md").read_text() == CARD


def test_to_softmax_is_for_checkpoints_with_lucid_and_takes_no_settings(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConversionError, match="needs a checkpoint of Transformers' architectures with LUCID"):
        convert(llama, out, to="softmax")
    with pytest.raises(ConversionError, match=r"to must be lucid or softmax, got 'sdpa'"):
        convert(llama, out, to="sdpa")
    convert(llama, tmp_path / "lucid")
    with pytest.raises(
        ConversionError, match="only a checkpoint of another attention takes settings of LUCID, got strength"
    ):
        convert(tmp_path / "lucid", out, to="softmax", strength=0.5)
    decoder().save_pretrained(tmp_path / "own")
    with pytest.raises(ConversionError, match="convert it to a model with LUCID first"):
        convert(tmp_path / "own", out, to="softmax")
    assert not out.exists()


def test_links_of_the_cache_of_the_hub_are_followed(llama: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "cache" / "snapshots" / "0", tmp_path / "cache" / "blobs"
    llama.rename(snapshot.parent.mkdir(parents=True) or blobs)
    snapshot.mkdir()
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    convert(snapshot, tmp_path / "out")
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


def test_a_conversion_that_cannot_be_made_is_refused_with_the_reason(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.chdir(empty)
    (empty / "config.json").unlink()
    with pytest.raises(ValueError, match=r"must have a name of its own, got '\.'"):
        convert(llama, ".")
    (llama / "notes.txt").symlink_to("/etc/passwd")
    with pytest.raises(ConversionError, match="is a link out of CHECKPOINT, to /etc/passwd"):
        convert(llama, out)
    (llama / "notes.txt").unlink()
    with pytest.raises(ConversionError, match="0 to 2, got 3"):
        convert(llama, out, layers=[3])
    with pytest.raises(ConversionError, match="strength"):
        convert(llama, out, strength=1.5)
    with pytest.raises(ConversionError, match="keys must be one of whitened, centered, raw, got 'white'"):
        convert(llama, out, keys="white")
    with pytest.raises(ConversionError, match=r"cannot be calibrated: the texts must have at least 1024 tokens, got 3"):
        convert(llama, out, texts=["a b"])
    (llama / "tokenizer.json").rename(llama / "away")
    with pytest.raises(ConversionError, match=r"has no tokenizer.*keys='raw' needs no calibration"):
        convert(llama, out)
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


@pytest.mark.parametrize(("text", "layers"), [("all", "all"), ("3", [3]), ("0,2,8-11", [0, 2, 8, 9, 10, 11])])
def test_layers_are_read(text: str, layers: list[int] | str) -> None:
    assert read_layers(text) == layers


@pytest.mark.parametrize("text", ["", "a", "1-", "5-3", "1;2", "-1", "0-1000000000000"])
def test_other_layers_are_refused(text: str) -> None:
    with pytest.raises(ConversionError, match="0,2,8-11"):
        read_layers(text)


def test_the_command_measures_the_loss_before_and_after(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    text = tmp_path / "text.txt"
    text.write_text("the a of is to in and x y " * 400)
    assert cli.main(["convert", str(llama), str(out), "--layers", "1-2", "--calibrate", str(text)]) == 0
    shown = capsys.readouterr().out
    assert "LUCID in 2 of 3 layers, whitened keys, sharpness √D = 2.828, strength 1\n  layers 1, 2" in shown
    ids = sample(load_tokenizer(llama), [text.read_text()])[1]
    with torch.no_grad():
        before, after = (float(AutoModelForCausalLM.from_pretrained(x)(ids, labels=ids).loss) for x in (llama, out))
    rows = {line.split("  ")[0].strip(): line.split()[-2:] for line in shown.splitlines()}
    assert rows["softmax, before"][-1] == f"{before:.4f}"
    assert rows["LUCID, as written"] == [f"{after:.4f}", f"{after - before:+.4f}"]
    assert [line.split(":")[0].strip() for line in shown.splitlines() if ": +" in line or ": -" in line] == ["1"]
    assert "enable_lucid()" in shown
    assert "BROKEN" not in shown
    monkeypatch.setattr(report, "BROKEN", -9.0)
    assert cli.main(["convert", str(llama), str(tmp_path / "raw"), "--keys", "raw"]) == 0
    assert "This model is BROKEN" in capsys.readouterr().out
    assert cli.main(["convert", str(llama), str(out)]) == 1
    assert "lucid convert: error: OUT must be new" in capsys.readouterr().err
    assert cli.main(["convert", str(out), str(tmp_path / "plain"), "--to", "softmax"]) == 0
    assert "a plain llama with softmax attention" in capsys.readouterr().out
