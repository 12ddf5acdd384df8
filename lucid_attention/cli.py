"""`lucid <command>`: a table of commands, each imported when it is called."""

import argparse
import sys
from importlib import import_module
from importlib.metadata import version
from typing import NamedTuple

from .base.messages import did_you_mean


class Command(NamedTuple):
    """A command. module: has `add_arguments(parser)` and `run(args) -> exit code`. extra: installs what it imports."""

    module: str
    summary: str
    example: str
    extra: str = "train"


COMMANDS = {
    "tokenize": Command(
        "data.tokenize",
        "turn text into tokens for training",
        "lucid tokenize ./texts ./tokens --tokenizer train:32000",
    ),
    "train": Command(
        "training.command",
        "train a recipe; the same command resumes it",
        "lucid train tiny_lm --attention lucid --set learning_rate=3e-3",
    ),
    "recipes": Command("training.recipes", "list the recipes", "lucid recipes"),
    "eval": Command(
        "evals.command",
        "score a checkpoint: needles, BABILong, LongBench, SCROLLS, perplexity",
        "lucid eval ./model --tasks mniah --needles 2,4,6 --lengths 2048,4096 --samples 100 --out results",
        "eval",
    ),
    "compare": Command(
        "evals.compare",
        "score several checkpoints on the same samples, with differences",
        "lucid compare ./softmax ./lucid --tasks mniah --needles 4 --lengths 2048 --samples 100",
        "eval",
    ),
    "make-data": Command(
        "evals.make_data",
        "make prompts with answers for fine-tuning",
        "lucid make-data babilong data/babilong_train.jsonl --tasks qa1,qa2 --lengths 0,1024 --tokenizer ./model",
        "eval",
    ),
    "demo": Command(
        "experiments.engine.demo",
        "train and compare attentions in minutes, and write a report",
        "lucid demo --quick",
    ),
    "experiment": Command(
        "experiments.engine.command",
        "test a claim of the paper, with a verdict",
        "lucid experiment memory_update --scale small",
        "eval",
    ),
    "analyze": Command(
        "analysis.command",
        "look into the attention of a checkpoint: condition numbers, hit rates, Jacobians, maps",
        "lucid analyze ./model --what conditioning,maps --tokens-from stdlib --length 1024 --layers 0,3",
    ),
    "bench": Command(
        "bench.command",
        "measure what LUCID costs on this machine next to softmax attention",
        "lucid bench solve decode --threads 1 2",
        "bench",
    ),
    "report": Command(
        "report.command",
        "show experiments, training runs and evaluations as a page",
        "lucid report runs/experiments --out report.html",
        "plot",
    ),
    "convert": Command(
        "models.convert",
        "copy a pretrained checkpoint, with LUCID switched on",
        "lucid convert ./Llama-3.2-1B ./Llama-3.2-1B-lucid --strength 0",
        "transformers",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run a command. Returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    overview = _overview()
    if not argv or argv[0] in ("-h", "--help"):
        overview.print_help()
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"lucid-attention {version('lucid-attention')}")
        return 0
    if argv[0] not in COMMANDS:
        overview.error(
            f"unknown command {argv[0]!r}{did_you_mean(argv[0], COMMANDS)}: expected one of {', '.join(COMMANDS)}"
        )
    name, command = argv[0], COMMANDS[argv[0]]
    try:
        module = import_module(f".{command.module}", __package__)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith(__package__ or "lucid_attention"):
            raise
        print(
            f"lucid {name}: error: needs the package {error.name!r}. "
            f'Install it with: pip install "lucid-attention[{command.extra}]"',
            file=sys.stderr,
        )
        return 1
    parser = argparse.ArgumentParser(
        prog=f"lucid {name}",
        description=f"{command.summary[0].upper()}{command.summary[1:]}.",
        epilog=f"example: {command.example}",
    )
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(argv[1:])))


def _overview() -> argparse.ArgumentParser:
    rows = "\n".join(f"  {name:<10} {command.summary}" for name, command in COMMANDS.items())
    return argparse.ArgumentParser(
        prog="lucid",
        usage="lucid COMMAND [arguments]",
        description="LUCID attention: softmax attention over decorrelated values.",
        epilog=f"commands:\n{rows}\n\n`lucid COMMAND --help` shows its arguments; `lucid --version` shows the release.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )


if __name__ == "__main__":
    sys.exit(main())
