"""The full recipes of the paper: commands for a cluster. Each one resumes by itself and is checked before any runs."""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lucid_attention.nn.attention import ATTENTIONS

from ...analysis.arguments import analyze_arguments
from ...data.arguments import tokenize_arguments
from ...data.sources import DOLMA
from ...evals.arguments import eval_arguments, make_data_arguments
from ...training.arguments import train_arguments
from ...training.command import recipe_from
from ...training.estimate import Estimate, estimate
from ...training.inputs import new_config
from ...training.recipe import Recipe
from .arguments import experiment_arguments


def bench_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `lucid bench` that steps use."""
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--quick", action="store_true")


# The arguments of the commands that a step may be.
ARGUMENTS = {
    "train": train_arguments,
    "eval": eval_arguments,
    "make-data": make_data_arguments,
    "analyze": analyze_arguments,
    "bench": bench_arguments,
    "tokenize": tokenize_arguments,
    "experiment": experiment_arguments,
}


# The arguments of each command that may name what an earlier step writes.
INPUTS = {
    "train": ("start", "data"),
    "eval": ("checkpoint", "text", "tokenizer", "haystack", "data_dir", "babilong_hub"),
    "make-data": ("tokenizer", "haystack", "data_dir", "babilong_hub"),
    "analyze": ("checkpoint", "samples", "tokens_from", "tokenizer", "text"),
    "bench": (),
    "tokenize": ("source", "tokenizer"),
    "experiment": (),
}
# The folders that steps write into. Anything else that a step reads, such as a data set of the hub, comes from outside.
WRITTEN = ("data", "runs", "results")
# The tokens of §4.1: a subset of about 6.5 billion tokens of Dolma.
TOKENS, VOCABULARY, TOKEN_COUNT = "data/dolma", 32_000, 6_500_000_000


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
        return shlex.join(["torchrun", f"--nproc-per-node={self.processes}", "-m", "lucid_lab.cli", *self.words])

    def arguments(self) -> argparse.Namespace:
        """The arguments as the command reads them."""
        command = self.words[0]
        if command not in ARGUMENTS:
            raise ValueError(f"a step must be one of {', '.join(ARGUMENTS)}, got {command!r}")
        return _parsed(command, list(self.words[1:]))

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

    def reads(self) -> list[str]:
        """The files and folders that earlier steps must have written."""
        values = vars(self.arguments())
        recipe = self.recipe()
        if recipe is not None:
            values["data"] = recipe.data
        names = [str(values[name] or "") for name in INPUTS[self.words[0]]]
        return [name for name in names if name.partition("/")[0] in WRITTEN]

    def writes(self) -> str:
        """The file or folder that the command writes."""
        return str(self.arguments().out)

    def check(self) -> None:
        """Refuse a command that would fail: unknown names, recipes that do not fit, misspelt options."""
        recipe = self.recipe()
        if recipe is None:
            self.arguments()
        else:
            new_config(recipe)

    def estimate(self, device: str = "H100") -> Estimate | None:
        """Memory of each GPU and hours; None for a command that does not train."""
        recipe = self.recipe()
        if recipe is None:
            return None
        return estimate(recipe, self.processes, device, parallel=self.arguments().parallel)

    def run(self) -> int:
        """Run the command. Returns its exit code."""
        words = ["-m", "lucid_lab.cli", *self.words]
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


def tokenized(folder: str = TOKENS, vocabulary: int = VOCABULARY, tokens: int = TOKEN_COUNT) -> Step:
    """`lucid tokenize` of a part of Dolma, whose files and documents are taken in a random order."""
    bounds = ("--limit-tokens", str(tokens), "--seed", "0")
    return Step(("tokenize", DOLMA, folder, "--tokenizer", f"train:{vocabulary}", *bounds))


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


def at_small_scale(name: str) -> Step:
    """`lucid experiment NAME --scale small`, for a claim whose own experiment is small."""
    # A folder of its own: that of the full recipe is locked meanwhile.
    return Step(("experiment", name, "--scale", "small", "--out", "runs/paper/experiments"))


def pretrained(attention: str) -> list[Step]:
    """§4.1: tokens and pretraining, which most experiments share."""
    return [tokenized(), train("pretrain_2k", attention)]


def tuned(attention: str) -> list[Step]:
    """§4.1: tokens, pretraining and long-context tuning."""
    start, out = f"runs/paper/pretrain_2k-{attention}/model", f"runs/paper/finetune_64k-{attention}"
    return [*pretrained(attention), tune("finetune_64k", start, out)]


def unique(steps: Iterable[Step]) -> list[Step]:
    """Every step once, at its first place."""
    return list(dict.fromkeys(steps))


def check_steps(steps: Sequence[Step]) -> None:
    """Check every command, that earlier ones write all that it reads, and that no two write the same."""
    written: dict[Path, Step] = {}
    for step in steps:
        step.check()
        for name in step.reads():
            path = Path(name)
            if not any(folder in written for folder in (path, *path.parents)):
                raise ValueError(f"{step.line}: nothing before it writes {name}")
        other = written.setdefault(Path(step.writes()), step)
        if other != step and step.words[0] != "experiment":
            raise ValueError(f"{step.line}: {other.line} writes {step.writes()}, too")
