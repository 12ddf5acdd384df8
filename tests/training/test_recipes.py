"""Recipes: the paper's values, and changes that are applied or refused."""

import argparse
import json
from dataclasses import FrozenInstanceError, asdict, replace
from typing import Any

import pytest
import torch

from lucid_attention.models.decoder import presets
from lucid_lab import cli
from lucid_lab.training.arguments import train_arguments
from lucid_lab.training.command import recipe_from
from lucid_lab.training.inputs import Inputs, make_model
from lucid_lab.training.recipe import Recipe, preset_names
from lucid_lab.training.recipes import RECIPES, pretrain_2k, tiny_needle


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_makes_a_model(name: str) -> None:
    recipe = RECIPES[name]()
    nothing: Any = []
    with torch.device("meta"):
        model = make_model(recipe, Inputs(nothing, nothing, 32_000, None))
    assert model.config.vocab_size == 32_000
    assert model.config.max_position_embeddings == recipe.sequence_length
    if recipe.rope_theta is not None:
        assert model.config.rope_theta == recipe.rope_theta
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert (parameters > 5e8) == (recipe.preset != "tiny")


def test_the_recipes_are_those_of_the_paper_and_two_small_ones() -> None:
    ours = {"tiny_lm", "tiny_needle"}
    paper = {"pretrain_2k", "finetune_64k", "context_4k", "context_32k", "babilong", "longbench", "qasper", "qmsum"}
    assert set(RECIPES) == ours | paper
    assert all(make.__name__ == name and make.__doc__ for name, make in RECIPES.items())


def test_pretraining_has_the_values_of_the_paper() -> None:
    r = RECIPES["pretrain_2k"]()
    assert (r.steps, r.batch_size, r.sequence_length) == (11_000, 256, 2048)
    assert (r.learning_rate, r.beta1, r.beta2, r.weight_decay) == (5e-4, 0.9, 0.99, 0.01)
    assert (r.warmup, r.schedule, r.preset, r.precision) == (0.06, "cosine", "paper_1b", "bfloat16")


def test_long_tuning_has_the_values_of_the_paper() -> None:
    r = RECIPES["finetune_64k"]()
    assert (r.steps, r.batch_size, r.sequence_length, r.rope_theta) == (500, 16, 65_536, 64_000)
    assert (r.learning_rate, r.beta1, r.beta2, r.weight_decay) == (5e-4, 0.9, 0.99, 0.01)
    assert (r.preset, r.gradient_checkpointing, r.micro_batch_size) == ("paper_1b", True, 1)
    assert r.loss_rows > 0


@pytest.mark.parametrize(("name", "steps", "tokens"), [("context_4k", 80_000, 2**20), ("context_32k", 25_000, 2**21)])
def test_longer_contexts_have_the_values_of_the_paper(name: str, steps: int, tokens: int) -> None:
    r = RECIPES[name]()
    assert (r.steps, r.batch_size * r.sequence_length, r.preset) == (steps, tokens, "paper_16_layer")


@pytest.mark.parametrize("name", ["pretrain_2k", "finetune_64k", "context_4k", "context_32k"])
def test_documents_see_each_other_in_the_runs_of_the_paper_on_text(name: str) -> None:
    recipe = RECIPES[name]()
    assert recipe.separate_documents is False
    assert recipe.changed(["separate_documents=true"]).separate_documents is True
    assert recipe.data == ("data/dolma-256k" if recipe.preset == "paper_16_layer" else "data/dolma")


@pytest.mark.parametrize("preset", presets.OWN_VOCABULARY)
def test_a_published_shape_keeps_its_vocabulary(preset: str) -> None:
    recipe = replace(pretrain_2k(), preset=preset)
    own = getattr(presets, preset)().vocab_size
    assert own == {"gemma3_1b": 262_144, "gemma3_4b": 262_208, "qwen2_5_1_5b": 151_936}[preset]
    nothing: Any = []
    with torch.device("meta"):
        assert make_model(recipe, Inputs(nothing, nothing, 32_000, None)).config.vocab_size == own
        narrow = replace(recipe, model={"vocab_size": 40_000})
        assert make_model(narrow, Inputs(nothing, nothing, 32_000, None)).config.vocab_size == 40_000
    with pytest.raises(ValueError, match=f"vocab_size must be at least 300000, the vocabulary of the data, got {own}"):
        make_model(recipe, Inputs(nothing, nothing, 300_000, None))


