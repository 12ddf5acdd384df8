"""The full recipes of the paper: commands for a cluster, each of which resumes by itself and can be checked here."""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch

from ...models.decoder.modeling import LucidForCausalLM
from ...nn.attention import ATTENTIONS
from ...training.command import add_arguments as add_train_arguments
from ...training.command import recipe_from
from ...training.inputs import new_config
from ...training.recipe import Recipe

# An H100 in bfloat16, and the share of it that training of this kind reaches.
PEAK, REACHED = 989e12, 0.4
# Where the arguments of commands are.
MODULES = {
    "eval": "evals.command",
    "make-data": "evals.make_data",
    "analyze": "analysis.command",
    "convert": "models.convert",
    "tokenize": "data.tokenize",
    "experiment": "experiments.engine.command",
}


@dataclass(frozen=True)
class Step:
    """A command. words: what follows `lucid`. processes: one a GPU."""

    words: tuple[str, ...]
    processes: int = 1

    @property
    def line(self) -> str:
        """As typed."""
        if self.processes == 1:
            return shlex.join(["lucid", *self.words])
        return shlex.join(["torchrun", f"--nproc-per-node={self.processes}", "-m", "lucid_attention.cli", *self.words])

    def recipe(self) -> Recipe | None:
        """Of `lucid train`; None for other commands."""
        if self.words[0] != "train":
            return None
        words = list(self.words[1:])
        if "--from" in words:
            # The checkpoint is made by an earlier step, so it cannot be asked for its attention yet. Its name says it.
            at = words.index("--from")
            run = words[at + 1].removesuffix("/model").rpartition("/")[2]
            named = [name for name in ATTENTIONS if run.endswith(f"-{name}")]
            words[at : at + 2] = ["--attention", max(named, key=len)] if named else []
        return recipe_from(_parsed(add_train_arguments, "train", words))

    def check(self) -> None:
        """Refuse what would be refused when it runs: unknown names, recipes that do not fit, misspelt options."""
        command = self.words[0]
        if command == "train":
            recipe = self.recipe()
            assert recipe is not None
            parameters(recipe)
        elif command in MODULES:
            module = import_module(f"..{MODULES[command]}", __package__)
            _parsed(module.add_arguments, command, list(self.words[1:]))
        else:
            raise ValueError(f"a step must be one of train, {', '.join(MODULES)}, got {command!r}")

    def gpu_hours(self) -> float | None:
        """An estimate from the count of operations; None for what does not train."""
        recipe = self.recipe()
        return None if recipe is None else training_operations(recipe) / (PEAK * REACHED) / 3600

    def run(self) -> int:
        """Run it, and give its exit code."""
        words = ["-m", "lucid_attention.cli", *self.words]
        if self.processes > 1:
            words = ["-m", "torch.distributed.run", f"--nproc-per-node={self.processes}", *words]
        return subprocess.run([sys.executable, *words], check=False).returncode


def _parsed(add_arguments: Any, command: str, words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"lucid {command}", exit_on_error=False)
    add_arguments(parser)
    try:
        return parser.parse_args(words)
    except (argparse.ArgumentError, SystemExit) as error:
        raise ValueError(f"lucid {command} does not take {shlex.join(words)}: {error}") from error


def training_operations(recipe: Recipe) -> float:
    """Floating point operations: 6 a weight and token, and those of the scores, which LUCID's solve adds to."""
    config = new_config(recipe)
    tokens = recipe.steps * recipe.batch_size * recipe.sequence_length
    scores = 0.0
    for name in config.layer_attentions:
        solved = config.num_key_value_heads if "lucid" in name else 0
        heads = config.num_attention_heads + (solved or 0)
        seen = config.options_of(name).get("window", recipe.sequence_length)
        scores += 6 * min(seen, recipe.sequence_length) * config.head_dim * heads
    recomputed = 4 / 3 if recipe.gradient_checkpointing else 1
    return recomputed * tokens * (6 * parameters(recipe) + scores)


def parameters(recipe: Recipe) -> int:
    """Of the recipe's model, which is made without memory for its weights."""
    # Steps of a recipe differ in what does not matter here.
    return _parameters(json.dumps(asdict(replace(recipe, about="", steps=1, seed=0))))


@lru_cache
def _parameters(recipe: str) -> int:
    with torch.device("meta"):
        model = LucidForCausalLM(new_config(Recipe(**json.loads(recipe))))
    return sum(weight.numel() for weight in model.parameters())


def train(recipe: str, attention: str, *more: str, out: str | None = None, processes: int = 8) -> Step:
    """`lucid train RECIPE --attention NAME`, with GPUs of one machine."""
    folder = out or f"runs/paper/{recipe}-{attention}"
    return Step(("train", recipe, "--attention", attention, "--out", folder, *more), processes)


def tune(recipe: str, start: str, out: str, *more: str, processes: int = 8) -> Step:
    """`lucid train RECIPE --from CHECKPOINT`."""
    return Step(("train", recipe, "--from", start, "--out", out, *more), processes)


def evaluate(checkpoint: str, tasks: str, out: str, *more: str, processes: int = 8) -> Step:
    """`lucid eval CHECKPOINT --tasks NAMES`."""
    return Step(("eval", checkpoint, "--tasks", tasks, "--out", out, *more), processes)


def check_steps(steps: Sequence[Step]) -> None:
    """Check every command, and that what it reads is written by one before it."""
    written: set[str] = set()
    for step in steps:
        step.check()
        for word in step.words:
            folder = word.removesuffix("/model")
            if word.startswith("runs/") and word.endswith("/model") and folder not in written:
                raise ValueError(f"{step.line}: nothing before it writes {folder}")
        if "--out" in step.words:
            written.add(step.words[step.words.index("--out") + 1])
