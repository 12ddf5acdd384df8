"""The full recipes of the paper: commands for a cluster. Each one resumes by itself and is checked before any runs."""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ...analysis.arguments import analyze_arguments
from ...base.messages import first_line
from ...bench.arguments import bench_arguments
from ...data.arguments import tokenize_arguments
from ...evals.arguments import eval_arguments, make_data_arguments
from ...models.arguments import convert_arguments
from ...models.decoder.modeling import LucidForCausalLM
from ...nn.attention import ATTENTIONS
from ...training.arguments import train_arguments
from ...training.command import recipe_from
from ...training.inputs import new_config
from ...training.recipe import Recipe
from .arguments import experiment_arguments
from .result import Conclusion, table

# Operations a second of an H100 in bfloat16, and the share of them that training of this kind reaches.
PEAK, REACHED = 989e12, 0.4
# The files that hold the results of the commands.
RECORDS = {
    "train": "summary.json",
    "eval": "results.json",
    "analyze": "analysis.json",
    "bench": "results.json",
}
# The arguments of the commands that a step may be.
ARGUMENTS = {
    "train": train_arguments,
    "eval": eval_arguments,
    "make-data": make_data_arguments,
    "analyze": analyze_arguments,
    "bench": bench_arguments,
    "convert": convert_arguments,
    "tokenize": tokenize_arguments,
    "experiment": experiment_arguments,
}


@dataclass(frozen=True)
class Step:
    """A command. words: its arguments after `lucid`. processes: one for every GPU."""

    words: tuple[str, ...]
    processes: int = 1

    @property
    def line(self) -> str:
        """The command as typed in a shell."""
        if self.processes == 1:
            return shlex.join(["lucid", *self.words])
        return shlex.join(["torchrun", f"--nproc-per-node={self.processes}", "-m", "lucid_attention.cli", *self.words])

    def recipe(self) -> Recipe | None:
        """The recipe that `lucid train` would run; None for other commands."""
        if self.words[0] != "train":
            return None
        words = list(self.words[1:])
        if "--from" in words:
            # An earlier step makes the checkpoint, so its attention is not on the disk yet: read it from the name.
            start = words.index("--from")
            run = words[start + 1].removesuffix("/model").rpartition("/")[2]
            attentions = [name for name in ATTENTIONS if run.endswith(f"-{name}")]
            words[start : start + 2] = ["--attention", max(attentions, key=len)] if attentions else []
        return recipe_from(_parsed("train", words))

    def check(self) -> None:
        """Refuse a command that would fail: unknown names, recipes that do not fit, misspelt options."""
        command = self.words[0]
        if command == "train":
            recipe = self.recipe()
            assert recipe is not None
            parameters(recipe)
        elif command in ARGUMENTS:
            _parsed(command, list(self.words[1:]))
        else:
            raise ValueError(f"a step must be one of {', '.join(ARGUMENTS)}, got {command!r}")

    def gpu_hours(self) -> float | None:
        """An estimate from the count of operations; None for a command that does not train."""
        recipe = self.recipe()
        return None if recipe is None else training_operations(recipe) / (PEAK * REACHED) / 3600

    def run(self) -> int:
        """Run the command. Returns its exit code."""
        words = ["-m", "lucid_attention.cli", *self.words]
        if self.processes > 1:
            words = ["-m", "torch.distributed.run", f"--nproc-per-node={self.processes}", *words]
        return subprocess.run([sys.executable, *words], check=False).returncode


def _parsed(command: str, words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"lucid {command}", exit_on_error=False)
    ARGUMENTS[command](parser)
    try:
        return parser.parse_args(words)
    except (argparse.ArgumentError, SystemExit) as error:
        raise ValueError(f"lucid {command} does not take {shlex.join(words)}: {error}") from error


def training_operations(recipe: Recipe) -> float:
    """Floating point operations: 6 for every weight and token, and those of the scores and of LUCID's solve."""
    config = new_config(recipe)
    tokens = recipe.steps * recipe.batch_size * recipe.sequence_length
    scores = 0.0
    for name in config.layer_attentions:
        solved = config.num_key_value_heads if "lucid" in name else 0
        heads = config.num_attention_heads + (solved or 0)
        visible = config.options_of(name).get("window", recipe.sequence_length)
        scores += 6 * min(visible, recipe.sequence_length) * config.head_dim * heads
    recomputed = 4 / 3 if recipe.gradient_checkpointing else 1
    return recomputed * tokens * (6 * parameters(recipe) + scores)


def parameters(recipe: Recipe) -> int:
    """The number of weights of the recipe's model. No memory is needed for them."""
    # These fields do not change the number. Without them, recipes of one model share a cache entry.
    return _parameters(json.dumps(asdict(replace(recipe, about="", steps=1, seed=0))))


@lru_cache
def _parameters(recipe: str) -> int:
    with torch.device("meta"):
        model = LucidForCausalLM(new_config(Recipe(**json.loads(recipe))))
    return sum(weight.numel() for weight in model.parameters())