def test_a_recipe_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        tiny_needle().steps = 3  # type: ignore[misc]


def test_a_recipe_can_name_every_preset() -> None:
    assert set(preset_names()) >= {"tiny", "small", "paper_1b", "paper_16_layer", "gemma3_1b"}
    assert all(hasattr(presets, name) and not name.startswith("_") for name in preset_names())
    assert "LucidConfig" not in preset_names()
    assert "every" not in preset_names()


CHANGES: dict[str, tuple[str, Any]] = {
    "learning_rate=3e-4": ("learning_rate", 3e-4),
    "steps=1e3": ("steps", 1000),
    "steps=500": ("steps", 500),
    "steps = 7 ": ("steps", 7),
    "separate_documents=False": ("separate_documents", False),
    "gradient_checkpointing=true": ("gradient_checkpointing", True),
    "attention=softmax": ("attention", "softmax"),
    'attention=["softmax", "lucid"]': ("attention", ["softmax", "lucid"]),
    "data=needles": ("data", "needles"),
    "data=123": ("data", "123"),
    "data=a=b": ("data", "a=b"),
    "start=runs/a/model": ("start", "runs/a/model"),
    "rope_theta=64000": ("rope_theta", 64_000),
    "rope_theta=None": ("rope_theta", None),
    "strength_steps=0.5": ("strength_steps", 0.5),
    "about=of two words": ("about", "of two words"),
    "data_options.n=[1, 2]": ("data_options", {"n": [1, 2]}),
    "model={'head_dim': 8}": ("model", {"head_dim": 8}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_read_in_the_type_of_its_field(change: str) -> None:
    name, value = CHANGES[change]
    new = getattr(tiny_needle().changed([change]), name)
    assert new == value
    assert type(new) is type(value)


def test_a_part_of_a_dictionary_leaves_the_others() -> None:
    new = tiny_needle().changed(["model.head_dim=8", "model.hidden_act=relu"]).model
    assert new == {**tiny_needle().model, "head_dim": 8, "hidden_act": "relu"}
    assert "hidden_act" not in tiny_needle().model


@pytest.mark.parametrize("changes", [["batch_size=4", "micro_batch_size=4"], ["micro_batch_size=64", "batch_size=64"]])
def test_changes_are_checked_together(changes: list[str]) -> None:
    new = tiny_needle().changed(changes)
    assert new.batch_size == new.micro_batch_size


REFUSED = {
    "learning_rat=1": r"a recipe has no 'learning_rat' \(did you mean 'learning_rate'\?\); it has about, preset",
    "modell.head_dim=1": r"a recipe has no 'modell' \(did you mean 'model'\?\)",
    "steps": "a change must be KEY=VALUE, got 'steps'",
    "=3": "a change must be KEY=VALUE, got '=3'",
    "steps.x=3": r"steps has no parts: expected steps=VALUE, got 'steps.x=3'",
    "steps=0": "steps must be an integer from 1 on, got 0",
    "steps=1.5": "steps must be an integer from 1 on, got 1.5",
    "steps=1e999": "steps must be an integer from 1 on, got inf",
    "steps=True": "steps must be an integer from 1 on, got True",
    "steps=many": "steps must be an integer from 1 on, got 'many'",
    "sequence_length=1": "sequence_length must be an integer from 2 on, got 1",
    "seed=-1": "seed must be an integer from 0 on, got -1",
    "learning_rate=-1": "learning_rate must be a finite number from 0 on, got -1",
    "learning_rate=nan": "learning_rate must be a finite number from 0 on, got 'nan'",
    "learning_rate=1e999": "learning_rate must be a finite number from 0 on, got inf",
    "beta2=1": "beta2 must be a number below 1, got 1",
    "warmup=1.5": "warmup must be a number below 1, got 1.5",
    "schedule=linear": "schedule must be one of cosine, constant, got 'linear'",
    "precision=float16": "precision must be one of float32, bfloat16, got 'float16'",
    "separate_documents=maybe": "separate_documents must be True or False, got 'maybe'",
    "separate_documents=1": "separate_documents must be True or False, got 1",
    "model=3": "model must be a dictionary, got 3",
    "preset=tinny": r"preset must be one of .*, got 'tinny' \(did you mean 'tiny'\?\)",
    "attention=lucd": r"attention must be one of .*, got 'lucd' \(did you mean 'lucid'\?\)",
    "attention=['lucid', 'pth']": r"attention must be one of .*, got 'pth' \(did you mean 'path'\?\)",
    "attention=3": "attention must be one of .*, got 3",
    "rope_theta=abc": "rope_theta must be a positive number or None, got str",
    "rope_theta=0": "rope_theta must be .*, got 0",
    "start=3": "start must be a folder or None, got 3",
    "micro_batch_size=3": "batch_size must be a multiple of micro_batch_size: got 16 and 3",
}


@pytest.mark.parametrize("change", REFUSED)
def test_a_wrong_change_is_refused_with_the_nearest_name(change: str) -> None:
    with pytest.raises((ValueError, TypeError), match=REFUSED[change]):
        tiny_needle().changed([change])


@pytest.mark.parametrize("name", RECIPES)
def test_a_shown_recipe_can_be_read_back(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", name, "--show", "--set", "steps=7", "--set=model.head_dim=8", "--seed", "3"]) == 0
    shown = json.loads(capsys.readouterr().out)
    recipe = RECIPES[name]()
    assert Recipe.from_dict(shown) == replace(recipe, steps=7, model={**recipe.model, "head_dim": 8}, seed=3)


def test_a_recipe_with_unknown_or_missing_fields_is_refused() -> None:
    values = asdict(tiny_needle())
    with pytest.raises(ValueError, match=r"a recipe has no 'stepps' \(did you mean 'steps'\?\)"):
        Recipe.from_dict({**values, "stepps": 3})
    with pytest.raises(ValueError, match="a recipe needs data, steps"):
        Recipe.from_dict({name: value for name, value in values.items() if name not in ("steps", "data")})


def test_differences_are_fields_with_both_values() -> None:
    other = replace(tiny_needle(), steps=3, seed=1)
    assert tiny_needle().differences(other) == {"steps": (1000, 3), "seed": (0, 1)}
    assert other.differences(other) == {}


def test_an_unknown_recipe_is_refused_and_the_nearest_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "tiny_need"]) == 1
    message = capsys.readouterr().err
    assert "there is no recipe 'tiny_need' (did you mean 'tiny_needle'?)" in message
    assert all(name in message for name in RECIPES)


def parsed(*argv: str) -> Recipe:
    parser = argparse.ArgumentParser()
    train_arguments(parser)
    return recipe_from(parser.parse_args(argv))


def test_arguments_change_the_recipe() -> None:
    recipe = parsed(
        "tiny_needle", "--attention", "softmax", "--data", "memory_update", "--seed", "4", "--set", "steps=9"
    )
    # The options of the recipe are for its own data: --data removes them.
    expected = {"attention": "softmax", "data": "memory_update", "data_options": {}, "seed": 4, "steps": 9}
    assert recipe == replace(tiny_needle(), **expected)
    assert parsed("pretrain_2k") == pretrain_2k()


def test_the_recipes_are_listed_with_their_tokens_and_rates(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * len(RECIPES)
    for name, first, second in zip(RECIPES, lines[::2], lines[1::2], strict=True):
        assert first.split(maxsplit=1) == [name, RECIPES[name]().about]
        assert RECIPES[name]().preset in second
    pretraining = lines[2 * list(RECIPES).index("pretrain_2k") + 1]
    assert "5,767.2M tokens" in pretraining
    assert "learning rate 0.0005" in pretraining
