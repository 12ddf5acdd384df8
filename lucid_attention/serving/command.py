"""`lucid serve`: start the stock server of Transformers with a checkpoint that has LUCID.

The server replaces this process: its output, signals and exit code are its own.
"""

import argparse
import os
import subprocess
import sys
from importlib import import_module

from ..models.checkpoint import CheckpointError, load_config
from ..models.decoder.configuration import LucidConfig
from ..models.decoder.paged import attentions_with_a_state

BATCHING = "--continuous-batching"
# What the server of Transformers imports.
SERVER = ("fastapi", "uvicorn", "openai")


def words_of(checkpoint: str, words: list[str]) -> list[str]:
    """The words for `transformers serve`: with continuous batching if the user says nothing, and the model can.

    Raises:
        ValueError: where the user asks for continuous batching and the model has no paged cache.
    """
    config = load_config(checkpoint)
    states = attentions_with_a_state(config) if isinstance(config, LucidConfig) else []
    reason = f"the past of {', '.join(states)} is a state, which continuous batching has no pages for"
    if BATCHING in words and states:
        raise ValueError(f"{BATCHING} is not possible for {checkpoint}: {reason}. Leave it out")
    if states:
        print(f"lucid serve: one request after the other: {reason}", file=sys.stderr, flush=True)
    elif not {BATCHING, f"--no-{BATCHING[2:]}"} & set(words):
        words = [BATCHING, *words]
    # As it was written: clients name the model by the same word.
    return [checkpoint, *words]


def run(args: argparse.Namespace) -> int:
    """`lucid serve`. Returns only if there is nothing to serve, or on Windows, where a process cannot be replaced."""
    for package in SERVER:
        # Missing here, `lucid` says which extra to install.
        import_module(package)
    try:
        words = words_of(args.checkpoint, args.words)
    except (CheckpointError, ValueError) as error:
        print(f"lucid serve: error: {error}", file=sys.stderr)
        return 2
    command = [sys.executable, "-m", f"{__package__}.server", *words]
    if os.name != "nt":
        os.execv(command[0], command)
    return subprocess.call(command)