def train(recipe: str, attention: str, *more: str, out: str | None = None, processes: int = 8) -> Step:
    """`lucid train RECIPE --attention NAME`, on the GPUs of one machine."""
    folder = out or f"runs/paper/{recipe}-{attention}"
    return Step(("train", recipe, "--attention", attention, "--out", folder, *more), processes)


def tune(recipe: str, start: str, out: str, *more: str, processes: int = 8) -> Step:
    """`lucid train RECIPE --from CHECKPOINT`."""
    return Step(("train", recipe, "--from", start, "--out", out, *more), processes)


def evaluate(checkpoint: str, tasks: str, out: str, *more: str, processes: int = 8) -> Step:
    """`lucid eval CHECKPOINT --tasks NAMES`."""
    return Step(("eval", checkpoint, "--tasks", tasks, "--out", out, *more), processes)


def check_steps(steps: Sequence[Step]) -> None:
    """Check every command, and that an earlier command writes each checkpoint that it reads."""
    written: set[str] = set()
    for step in steps:
        step.check()
        for word in step.words:
            folder = word.removesuffix("/model")
            if word.startswith("runs/") and word.endswith("/model") and folder not in written:
                raise ValueError(f"{step.line}: nothing before it writes {folder}")
        if "--out" in step.words:
            written.add(step.words[step.words.index("--out") + 1])


def results_of(steps: Sequence[Step]) -> Conclusion:
    """The losses and scores that finished commands have written, as tables for the reader to compare with the paper."""
    losses: list[list[Any]] = []
    scores: list[list[Any]] = []
    others: list[list[Any]] = []
    for step in steps:
        if step.words[0] not in RECORDS or "--out" not in step.words:
            continue
        file = Path(step.words[step.words.index("--out") + 1]) / RECORDS[step.words[0]]
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            if step.words[0] == "train":
                losses.append(_loss_row(file.parent.name, content))
            elif step.words[0] == "eval":
                scores += _score_rows(file.parent.name, content)
            else:
                rows = _analysis_rows if step.words[0] == "analyze" else _time_rows
                others += rows(file.parent.name, content)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{file} is not what {step.line} writes ({type(error).__name__}: {first_line(error)}): "
                "remove it and run that command again"
            ) from error
    tables = []
    if losses:
        tables.append(table("Training", ["run", "steps", "validation loss", "tokens/s"], losses))
    if scores:
        tables.append(table("Scores", ["model", "task", "cell", "metric", "score", "standard error"], scores))
    if others:
        tables.append(table("Measurements", ["record", "what", "where", "value"], others))
    return Conclusion(
        ours="see the tables",
        verdict="measured",
        because="The full recipe: its numbers stand beside the paper's for the reader to compare.",
        seeds=1,
        tables=tables,
    )


def _loss_row(name: str, summary: dict[str, Any]) -> list[Any]:
    speed = summary["median_tokens_per_second"]
    return [name, summary["steps"], round(summary["validation_loss"], 4), speed and round(speed)]


def _score_rows(name: str, results: dict[str, Any]) -> list[list[Any]]:
    """Every metric of every cell, and the means over cells."""
    rows = []
    for cell in [*results["cells"], *results.get("means", [])]:
        labels = ", ".join(f"{key} {value}" for key, value in cell["labels"].items())
        if "over" in cell:
            labels += f", mean over {' and '.join(cell['over'])}"
        for metric, score in {cell["metric"]: cell, **cell.get("metrics", {})}.items():
            error = None if score["standard_error"] is None else round(score["standard_error"], 4)
            rows.append([name, cell["family"], labels, metric, round(score["mean"], 4), error])
    return rows


def _analysis_rows(name: str, analysis: dict[str, Any]) -> list[list[Any]]:
    """κ by length, the median and the largest of all heads, and the mean hit rates."""
    results, rows = analysis["results"], []
    kappas: dict[int, list[float]] = {}
    for record in results.get("conditioning", []):
        kappas.setdefault(record["length"], []).append(record["kappa"])
    for length, values in sorted(kappas.items()):
        where = f"{length} tokens, {len(values)} heads"
        rows += [[name, "κ(P), median", where, median(values)], [name, "κ(P), largest", where, max(values)]]
    for measure, value in results.get("mean_hit_rate", {}).items():
        rows.append([name, f"hit rate, {measure}", analysis["input"]["about"], round(value, 4)])
    return rows


def _time_rows(name: str, results: dict[str, Any]) -> list[list[Any]]:
    """Milliseconds of every contestant of a benchmark, and the ratio to its peer."""
    rows = []
    for key, record in results["records"].items():
        for contestant, entry in record["entries"].items():
            rows.append([name, f"{contestant}, ms", key, round(1000 * entry["seconds"]["median"], 3)])
            if entry["ratio"] is not None:
                rows.append([name, f"{contestant}, ratio", key, round(entry["ratio"]["median"], 4)])
    return rows
