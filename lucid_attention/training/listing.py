"""`lucid recipes`: what can be trained."""

import argparse

from .recipes import RECIPES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`lucid recipes` has no arguments."""


def run(args: argparse.Namespace) -> int:
    """A line a recipe."""
    for name, make in RECIPES.items():
        recipe = make()
        tokens = recipe.steps * recipe.batch_size * recipe.sequence_length
        print(f"{name:<13} {recipe.about}")
        print(f"{'':13} {recipe.preset}, {tokens / 1e6:,.1f}M tokens, learning rate {recipe.learning_rate:g}")
    return 0
