"""Small checkpoints and tokenizers, and `lucid eval` in this process or in forks of it."""

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import LlamaConfig, LlamaForCausalLM

from lucid_attention import LucidForCausalLM
from lucid_attention.models.decoder.presets import tiny
from lucid_lab import cli
from lucid_lab.data.tokenizer import train
from lucid_lab.evals import command, compare  # noqa: F401
from lucid_lab.evals.benchmarks.haystacks import NOISE, read_prose
from lucid_lab.evals.benchmarks.needles import NEEDLE, PROMPT
from lucid_lab.evals.tokens import load_tokenizer

SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "head_dim": 16, "intermediate_size": 48}


def write_tokenizer(folder: Path, texts: Sequence[str], size: int = 600) -> Path:
    """A byte-level tokenizer, trained on RULER's noise and on `texts`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in train([*NOISE, *texts] * 3, size).items():
        (folder / name).write_bytes(content)
    return folder


def write_needle_tokenizer(folder: Path, size: int = 900) -> Path:
    """A tokenizer for needles and prose."""
    return write_tokenizer(folder, [NEEDLE, PROMPT, *read_prose("prose").sentences[:300]], size)


def write_checkpoint(folder: Path, tokenizer: Path, kind: str = "lucid", seed: int = 0) -> Path:
    """A model with random weights. kind: "lucid" or "llama"."""
    loaded = load_tokenizer(str(tokenizer))
    # The configuration names no end token: answers in a batch must still be those of prompts asked alone.
    ends = {"pad_token_id": loaded.pad_token_id, "bos_token_id": loaded.bos_token_id, "eos_token_id": None}
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {**SMALL, **ends, "vocab_size": len(loaded), "initializer_range": 0.2}
    model = LucidForCausalLM(tiny("lucid", **sizes)) if kind == "lucid" else LlamaForCausalLM(LlamaConfig(**sizes))
    model.save_pretrained(folder)
    loaded.save_pretrained(folder)
    return folder


def lucid(name: str, *words: object) -> int:
    """`lucid eval` or `lucid compare` in this process."""
    return cli.main([name, *map(str, words)])


def forked(words: Sequence[object], *, processes: int = 1, before: Callable[[], None] | None = None) -> list[int]:
    """`lucid eval` in forks of this process, several as torchrun starts them. Gives their exit codes.

    before: called first in each fork, for example to patch something.
    """
    context = multiprocessing.get_context("fork")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [
        context.Process(target=_child, args=(words, rank, processes, port, before)) for rank in range(processes)
    ]
    for child in children:
        child.start()
    for child in children:
        # As torchrun does: if one process fails, the others are killed.
        child.join(100)
        if child.exitcode != 0:
            for other in children:
                other.kill()
    for child in children:
        child.join()
    return [child.exitcode or 0 for child in children]


def _child(words: Sequence[object], rank: int, processes: int, port: int, before: Callable[[], None] | None) -> None:
    code = 70
    try:
        # pytest has replaced these streams.
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        torch.set_num_threads(1)
        PartialState._reset_state()
        if processes > 1:
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
            os.environ |= {name: str(value) for name, value in names.items()}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if before is not None:
            before()
        code = lucid("eval", *words)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(code)
