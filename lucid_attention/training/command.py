"""`lucid train`: run a recipe, with changes, in a folder."""

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..base.messages import did_you_mean
from ..base.processes import distributed_state
from ..data import DataError
from .inputs import attention_of
from .recipe import Recipe
from .recipes import RECIPES
from .run import RunError, train
from .trainer import TrainingStopped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `lucid train`."""
    parser.add_argument(
        "recipe", metavar="RECIPE", help="a name that `lucid recipes` lists. Example: lucid train tiny_lm --seed 1"
    )
    parser.add_argument(
        "--attention",
        metavar="NAME",
        help="attention of every layer: softmax, lucid, path, delta, ... (default: the recipe's, mostly lucid)",
    )
    parser.add_argument(
        "--data",
        metavar="WHAT",
        help="folder written by `lucid tokenize`, such as tokens/; .jsonl file of prompts with answers; or a task, "
        "needles or memory_update (default: the recipe's)",
    )
    parser.add_argument("--out", metavar="FOLDER", help="folder of the run (default: runs/RECIPE-ATTENTION-SEED)")
    parser.add_argument(
        "--from",
        dest="start",
        metavar="CHECKPOINT",
        help="start from the weights of this checkpoint, such as runs/tiny_lm-lucid-0/model (default: new weights)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="seed of weights and data, an integer such as 3 (default: the recipe's, 0)",
    )
    parser.add_argument(
        "--set",
        dest="changes",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a field of the recipe, as --show prints it: learning_rate=3e-4, steps=500 (optimiser steps), "
        "batch_size=16 (sequences per step), sequence_length=1024 (tokens), model.hidden_size=128, ... (may be "
        "repeated)",
    )
    parser.add_argument(
        "--parallel",
        choices=("ddp", "fsdp"),
        default="ddp",
        help="how the processes that torchrun started share the work: ddp gives each the whole model, fsdp a part of "
        "it (default: ddp)",
    )
    parser.add_argument("--restart", action="store_true", help="remove an earlier run in --out instead of resuming it")
    parser.add_argument("--show", action="store_true", help="print the recipe with all changes, and stop")


def recipe_from(args: argparse.Namespace) -> Recipe:
    """The recipe that the arguments ask for."""
    if args.recipe not in RECIPES:
        raise ValueError(
            f"there is no recipe {args.recipe!r}{did_you_mean(args.recipe, RECIPES)}: "
            f"expected one of {', '.join(RECIPES)}"
        )
    given: dict[str, Any] = {"attention": args.attention, "data": args.data, "start": args.start, "seed": args.seed}
    if args.data is not None:
        # The recipe's options are for the recipe's own data.
        given["data_options"] = {}
    if args.start is not None:
        if args.attention is not None:
            raise ValueError(f"--attention is for new models: {args.start} keeps its own")
        given |= {"attention": attention_of(args.start), "attention_options": {}, "model": {}}
    recipe = replace(RECIPES[args.recipe](), **{key: value for key, value in given.items() if value is not None})
    return recipe.changed(args.changes, distributed_state().num_processes)


def run(args: argparse.Namespace) -> int:
    """`lucid train`. An error is one message; saved checkpoints stay."""
    try:
        recipe = recipe_from(args)
        if args.show:
            print(json.dumps(asdict(recipe), indent=1))
            return 0
        name = recipe.attention if isinstance(recipe.attention, str) else "hybrid"
        out = Path(args.out) if args.out else Path("runs") / f"{args.recipe}-{name}-{recipe.seed}"
        summary = train(recipe, out, parallel=args.parallel, restart=args.restart)
    except (ValueError, TypeError, RunError, DataError, TrainingStopped, FileNotFoundError) as error:
        print(f"lucid train: error: {_sentence(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped: the same command resumes from the last checkpoint", file=sys.stderr)
        return 130
    if distributed_state().is_main_process:
        speed = summary["median_tokens_per_second"]
        print(f"{out}: validation loss {summary['validation_loss']:.4f} after {summary['steps']} steps", end="")
        print(f", {speed:,.0f} tokens/s" if speed else "")
        print(f"  model {summary['model']}, curve {out / 'loss.png'}, metrics {out / 'metrics.jsonl'}")
    return 0


def _sentence(error: Exception) -> str:
    """The message of an error. torch puts the traceback of a process that reads data before it."""
    text = str(error).rstrip()
    if "Original Traceback (most recent call last)" not in text:
        return text
    return text.splitlines()[-1].partition(": ")[2]
