"""Recipes refuse what cannot run, --set changes them, and `lucid train` says what a run needs."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lucid_lab import cli
from lucid_lab.training.recipes import RECIPES, Recipe, find_recipe
from lucid_lab.training.run import chosen_recipe, dry_run, memory_needs, new_config, training_arguments


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_makes_a_model_and_survives_json(name: str) -> None:
    recipe = find_recipe(name)
    assert Recipe(**json.loads(json.dumps(asdict(recipe)))) == recipe
    assert new_config(recipe, vocab_size=100).vocab_size in (100, recipe.model.get("vocab_size", 100))


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ("learning_rate=1", "learning_rate", 1.0),
        ("steps=1e3", "steps", 1000),
        ("separate_documents=false", "separate_documents", False),
        ("attention=['lucid', 'softmax']", "attention", ["lucid", "softmax"]),
        ("data=3", "data", "3"),
        ("data_options.n=[2, 4]", "data_options", {"n": [2, 4]}),
        ("rope_theta=1000", "rope_theta", 1000),
    ],
)
def test_a_change_has_the_type_of_its_field(change: str, field: str, value: object) -> None:
    assert getattr(find_recipe("latest_value").changed([change]), field) == value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("stpes=3", r"KEY of --set must be one of .*, got 'stpes' \(did you mean 'steps'\?\)"),
        ("model.hiden_size=3", r"model must be one of .*, got 'hiden_size' \(did you mean 'hidden_size'\?\)"),
        ("steps=0", "steps must be a finite number from 1, got 0"),
        ("steps=1.5", "steps must be of type int, got 1.5"),
        ("steps=true", "steps must be of type int, got True"),
        ("learning_rate=nan", "learning_rate must be of type float, got 'nan'"),
        ("learning_rate=-1", "learning_rate must be a finite number from 0, got -1"),
        ("warmup=1e999", "warmup must be a finite number from 0, got inf"),
        ("attention=lucidd", r"attention must be one of .*did you mean 'lucid'"),
        ("preset=tinny", r"preset must be one of .*did you mean 'tiny'"),
        ("precision=bf16", "precision must be one of float32, bfloat16"),
        ("micro_batch_size=3", "batch_size must be a multiple of micro_batch_size: got 32 and 3"),
        ("steps", "a change must be KEY=VALUE, got 'steps'"),
        ("steps.a=1", "steps has no parts"),
    ],
)
def test_a_wrong_change_is_refused(change: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_recipe("latest_value").changed([change])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("dtype=float8", "model: module 'torch' has no attribute 'float8'"),
        ("pad_token_id=99999", "pad_token_id must be below vocab_size = 100, got 99999"),
        ("num_hidden_layers=1000000000", "num_hidden_layers must be at most 10000, got 1000000000"),
    ],
)
def test_a_model_that_cannot_be_made_is_refused(change: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        new_config(find_recipe("latest_value").changed([f"model.{change}"]), vocab_size=100)


def test_the_optimiser_gets_every_number_of_the_recipe(tmp_path: Path) -> None:
    recipe = find_recipe("finetune_64k")
    arguments = training_arguments(replace(recipe, precision="float32"), tmp_path, 1, 16)
    names = ("learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm")
    assert [getattr(arguments, name) for name in names] == [5e-6, 0.9, 0.99, 1e-12, 0.01, 1.0]
    assert arguments.warmup_steps == 30


@pytest.mark.parametrize(("batch_size", "processes", "expected"), [(8, 1, 8), (12, 1, 6), (12, 2, 6), (7, 1, 7)])
def test_a_new_batch_size_brings_its_micro_batch_size(batch_size: int, processes: int, expected: int) -> None:
    recipe = find_recipe("tiny_lm").changed([f"batch_size={batch_size}"], processes)
    assert recipe.micro_batch_size == expected
    assert recipe.batch_size % (processes * expected) == 0


def test_options_of_the_command_change_the_recipe() -> None:
    recipe = chosen_recipe("latest_value", attention="softmax", data="needles", seed=3, changes=["steps=7"])
    assert (recipe.attention, recipe.data, recipe.data_options, recipe.seed, recipe.steps) == (
        "softmax",
        "needles",
        {},
        3,
        7,
    )
    with pytest.raises(ValueError, match="holds no model to start from"):
        chosen_recipe("tiny_lm", start="nowhere")
    with pytest.raises(ValueError, match="--attention is for new models"):
        chosen_recipe("tiny_lm", start="nowhere", attention="lucid")


def test_the_command_lists_shows_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in RECIPES)
    assert cli.main(["train", "tiny_lm", "--show", "--set", "steps=3"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 3
    assert cli.main(["train", "tiny_lmm"]) == 1
    assert "there is no recipe 'tiny_lmm' (did you mean 'tiny_lm'?)" in capsys.readouterr().err
    assert cli.main(["train", "tiny_lm", "--data", "nowhere"]) == 1
    assert "nowhere: there is no such folder of tokens. Make one with: lucid tokenize" in capsys.readouterr().err
    assert not Path("runs/tiny_lm-lucid-0").exists()


def test_a_dry_run_counts_the_model_and_divides_it_with_fsdp(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "finetune_64k", "--dry-run", "--gpus", "8", "--parallel", "fsdp"]) == 0
    out = capsys.readouterr().out
    assert "steps: 500 of 16 × 65,536 tokens, 524,288,000 in all" in out
    assert "data/dolma, which does not exist yet" in out
    recipe = find_recipe("latest_value")
    (line, *_) = dry_run(recipe)
    from transformers import AutoModelForCausalLM

    from lucid_attention import enable_lucid

    enable_lucid()
    model = AutoModelForCausalLM.from_config(new_config(recipe))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert f"{count:,} parameters" in line
    alone, divided = memory_needs(recipe, model), memory_needs(recipe, model, 4, "fsdp")
    assert alone["weights"] == 4 * count == alone["optimiser"] // 2
    assert divided["weights"] == count
    assert divided["activations"] == alone["activations"]
