"""Changes of a recipe that no machine can run are refused with a sentence, before anything is allocated."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lucid_attention import memory
from lucid_attention.models.decoder.modeling import LucidForCausalLM
from lucid_lab.training import limits
from lucid_lab.training.inputs import new_config
from lucid_lab.training.recipes import RECIPES, tiny_lm, tiny_needle

from .running import lucid, words

REFUSED = {
    "model.hidden_size=1e9": r"parameters needs at least [\d,.]+ GB.*lower model.hidden_size=1000000000",
    "model.num_hidden_layers=1e9": r"lower model.num_hidden_layers=1000000000",
    "model.intermediate_size=1e12": r"lower model.intermediate_size=1000000000000",
    "model.vocab_size=1e11": r"lower model.vocab_size=100000000000",
    "model.head_dim=1e9": r"lower model.head_dim=1000000000",
    "model.num_attention_heads=1e10": r"lower model.num_attention_heads=10000000000",
    "model.hidden_size=0": r"model.hidden_size must be an integer from 1 on, got 0",
    "model.hidden_size=1.5": r"model.hidden_size must be an integer from 1 on, got 1.5",
    "model.hidden_size=nan": r"model.hidden_size must be an integer from 1 on, got 'nan'",
    "model.initializer_range=nan": r"model.initializer_range must be a finite number above 0, got 'nan'",
    "model.initializer_range=-1": r"model.initializer_range must be a finite number above 0, got -1",
    "model.initializer_range=1e999": r"model.initializer_range must be a finite number above 0, got inf",
    "model.vocab_size=5": r"model.vocab_size must be at least 161, the vocabulary of the data, got 5",
    "model.hidden_act=3": r"hidden_act must be an activation of Transformers, got '3'",
    "model.use_cache=7": r"model: .*use_cache",
    "batch_size=1e12": r"batch_size must be at most 16519104 sequences of 65 tokens, 1,073,741,824 tokens, got 1000000",
    "evaluation_sequences=1e12": r"evaluation_sequences must be at most 16519104 sequences",
    "sequence_length=1e12": r"batch_size must be at most 0 sequences of 1000000000000 tokens",
    "steps=1e300": r"steps must be at most 1,073,741,824, got 1000",
    "workers=1e6": r"workers must be at most 1024, got 1000000",
    "seed=1e10": r"seed must be at most 4294967295, got 10000000000",
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_cannot_run_is_refused_before_anything_is_allocated(change: str, tmp_path: Path) -> None:
    key, _, value = change.partition("=")
    ended = lucid(words("tiny_needle", tmp_path / "run", small=False, **{key: value}))
    assert ended.code == 1
    assert re.search(REFUSED[change], ended.err)
    assert "Traceback" not in ended.err
    assert len(ended.err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def check(monkeypatch: pytest.MonkeyPatch, memory: float, **changes: Any) -> None:
    monkeypatch.setattr(limits, "machine_memory", lambda: int(memory))
    limits.check_fits(replace(tiny_lm(), **changes))


def test_the_batch_or_the_preset_is_named_if_it_is_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, 1e9)
    with pytest.raises(ValueError, match=r"lower micro_batch_size=1024 or sequence_length=512"):
        check(monkeypatch, 1e9, batch_size=1024, micro_batch_size=1024)
    with pytest.raises(ValueError, match=r"lower preset=paper_1b"):
        check(monkeypatch, 1e9, preset="paper_1b", model={})
    check(monkeypatch, 100e9, preset="paper_1b", model={})


@pytest.mark.parametrize("name", RECIPES)
def test_the_estimate_is_below_the_parameters_of_every_recipe(name: str) -> None:
    config = new_config(RECIPES[name]())
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in LucidForCausalLM(config).parameters())
    estimate = limits.parameters({size: getattr(config, size) for size in limits.SIZES})
    assert 0.6 * count < estimate <= count


def test_a_container_has_less_memory_than_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(memory, "CONTAINER_LIMIT", tmp_path / "memory.max")
    whole = limits.machine_memory()
    (tmp_path / "memory.max").write_text("max\n")
    assert limits.machine_memory() == whole
    (tmp_path / "memory.max").write_text("1000000\n")
    assert limits.machine_memory() == 1_000_000


@pytest.mark.parametrize(("batch_size", "processes", "expected"), [(2, 1, 2), (24, 1, 12), (64, 1, 16), (8, 2, 4)])
def test_a_batch_size_alone_chooses_the_micro_batch_size(batch_size: int, processes: int, expected: int) -> None:
    recipe = tiny_needle().changed([f"batch_size={batch_size}"], processes)
    assert (recipe.batch_size, recipe.micro_batch_size) == (batch_size, expected)


def test_a_named_micro_batch_size_is_obeyed_or_refused() -> None:
    assert tiny_needle().changed(["batch_size=64", "micro_batch_size=2"]).micro_batch_size == 2
    with pytest.raises(ValueError, match="batch_size must be a multiple of micro_batch_size: got 2 and 16"):
        tiny_needle().changed(["batch_size=2", "micro_batch_size=16"])
