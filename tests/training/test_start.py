"""Starting from a trained model, ours or converted, with another length, rotary base and strength."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

from lucid_attention import enable_lucid
from lucid_attention.models.ramps import sharpness_of, strength_of
from lucid_lab.data.synthetic import Needles
from lucid_lab.training.inputs import Inputs, attention_of, make_model
from lucid_lab.training.recipes import tiny_needle

from .running import METRICS, assert_same, finished, killed, losses, lucid, read_metrics, weights, words

SHAPE: dict[str, Any] = {
    "vocab_size": Needles().vocab_size,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 20,
}


def words_from(out: Path, start: Path, *more: str, **changes: Any) -> list[str]:
    argv = words("tiny_needle", out, "--from", str(start), *more, **changes)
    return [word for word in argv if not word.startswith("--set=model.")]


def converted(folder: Path, config: Any, strength: float = 0.0) -> Path:
    """A checkpoint that `lucid convert` made from a model of Transformers."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "stock")
    ended = lucid(["convert", str(folder / "stock"), str(folder / "lucid"), "--strength", str(strength)])
    assert ended.code == 0, ended
    return folder / "lucid"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(tmp_path_factory.mktemp("llama"), LlamaConfig(**SHAPE))


def first_model(start: Path, **changes: Any) -> Any:
    """The model of a run from a checkpoint, before its first step."""
    nothing: Any = []
    recipe = replace(tiny_needle(), start=str(start), model={}, **changes)
    return make_model(recipe, Inputs(nothing, nothing, SHAPE["vocab_size"], None))


def test_our_model_keeps_its_weights_with_another_length_and_rotary_base(whole: Path) -> None:
    model = first_model(whole / "model", sequence_length=129, rope_theta=64_000.0)
    assert model.config.max_position_embeddings == 129
    assert model.config.rope_theta == 64_000
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in weights(whole).items())
    # The rotary base changes the output.
    ids = torch.randint(1, 100, (1, 60))
    assert not torch.allclose(model(ids).logits, first_model(whole / "model").eval()(ids).logits, atol=1e-4)
    fresh = AutoModelForCausalLM.from_config(model.config)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(model(ids).logits, fresh(ids).logits)


def test_a_shorter_sequence_does_not_shorten_the_model(whole: Path) -> None:
    assert first_model(whole / "model", sequence_length=10).config.max_position_embeddings == 33


def test_a_converted_model_keeps_its_weights_with_another_length_and_rotary_base(llama: Path) -> None:
    enable_lucid()
    before = AutoModelForCausalLM.from_pretrained(llama)
    model = first_model(llama, sequence_length=129, rope_theta=64_000.0)
    assert model.config._attn_implementation == before.config._attn_implementation == "lucid"
    assert model.config.max_position_embeddings == 129
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in before.state_dict().items())
    frequencies = [candidate.model.rotary_emb.inv_freq for candidate in (before, model)]
    torch.testing.assert_close(frequencies[0], 10_000 ** -(torch.arange(4) / 4))
    torch.testing.assert_close(frequencies[1], 64_000 ** -(torch.arange(4) / 4))


def test_layers_with_a_window_keep_their_rotary_base(tmp_path: Path) -> None:
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
    start = converted(tmp_path, Gemma3TextConfig(**{**SHAPE, **layers}))
    model = first_model(start, rope_theta=64_000.0)
    rotary = model.model.rotary_emb
    torch.testing.assert_close(rotary.full_attention_inv_freq, 64_000 ** -(torch.arange(4) / 4))
    torch.testing.assert_close(rotary.sliding_attention_inv_freq, 10_000 ** -(torch.arange(4) / 4))
    assert "rope_theta" not in model.config.rope_parameters


def test_a_ramp_raises_the_strength_of_a_converted_model(llama: Path, tmp_path: Path) -> None:
    run = finished(words_from(tmp_path / "run", llama, strength_steps=4, rope_theta=500, evaluate_every=8))
    entries = [entry for entry in read_metrics(run / METRICS) if "loss" in entry]
    assert [entry["lucid_strength"] for entry in entries] == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1])
    enable_lucid()
    assert strength_of(AutoModelForCausalLM.from_pretrained(run / "model")) == 1
    assert (json.loads((run / "model" / "config.json").read_text()))["rope_parameters"]["rope_theta"] == 500
    # The ramp starts at strength 0: a run that stays at 0 has the same first loss.
    plain = finished(words_from(tmp_path / "plain", llama, rope_theta=500))
    assert losses(plain)[1] == losses(run)[1]
    assert losses(plain)[8] != losses(run)[8]


