"""The one module that opens checkpoint folders, and the rule that no other module does."""

import ast
import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from lucid_attention.models import DTYPES, checkpoint
from lucid_attention.models.checkpoint import (
    CheckpointError,
    check_checkpoint,
    checkpoint_name,
    load_config,
    load_model,
    load_tokenizer,
    weight_files,
)
from lucid_attention.models.convert import ConversionError, convert
from lucid_attention.models.decoder.modeling import LucidForCausalLM
from lucid_lab.training.presets import tiny

ROOT = Path(checkpoint.__file__).parents[2]
# `lucid tokenize --tokenizer` also takes names of the hub, and `data` may not import `models`. The count of steps of
# conjugate gradients watches the keys of any model, encoders too.
ALLOWED = ("lucid_attention/models/checkpoint.py", "lucid_lab/bench/blocks.py", "lucid_lab/data/tokenize.py")


@cache
def loading_calls() -> dict[str, list[ast.Call]]:
    """Calls of a method `from_pretrained` in a package, by file. Examples in docstrings are not calls."""
    calls: dict[str, list[ast.Call]] = {}
    for file in sorted([*(ROOT / "lucid_attention").rglob("*.py"), *(ROOT / "lucid_lab").rglob("*.py")]):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or getattr(node.func, "attr", "") != "from_pretrained":
                continue
            # The configuration of an adapter: PEFT reads one JSON file.
            if getattr(node.func.value, "id", "") != "PeftConfig":  # type: ignore[attr-defined]
                calls.setdefault(file.relative_to(ROOT).as_posix(), []).append(node)
    return calls


def test_no_other_module_opens_a_checkpoint() -> None:
    assert set(loading_calls()) == set(ALLOWED)


@pytest.mark.parametrize("file", ALLOWED)
def test_every_loading_call_refuses_code_of_the_checkpoint(file: str) -> None:
    for call in loading_calls()[file]:
        options = {keyword.arg: keyword.value for keyword in call.keywords}
        value = options.get("trust_remote_code")
        assert isinstance(value, ast.Constant), f"{file}:{call.lineno}"
        assert value.value is False, f"{file}:{call.lineno}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "model"
    LucidForCausalLM(tiny()).to(torch.bfloat16).save_pretrained(path)
    return path


def test_a_model_is_loaded_in_the_dtype_that_was_asked_for(folder: Path) -> None:
    assert {name: load_model(folder, name).dtype for name in DTYPES} == {
        "auto": torch.bfloat16,
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }
    model = load_model(str(folder), torch.float64)
    assert model.dtype == torch.float64
    assert not model.training


def test_a_model_is_loaded_with_another_configuration(folder: Path) -> None:
    config = load_config(folder)
    config.rope_theta = 7.0
    assert load_model(folder, config=config).config.rope_theta == 7.0
    assert load_model(folder).config.rope_theta == tiny().rope_theta


def test_a_model_of_a_run_has_the_name_of_the_run(folder: Path) -> None:
    assert checkpoint_name(folder) == "run"
    assert checkpoint_name(folder.parent) == "run"
    assert [path.name for path in weight_files(folder)] == ["model.safetensors"]


def test_a_folder_that_is_no_checkpoint_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"must be a local folder, got 'org/model'.* hf download org/model"):
        check_checkpoint(Path("org/model"))
    with pytest.raises(CheckpointError, match=r"must be a folder .*, got the file '.*safetensors'"):
        check_checkpoint(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"must hold a config\.json.* Did you mean '.*model'\?"):
        check_checkpoint(folder.parent)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="must hold weights"):
        load_model(folder)


