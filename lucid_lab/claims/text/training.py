"""Jobs that train a small model of text as `lucid train` does and score it as `lucid eval` does."""

import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ...evals.make_data import write_lines
from ..engine.jobs import Job, Record, Work
from .prompts import KINDS, write_tokenizer

PROMPTS, TOKENIZER, DATA = "train.jsonl", "tokenizer", "data"
POINTS = 20
# Tied embeddings let a model copy words that it has seldom seen. With an initializer_range of 0.02 instead of 1/√128,
# softmax attention hardly learns in a few hundred steps.
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.09,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Asked:
    """An evaluation. tasks: families of `lucid eval`. options: of its `Options`.

    with_data: its data_dir is the folder that `make_texts` writes.
    """

    tasks: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    with_data: bool = False


@dataclass(frozen=True)
class TextRun:
    """Everything that a small model of text depends on.

    texts: arguments of `make_texts`.
    attention, options: as in `LucidConfig`; model: its other fields, over MODEL and the preset `tiny`.
    embedding_std: standard deviation of the embeddings at the start, None for that of all weights.
    sequence_length, steps, batch, rate, seed: as in `Recipe`. The seed changes weights and order, not the data.
    asked: fields of `Asked`.
    """

    texts: Mapping[str, Any]
    asked: Mapping[str, Any]
    attention: str = "lucid"
    options: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    embedding_std: float | None = None
    sequence_length: int = 256
    steps: int = 1000
    batch: int = 8
    rate: float = 3e-3
    seed: int = 0

    def texts_job(self) -> Job:
        """The job that makes the training data."""
        seconds = 5 + int(self.texts["samples"]) / 500
        return Job("text.training:make_texts", dict(self.texts), f"texts of {self.texts['kind']}", seconds)

    def job(self, label: str = "", milliseconds: float = 60.0) -> Job:
        """The job that trains and evaluates the model. milliseconds: about the time of a step."""
        seconds = self.steps * milliseconds / 1000 + 10
        return Job("text.training:train_text", asdict(self), label or f"text {self.attention}", seconds)

    def but(self, **changes: Any) -> "TextRun":
        """The same run with changes."""
        return replace(self, **changes)


def make_texts(work: Work, kind: str, settings: dict[str, Any], samples: int, vocabulary: int) -> Record:
    """The job: a tokenizer, and prompts with answers to train on. kind, settings: a class of KINDS and its fields."""
    texts = KINDS[kind](**settings)
    # A stopped job may have left parts of these files.
    for name in (PROMPTS, TOKENIZER, DATA):
        _remove(work.folder / name)
    write_tokenizer(texts.sample(), vocabulary, work.folder / TOKENIZER)
    lines = texts.lines(samples, str(work.folder / TOKENIZER), work.folder / DATA)
    return {"lines": write_lines(lines, work.folder / PROMPTS)}


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def train_text(work: Work, **settings: Any) -> Record:
    """The job: train, resuming a stopped run; evaluate; keep the model and its answers."""
    from lucid_attention import enable_lucid

    from ...training.run import train

    # Before any code reads a configuration: Transformers warns of an unknown model type.
    enable_lucid()
    run = TextRun(**settings)
    texts = work.folder_of(run.texts_job())
    start_time = time.perf_counter()
    with _redirected(work.folder / "output.txt"):
        start = new_model(run, texts / TOKENIZER, work.folder / "start")
        summary = train(recipe_of(run, texts, start), work.folder / "run")
        training_seconds = time.perf_counter() - start_time
        cells = scores(work.folder, Path(summary["model"]), Asked(**run.asked), texts / DATA)
    curve = _curve(work.folder / "run")
    # Nothing reads the other files after training.
    shutil.rmtree(start)
    for folder in (work.folder / "run").glob("checkpoint-*"):
        shutil.rmtree(folder)
    shutil.rmtree(work.folder / "run" / "tensorboard", ignore_errors=True)
    return {
        "curve": curve,
        "cells": cells,
        "validation_loss": summary["validation_loss"],
        "tokens_per_second": summary["median_tokens_per_second"],
        "parameters": summary["parameters"],
        "training_seconds": round(training_seconds, 1),
    }


@contextlib.contextmanager
def _redirected(file: Path) -> Iterator[None]:
    """Send bars and messages to a file, because several jobs run side by side."""
    with file.open("a") as stream, contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        yield


def new_model(run: TextRun, tokenizer: Path, folder: Path) -> Path:
    """Write a new model and its tokenizer into `folder`, for `lucid train --from`. Equal runs get equal weights."""
    import torch
    from transformers import set_seed

    from lucid_attention.models.checkpoint import load_tokenizer
    from lucid_attention.models.decoder.modeling import LucidForCausalLM
    from lucid_attention.models.decoder.presets import tiny

    loaded_tokenizer = load_tokenizer(tokenizer)
    set_seed(run.seed)
    config = tiny(
        run.attention,
        vocab_size=len(loaded_tokenizer),
        pad_token_id=loaded_tokenizer.pad_token_id,
        bos_token_id=loaded_tokenizer.bos_token_id,
        eos_token_id=loaded_tokenizer.eos_token_id,
        attention_options=dict(run.options),
        max_position_embeddings=run.sequence_length,
        **{**MODEL, **run.model},
    )
    model = LucidForCausalLM(config)
    if run.embedding_std is not None:
        torch.nn.init.normal_(model.get_input_embeddings().weight, std=run.embedding_std)
    model.save_pretrained(folder)
    loaded_tokenizer.save_pretrained(folder)
    return folder


def recipe_of(run: TextRun, texts: Path, start: Path) -> Any:
    """The recipe of a run. texts: the folder of `make_texts`. start: that of `new_model`."""
    from ...training.recipe import Recipe

    return Recipe(
        about="a small model of text",
        preset="tiny",
        data=str(texts / PROMPTS),
        start=str(start),
        attention=run.attention,
        sequence_length=run.sequence_length,
        steps=run.steps,
        batch_size=run.batch,
        micro_batch_size=run.batch,
        learning_rate=run.rate,
        log_every=max(1, run.steps // POINTS),
        save_every=max(1, run.steps // 4),
        keep=1,
        seed=run.seed,
    )


def scores(folder: Path, model: Path, asked: Asked, data: Path) -> list[dict[str, Any]]:
    """Evaluate, and return the mean scores of all cells: {"family", "labels", "samples", "scores"}."""
    from ...evals.cells import Options
    from ...evals.checkpoint import Checkpoint
    from ...evals.results import ResultsFolder
    from ...evals.runner import evaluate

    options: dict[str, Any] = dict(asked.options)
    if asked.with_data:
        options["data_dir"] = str(data)
    out = folder / "scores"
    cells = evaluate(Checkpoint(model), tuple(asked.tasks), Options(**options), out, batch_size=16)
    scored = []
    for cell in cells:
        records = ResultsFolder(out).finished(cell["name"]) or []
        means = {
            name: sum(record["metrics"][name] for record in records) / len(records) for name in records[0]["metrics"]
        }
        scored.append({**{key: cell[key] for key in ("family", "labels", "samples")}, "scores": means})
    return scored


def _curve(run: Path) -> dict[str, list[float]]:
    from ...training.metrics import METRICS, read_metrics

    logged = [entry for entry in read_metrics(run / METRICS) if "loss" in entry]
    return {"step": [entry["step"] for entry in logged], "loss": [entry["loss"] for entry in logged]}
