"""`lucid train`: run a recipe, with changes, in a folder."""

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lucid_attention.messages import did_you_mean

from ..data import DataError
from ..processes import distributed_state
from .estimate import estimate
from .inputs import attention_of
from .recipe import Recipe
from .recipes import RECIPES
from .run import RunError, train
from .trainer import TrainingStopped


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
        if args.dry_run:
            print("\n".join(estimate(recipe, args.gpus, args.gpu, parallel=args.parallel).lines()))
            return 0
        name = recipe.attention if isinstance(recipe.attention, str) else "hybrid"
        out = Path(args.out) if args.out else Path("runs") / f"{args.recipe}-{name}-{recipe.seed}"
        summary = train(recipe, out, parallel=args.parallel, restart=args.restart)
    except (ValueError, TypeError, RunError, DataError, TrainingStopped) as error:
        print(f"lucid train: error: {_sentence(error)}", file=sys.stderr)
        return 1
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
