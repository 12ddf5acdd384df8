"""The arguments of `lucid train` and `lucid recipes`. Imports nothing heavy."""

import argparse


def train_arguments(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print whether the run fits in the memory of --gpus GPUs of the kind --gpu, part by part, and how many "
        "hours it takes, and stop",
    )
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="number of GPUs of --dry-run (default: 1)")
    parser.add_argument(
        "--gpu", default="H100", metavar="NAME", help="GPU of --dry-run: A100, H100 or H200 (default: H100)"
    )
    parser.add_argument("--show", action="store_true", help="print the recipe with all changes, and stop")


def recipes_arguments(parser: argparse.ArgumentParser) -> None:
    """`lucid recipes` has no arguments."""