def test_a_ramp_lowers_the_sharpness_of_a_converted_model(llama: Path, tmp_path: Path) -> None:
    settings = {"sharpness_steps": 4, "sharpness_start": 32, "sharpness_end": 2.0}
    run = finished(words_from(tmp_path / "run", llama, **settings))
    entries = [entry for entry in read_metrics(run / METRICS) if "loss" in entry]
    assert [entry["lucid_sharpness"] for entry in entries] == pytest.approx([16, 8, 4, 2, 2, 2, 2, 2])
    enable_lucid()
    assert sharpness_of(AutoModelForCausalLM.from_pretrained(run / "model")) == 2


def test_a_ramp_is_resumed(llama: Path, tmp_path: Path) -> None:
    argv = words_from(tmp_path / "run", llama, strength_steps=0.75)
    killed(argv, 6)
    assert lucid(argv).code == 0
    assert_same(tmp_path / "run", finished(words_from(tmp_path / "whole", llama, strength_steps=0.75)))


def test_a_ramp_without_lucid_layers_is_refused(tmp_path: Path) -> None:
    ended = lucid(words("tiny_needle", tmp_path / "run", "--attention", "softmax", strength_steps=4))
    assert ended.code == 1
    assert "must have LUCID layers" in ended.err
    assert "Traceback" not in ended.err


def test_a_run_starts_from_a_checkpoint_of_another_run(whole: Path, tmp_path: Path) -> None:
    run = finished(words_from(tmp_path / "run", whole / "checkpoint-8", sequence_length=65, steps=2))
    assert losses(run)[1] < losses(whole)[1]
    recipe = json.loads((run / "recipe.json").read_text())
    assert (recipe["start"], recipe["attention"], recipe["model"]) == (str(whole / "checkpoint-8"), "lucid", {})


def test_the_attention_is_that_of_the_checkpoint(llama: Path, whole: Path, tmp_path: Path) -> None:
    assert attention_of(str(llama)) == attention_of(str(whole / "model")) == "lucid"
    assert attention_of(str(llama.parent / "stock")) == "softmax"
    ended = lucid(words_from(tmp_path / "run", whole / "model", "--attention", "softmax"))
    assert ended.code == 1
    assert "--attention is for new models" in ended.err


def test_a_new_shape_for_a_trained_model_is_refused(whole: Path, tmp_path: Path) -> None:
    ended = lucid([*words_from(tmp_path / "run", whole / "model"), "--set=model.hidden_size=64"])
    assert ended.code == 1
    assert "model and attention_options are for new models" in ended.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("exists", [False, True], ids=["no folder", "no model"])
def test_a_start_without_a_model_is_named(exists: bool, tmp_path: Path) -> None:
    start = tmp_path / "start"
    if exists:
        start.mkdir()
    ended = lucid(words_from(tmp_path / "run", start))
    assert ended.code == 1
    assert f"{start}: holds no model to start from" in ended.err
    assert "Traceback" not in ended.err


def test_data_of_another_vocabulary_are_refused(
    whole: Path, language_model: Path, tokens: Path, tmp_path: Path
) -> None:
    ended = lucid(words_from(tmp_path / "run", whole / "model", data_options__keys=200))
    assert ended.code == 1
    assert "tokenize the data with the model's own tokenizer" in ended.err
    folder = tokens.parent / "others"
    texts = str(tokens.parent / "texts")
    assert lucid(["tokenize", texts, str(folder), "--tokenizer=train:270", "--validation=0.3"]).code == 0
    argv = words("tiny_lm", tmp_path / "run", "--data", str(folder), "--from", str(language_model / "model"))
    ended = lucid([word for word in argv if not word.startswith(("--set=model.", "--set=data_options"))])
    assert ended.code == 1
    assert "made with another tokenizer" in ended.err
    assert "Traceback" not in ended.err