class Code:
    """A pickle of this makes the folder `marker` when it is read by an unsafe reader."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def change_config(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(
        json.dumps((json.loads((folder / "config.json").read_text())) | changes)
    )


def put(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def binary(content: Any) -> Callable[[Path], object]:
    """Weights in torch's old format instead of the safe one. content: bytes of the file, or an object to save."""

    def damage(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        file = folder / "pytorch_model.bin"
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            torch.save(content(folder) if callable(content) else content, file)

    return damage


def without_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def change_weight(value: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        weights["model.norm.weight"][1] = value
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-40])


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (put("model.safetensors", b"nothing"), "model.safetensors: damaged weights: .*header"),
    "cut weights": (cut, "model.safetensors: damaged weights: "),
    "a weight that is missing": (without_a_weight, "lacks 1, among them model.norm.weight"),
    "a weight that is no number": (change_weight(float("nan")), r"must hold finite weights, got others in model\.norm"),
    "a weight that is infinite": (change_weight(-float("inf")), r"must hold finite weights, got others in model\.norm"),
    "fewer layers": (
        change_config(num_hidden_layers=1),
        r"fewer layers than its weights, among them model\.layers\.1\.",
    ),
    "code in a pickle": (binary(lambda folder: {"a": Code(folder / "marker")}), "other than tensors, which could run"),
    "no pickle": (binary(b"garbage" * 99), "its weights are damaged"),
    "an empty pickle": (binary(b""), "cannot be loaded: EOFError"),
    "a pickled list": (binary([1, 2]), "cannot be loaded: "),
    "half a configuration": (put("config.json", b"{ not json"), r"config.json: not JSON"),
    "a configuration that is a list": (put("config.json", b"[]"), "config.json: expected an object, got a list"),
    "a deep configuration": (put("config.json", b"[" * 200_000), "config.json: .* nested too deeply"),
    "a configuration in UTF-16": (put("config.json", "{}".encode("utf-16")), "config.json: expected text in UTF-8"),
    "a size that is text": (change_config(hidden_size="x"), "cannot be loaded: .*hidden_size"),
    "a billion layers": (change_config(num_hidden_layers=10**9), "at most 10000, got 1000000000"),
    "a pipe": (lambda folder: os.mkfifo(folder / "special_tokens_map.json"), "special_tokens_map.json"),
    "an unknown dtype": (change_config(dtype="zzz"), "cannot be loaded: .*zzz"),
    "a quantization that is a list": (change_config(quantization_config=[1]), "cannot be loaded: "),
    "generation settings that are a list": (put("generation_config.json", b"[1]"), "generation_config.json: expected"),
    "an index that is a list": (put("model.safetensors.index.json", b"[]"), "index.json: expected an object"),
    "an index that leads elsewhere": (
        put("model.safetensors.index.json", b'{"weight_map": {"a": "../x.safetensors"}}'),
        "index.json: weight_map must map",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_checkpoint_is_refused_by_name(damage: Callable[[Path], object], message: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(CheckpointError, match=f"(?s){folder}.*{message}") as refused:
        load_model(folder)
    assert "weights_only" not in str(refused.value)
    assert not (folder / "marker").exists()


def test_a_damaged_configuration_and_tokenizer_are_refused_by_name(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: expected an object, got a list"):
        load_tokenizer(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json: expected an object, got a list"):
        load_config(folder)


def test_weights_that_another_configuration_adds_are_new(folder: Path) -> None:
    without_a_weight(folder)
    assert load_model(folder, config=load_config(folder)).model.norm.weight.isfinite().all()


def test_a_reason_that_lists_every_model_is_cut(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    with pytest.raises(CheckpointError) as refused:
        load_config(folder)
    assert len(str(refused.value)) < 800


def test_a_folder_without_a_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no tokenizer that can be loaded"):
        load_tokenizer(folder)
    with pytest.raises(CheckpointError, match="must be local, got 'org/model'"):
        load_tokenizer("org/model")


def test_a_tokenizer_that_makes_no_tokens_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"fast form \(tokenizer\.json\)"):
        load_tokenizer(tmp_path)


def own_code(folder: Path, marker: Path, files: dict[str, Any]) -> Path:
    """A checkpoint that brings code, which makes the folder `marker` when it is run."""
    (folder / "own.py").write_text(
        f"import os\nos.mkdir({str(marker)!r})\nclass Config: ...\nclass Model: ...\nclass Tokenizer: ...\n"
    )
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


MODEL = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
# T5 is known to Transformers, but not as a causal model: without a refusal the checkpoint's class would be used.
KNOWN_CONFIG = {"model_type": "t5", "auto_map": {"AutoModelForCausalLM": "own.Model"}}
TOKENIZER = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}}
OPENED: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "configuration": (load_config, {"config.json": MODEL}),
    "model": (load_model, {"config.json": MODEL}),
    "model of a known configuration": (load_model, {"config.json": KNOWN_CONFIG}),
    "tokenizer": (load_tokenizer, {"config.json": MODEL, "tokenizer_config.json": TOKENIZER}),
    "conversion": (lambda folder: convert(folder, folder.parent / "out"), {"config.json": MODEL}),
    "conversion of a known configuration": (
        lambda folder: convert(folder, folder.parent / "out"),
        {"config.json": KNOWN_CONFIG},
    ),
}


@pytest.mark.parametrize(("load", "files"), OPENED.values(), ids=OPENED)
def test_code_of_a_checkpoint_is_never_run_nor_asked_about(
    load: Callable[[Path], Any],
    files: dict[str, Any],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    marker = tmp_path / "marker"
    own = own_code(Path(shutil.copytree(folder, tmp_path / "own")), marker, files)
    # Transformers asks on the terminal where trust_remote_code is left out.
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises((CheckpointError, ConversionError)) as refused:
        load(own)
    # Nobody can follow such an advice here.
    assert "trust_remote_code" not in str(refused.value)
    assert not marker.exists()
    assert "[y/N]" not in capsys.readouterr().out
