"""The arguments of `lucid train` and `lucid recipes`. Imports nothing heavy."""

import argparse


def train_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `lucid train`."""
    parser.add_argument("recipe", metavar="RECIPE", help="one of `lucid recipes`")
    parser.add_argument(
        "--attention", metavar="NAME", help="attention of every layer: softmax, lucid, path, delta, ..."
    )
    parser.add_argument(
        "--data", metavar="WHAT", help="folder written by `lucid tokenize`, .jsonl of prompts with answers, or a task"
    )
    parser.add_argument("--out", metavar="FOLDER", help="folder of the run (default: runs/RECIPE-ATTENTION-SEED)")
    parser.add_argument("--from", dest="start", metavar="CHECKPOINT", help="start from the weights of this checkpoint")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of weights and data")
    parser.add_argument(
        "--set",
        dest="changes",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change the recipe: learning_rate=3e-4, steps=500, model.hidden_size=128, ... (may be repeated)",
    )
    parser.add_argument(
        "--parallel", choices=("ddp", "fsdp"), default="ddp", help="how several processes share the work"
    )
    parser.add_argument("--restart", action="store_true", help="remove an earlier run in --out instead of resuming it")
    parser.add_argument("--show", action="store_true", help="print the recipe with all changes, and stop")


def recipes_arguments(parser: argparse.ArgumentParser) -> None:
    """`lucid recipes` has no arguments."""
