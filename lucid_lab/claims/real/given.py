"""What the experiment is given: a checkpoint of a decoder and a folder of long texts; and what its jobs read of them.

At the scale `smoke` a tiny Llama with random weights and a tokenizer of Python's docstrings stand in for both.
"""

import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lucid_attention.models.checkpoint import checkpoint_sha256, load_config, load_model, load_tokenizer

from ...evals.benchmarks.haystacks import read_prose
from ..engine.jobs import Job, Record, Work
from ..text.prompts import write_tokenizer

MODEL, TOKENS, HAY = "model", "tokens.safetensors", "hay-{split}.txt"
# The parts of the texts: one to train on; one for all tests.
TRAIN, TEST = "train", "test"
# Every tenth text, by a hash of its name, is for tests.
TEST_SHARE = 10
# Characters of the text around needles.
HAY_CHARACTERS = 1_500_000
# The stand-in: its vocabulary and its configuration.
VOCABULARY = 600
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}


@dataclass(frozen=True)
class Given:
    """A checkpoint and texts, with the hashes of both: arguments of every job. Empty for the stand-in."""

    model: str = ""
    model_sha256: str = ""
    texts: str = ""
    texts_sha256: str = ""

    @property
    def arguments(self) -> dict[str, str]:
        """As JSON."""
        return asdict(self)


STAND_IN = Given()


def given(model: str, texts: str) -> Given:
    """The checkpoint and the texts in two folders."""
    return Given(model, _model_hash(model), texts, _texts_hash(texts))


@cache
def _model_hash(folder: str) -> str:
    return checkpoint_sha256(Path(folder))[:16]


@cache
def _texts_hash(folder: str) -> str:
    names = "\n".join(f"{name} {path.stat().st_size}" for name, path in text_files(folder))
    return hashlib.sha256(names.encode()).hexdigest()[:16]


def text_files(folder: str) -> list[tuple[str, Path]]:
    """(name, file) of all texts below a folder, sorted by name."""
    root = Path(folder)
    return sorted((path.relative_to(root).as_posix(), path) for path in root.rglob("*.txt") if path.is_file())


@cache
def sizes_of_model(source: Given) -> dict[str, int]:
    """Layers, heads and sizes of the model, from its configuration."""
    if source == STAND_IN:
        return {"layers": 3, "head_dim": 16, "kv_heads": 2, "context": 2048}
    config = load_config(source.model).get_text_config(decoder=True)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "layers": config.num_hidden_layers,
        "head_dim": head,
        "kv_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "context": config.max_position_embeddings,
    }


def stand_in_job() -> Job:
    """`stand_in` as a job."""
    return Job("real.given:stand_in", {}, "a tiny model in place of a pretrained one", 3.0)


def stand_in(work: Work) -> Record:
    """The job: a tiny Llama with random weights, and a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    folder = work.folder / MODEL
    write_tokenizer(read_prose("prose").sentences[:2000], VOCABULARY, folder)
    tokenizer = load_tokenizer(folder)
    set_seed(0)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = LlamaConfig(
        vocab_size=len(tokenizer), initializer_range=0.1, pad_token_id=tokenizer.pad_token_id, **TINY, **ids
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return {}


def model_folder(work: Work, source: Given) -> Path:
    """The folder of the model."""
    return Path(source.model) if source.model else work.folder_of(stand_in_job()) / MODEL


def open_model(work: Work, source: Given, dtype: torch.dtype = torch.float32) -> Any:
    """The model as it was given, in evaluation mode."""
    return load_model(model_folder(work, source), dtype)


def open_tokenizer(work: Work, source: Given) -> Any:
    """The tokenizer of the model."""
    return load_tokenizer(model_folder(work, source))


def corpus_job(source: Given, train_tokens: int, long_texts: int, long_tokens: int) -> Job:
    """`corpus` as a job."""
    arguments = {"source": source.arguments, "train_tokens": train_tokens}
    arguments |= {"long_texts": long_texts, "long_tokens": long_tokens}
    return Job("real.given:corpus", arguments, "tokens of the texts", 30.0 if source.model else 2.0)


def corpus(work: Work, source: dict[str, str], train_tokens: int, long_texts: int, long_tokens: int) -> Record:
    """The job: tokens to train on, long texts for tests, and prose to hide needles in, of training and of tests.

    train: [train_tokens], texts in a random order with the end token between them.
    test: [long_texts, long_tokens], the beginnings of texts that training never sees.
    """
    origin = Given(**source)
    tokenizer = open_tokenizer(work, origin)
    ids: list[int] = []
    long: list[list[int]] = []
    hay: dict[str, list[str]] = {TRAIN: [], TEST: []}
    for split, text in _shuffled(origin):
        if len(text) > 3 * long_tokens and split == TEST and len(long) < long_texts:
            tokens = tokenizer(text, verbose=False)["input_ids"]
            if len(tokens) >= long_tokens:
                long.append(tokens[:long_tokens])
                continue
        if split == TRAIN and len(ids) < train_tokens:
            ids += [*tokenizer(text, verbose=False)["input_ids"], tokenizer.eos_token_id]
        if sum(map(len, hay[split])) < HAY_CHARACTERS:
            hay[split].append(text)
        elif len(long) == long_texts and len(ids) >= train_tokens:
            break
    if len(ids) < train_tokens or len(long) < long_texts:
        raise ValueError(
            f"--texts must hold {train_tokens} tokens to train on and {long_texts} test texts of {long_tokens} tokens, "
            f"got {len(ids)} and {len(long)}: give more or longer texts (python tools/get_texts.py OUT)"
        )
    for split, parts in hay.items():
        (work.folder / HAY.format(split=split)).write_text("\n\n".join(parts)[:HAY_CHARACTERS])
    tensors = {TRAIN: torch.tensor(ids[:train_tokens]), TEST: torch.tensor(long)}
    save_file(tensors, work.folder / TOKENS)
    return {"train_tokens": train_tokens, "test_texts": len(long)}


def _shuffled(source: Given) -> Iterator[tuple[str, str]]:
    """(split, text) of all texts, in a fixed random order."""
    if source == STAND_IN:
        sentences = read_prose("prose").sentences
        # Chapters of the docstrings.
        chapters = [" ".join(sentences[start : start + 600]) for start in range(0, len(sentences), 600)]
        yield from ((TEST if number % 3 == 0 else TRAIN, text) for number, text in enumerate(chapters))
        return
    files = text_files(source.texts)
    Random("texts").shuffle(files)
    for name, path in files:
        split = TEST if zlib.crc32(name.encode()) % TEST_SHARE == 0 else TRAIN
        yield split, path.read_text(errors="replace")


def read_tokens(work: Work, corpus: Job) -> dict[str, Tensor]:
    """The tokens of a finished corpus: TRAIN and TEST."""
    return load_file(work.folder_of(corpus) / TOKENS)


def hay_of(work: Work, corpus: Job, split: str) -> str:
    """The file of the prose around needles."""
    return str(work.folder_of(corpus) / HAY.format(split=split))
