"""Evaluate a checkpoint: all cells of the given families, on one process or on several."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm
from transformers.utils import logging

from ..base.processes import distributed_state
from .cells import Cell, EvalError, Options, Record, cell_name
from .checkpoint import Checkpoint
from .families import find_families
from .harness import HarnessCell, HarnessModel
from .results import RecordWriter, ResultsFolder, Summary, draw_results, format_labels, summarize
from .tokens import load_tokenizer

Ask = Callable[[Sequence[int], int], Iterator[Record]]


class PlannedCell(NamedTuple):
    """A cell with the settings that its samples depend on. name: of its results, from the settings."""

    name: str
    settings: dict[str, Any]
    cell: Cell


def plan(checkpoint: Checkpoint, tasks: Sequence[str], options: Options, limit: int | None) -> list[PlannedCell]:
    """The cells of an evaluation. Wrong tasks and options are refused here, before the model is loaded."""
    families = find_families(tasks)
    tokenizer_sha256 = ""
    if any(family.needs_tokenizer for family in families.values()):
        options = replace(options, tokenizer=checkpoint.tokenizer_folder)
        tokenizer_sha256 = _tokenizer_sha256(options.tokenizer)
    planned = []
    for name, family in families.items():
        for cell in family.cells(options):
            settings = cell.settings(name, limit, tokenizer_sha256 if family.needs_tokenizer else "")
            planned.append(PlannedCell(cell_name(settings), settings, cell))
    return planned


def _tokenizer_sha256(folder: str) -> str:
    return hashlib.sha256(load_tokenizer(folder).backend_tokenizer.to_str().encode()).hexdigest()


def evaluate(
    checkpoint: Checkpoint,
    tasks: Sequence[str],
    options: Options,
    out: Path,
    *,
    batch_size: int = 1,
    limit: int | None = None,
    dtype: str = "auto",
) -> list[Summary]:
    """Evaluate the cells that are not finished in the folder `out`, and give the summaries of all cells.

    Records of an unfinished cell are kept, even if another number of processes wrote them. All processes share `out`.
    """
    if batch_size < 1:
        raise EvalError(f"--batch-size must be at least 1, got {batch_size}")
    if limit is not None and limit < 1:
        raise EvalError(f"--limit must be at least 1, got {limit}")
    folder, description = ResultsFolder(out), checkpoint.describe()
    folder.check_checkpoint(description)
    planned = plan(checkpoint, tasks, options, limit)
    if any(folder.finished(name) is None for name, _, _ in planned):
        _ask_all(planned, folder, checkpoint, batch_size, limit, dtype)
    state = distributed_state()
    summaries = []
    for name, settings, cell in planned:
        records = folder.finished(name)
        assert records is not None, f"{name} was not finished"
        summaries.append(summarize(name, settings, cell, (record["score"] for record in records)))
        if state.is_main_process:
            folder.add(description, summaries[-1])
    if state.is_main_process:
        draw_results(summaries, out, checkpoint.name)
    state.wait_for_everyone()
    return summaries


def _ask_all(
    planned: list[PlannedCell],
    folder: ResultsFolder,
    checkpoint: Checkpoint,
    batch_size: int,
    limit: int | None,
    dtype: str,
) -> None:
    """Load the model and ask it the samples of every unfinished cell."""
    # Hide the bar of the weights: every cell has its own.
    logging.disable_progress_bar()
    model = checkpoint.load(dtype)
    tokenizer, lm = None, None
    if any(cell.task or settings["tokenizer_sha256"] for _, settings, cell in planned):
        tokenizer = load_tokenizer(checkpoint.tokenizer_folder)
        lm = HarnessModel(model, tokenizer, batch_size)
    for number, (name, settings, cell) in enumerate(planned, 1):
        if folder.finished(name) is not None:
            continue
        ask: Ask
        if cell.evaluate is not None:
            ask, samples = partial(cell.evaluate, model, tokenizer), cell.samples
        else:
            ask = HarnessCell(cell, lm)
            samples = ask.samples
        title = f"{number}/{len(planned)} {format_labels(settings)}"
        ask_cell(name, ask, min(samples, limit or samples), folder, batch_size, title)


def ask_cell(name: str, ask: Ask, samples: int, folder: ResultsFolder, batch_size: int, title: str = "") -> None:
    """Ask the samples of a cell that have no record yet, a share per process. The main process merges the records."""
    state = distributed_state()
    done = folder.unfinished(name, samples)
    missing = [index for index in range(samples) if index not in done]
    share = missing[state.process_index :: state.num_processes]
    # Wait until all processes have read: a record written earlier would change the shares of the others.
    state.wait_for_everyone()
    file = folder.file(name)
    bar = tqdm(total=samples, initial=len(done), desc=title, unit="sample", disable=not state.is_main_process)
    with bar, RecordWriter(file.with_name(f"{file.name}.{state.process_index}")) as writer:
        for record in ask(share, batch_size) if share else ():
            writer.write(record)
            bar.update(min(state.num_processes, samples - bar.n))
        bar.update(samples - bar.n)
    state.wait_for_everyone()
    if state.is_main_process:
        folder.finish(name, samples)
    state.wait_for_everyone()
