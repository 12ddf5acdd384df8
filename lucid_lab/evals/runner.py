"""Evaluate a checkpoint: all cells of the given families, on one process or on several."""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm
from transformers.utils import logging

from lucid_attention.models.limits import check_input_fits

from ..locks import locked
from ..processes import distributed_state
from .cells import Cell, EvalError, Options, Record, cell_name
from .checkpoint import Checkpoint
from .families import FAMILIES, find_families
from .harness import HarnessCell, HarnessModel, task_version
from .means import Range, check_ranges, means
from .results import DamagedSamples, RecordWriter, ResultsFolder, Summary, draw_results, format_labels, summarize
from .tokens import load_tokenizer

# Attributes of a tokenizer that its tokenizer.json does not hold.
TOKENIZER_RULES = (
    "bos_token", "eos_token", "pad_token", "unk_token", "padding_side", "add_bos_token", "add_eos_token",
    "clean_up_tokenization_spaces",
)  # fmt: skip

Ask = Callable[[Sequence[int], int], Iterator[Record]]


class PlannedCell(NamedTuple):
    """A cell with the settings that its samples depend on. name: of its results, from the settings."""

    name: str
    settings: dict[str, Any]
    cell: Cell


def plan(
    checkpoint: Checkpoint, tasks: Sequence[str], options: Options, limit: int | None, dtype: str
) -> list[PlannedCell]:
    """The cells of an evaluation. Wrong tasks and options are refused here, before the model is loaded."""
    families = find_families(tasks)
    tokenizer_sha256 = ""
    if any(family.needs_tokenizer for family in families.values()):
        options = replace(options, tokenizer=checkpoint.tokenizer_folder)
        tokenizer_sha256 = _tokenizer_sha256(options.tokenizer)
    planned = []
    for name, family in families.items():
        for cell in family.cells(options):
            digest = tokenizer_sha256 if family.needs_tokenizer else ""
            settings = cell.settings(name, limit, dtype, digest, task_version())
            planned.append(PlannedCell(cell_name(settings), settings, cell))
    return planned


def _tokenizer_sha256(folder: str) -> str:
    """A hash of what the tokenizer makes of texts, and of the tokens that end an answer or fill a batch."""
    tokenizer = load_tokenizer(folder)
    rules = {name: str(getattr(tokenizer, name, None)) for name in TOKENIZER_RULES}
    content = [tokenizer.backend_tokenizer.to_str(), json.dumps(rules | {"ids": tokenizer.all_special_ids})]
    return hashlib.sha256("\n".join(content).encode()).hexdigest()


def _check_fits(planned: list[PlannedCell], checkpoint: Checkpoint, batch_size: int, dtype: str) -> None:
    """Refuse lengths that the model cannot take. Answers are generated with a cache; other cells have none."""
    for is_cached in (True, False):
        cells = [item for item in planned if (item.cell.task is not None) is is_cached]
        if not cells:
            continue
        _, settings, cell = max(cells, key=lambda item: item.cell.length)
        samples = cell.samples or cell.metadata.get("samples") or batch_size
        option = "--max-length" if "max_length" in FAMILIES[settings["family"]].takes else "--lengths"
        check_input_fits(
            checkpoint.folder,
            cell.length,
            option,
            batch_size=min(batch_size, samples, settings["limit"] or samples),
            dtype=dtype,
            is_cached=is_cached,
        )


@dataclass(frozen=True)
class Evaluation:
    """An evaluation that was checked and can run. out: the folder of the results. planned: its cells. ranges: of
    lengths to take means over."""

    checkpoint: Checkpoint
    out: Path
    planned: list[PlannedCell]
    batch_size: int
    limit: int | None
    dtype: str
    ranges: tuple[Range, ...] = ()

    def run(self) -> list[Summary]:
        """Evaluate the cells that are not finished in `out`, and give the summaries of all cells.

        Records of an unfinished cell are kept, even if another number of processes wrote them. All processes share
        `out`, which the main process locks.
        """
        state = distributed_state()
        with locked(self.out, "lucid eval") if state.is_main_process else nullcontext():
            folder = ResultsFolder(self.out, self.checkpoint.describe())
            if state.is_main_process:
                _forget_damaged(self.planned, folder)
            state.wait_for_everyone()
            if any(folder.finished(name) is None for name, _, _ in self.planned):
                _ask_all(self, folder)
            summaries = [_summary(planned, folder) for planned in self.planned]
            if state.is_main_process:
                for summary in summaries:
                    folder.put(summary)
                folder.arrange([summary["name"] for summary in summaries])
                taken = means(summaries, self.ranges)
                folder.put_means(taken)
                draw_results(summaries, taken, self.out, self.checkpoint.name)
            state.wait_for_everyone()
        return summaries


def prepare(
    checkpoint: Checkpoint,
    tasks: Sequence[str],
    options: Options,
    out: Path,
    *,
    batch_size: int = 1,
    limit: int | None = None,
    dtype: str = "auto",
    ranges: tuple[Range, ...] = (),
) -> Evaluation:
    """Check an evaluation: everything that can be refused without the model is refused here. Nothing is written."""
    if batch_size < 1:
        raise EvalError(f"--batch-size must be at least 1, got {batch_size}")
    if limit is not None and limit < 1:
        raise EvalError(f"--limit must be at least 1, got {limit}")
    ResultsFolder(out, checkpoint.describe())
    planned = plan(checkpoint, tasks, options, limit, dtype)
    check_ranges(ranges, (item.cell.labels["length"] for item in planned if "length" in item.cell.labels))
    _check_fits(planned, checkpoint, batch_size, dtype)
    return Evaluation(checkpoint, out, planned, batch_size, limit, dtype, ranges)


def evaluate(checkpoint: Checkpoint, tasks: Sequence[str], options: Options, out: Path, **how: Any) -> list[Summary]:
    """Prepare an evaluation and run it. how: batch_size, limit, dtype."""
    return prepare(checkpoint, tasks, options, out, **how).run()


def _forget_damaged(planned: list[PlannedCell], folder: ResultsFolder) -> None:
    for name, _, _ in planned:
        try:
            folder.finished(name)
        except DamagedSamples as error:
            print(f"{error}: its samples are asked again", file=sys.stderr)
            folder.forget(name)


def _summary(planned: PlannedCell, folder: ResultsFolder) -> Summary:
    """The summary of a finished cell, from its samples, with the versions and the hash that were recorded with them."""
    name, settings, cell = planned
    records, recorded = folder.finished(name), folder.summary(name)
    assert records is not None, f"{name} was not finished"
    assert recorded is not None
    summary = summarize(name, settings, cell, records)
    return summary | {key: recorded[key] for key in ("versions", "bytes", "sha256") if key in recorded}


def _ask_all(evaluation: Evaluation, folder: ResultsFolder) -> None:
    """Load the model and ask it the samples of every unfinished cell."""
    # Hide the bar of the weights: every cell has its own.
    logging.disable_progress_bar()
    checkpoint, planned = evaluation.checkpoint, evaluation.planned
    model = checkpoint.load(evaluation.dtype)
    tokenizer, lm = None, None
    if any(cell.task or settings["tokenizer_sha256"] for _, settings, cell in planned):
        tokenizer = load_tokenizer(checkpoint.tokenizer_folder)
        lm = HarnessModel(model, tokenizer, evaluation.batch_size)
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
        samples = min(samples, evaluation.limit or samples)
        ask_cell(PlannedCell(name, settings, cell), ask, samples, folder, evaluation.batch_size, title)


def ask_cell(
    planned: PlannedCell, ask: Ask, samples: int, folder: ResultsFolder, batch_size: int, title: str = ""
) -> None:
    """Ask the samples of a cell that have no record yet, a share per process. The main process merges the records."""
    name, settings, cell = planned
    state = distributed_state()
    done = folder.unfinished(name, samples)
    missing = [index for index in range(samples) if index not in done]
    share = missing[state.process_index :: state.num_processes]
    # Wait until all processes have read: a record written earlier would change the shares of the others.
    state.wait_for_everyone()
    file = folder.file(name)
    file = file.with_name(f"{file.name}.{state.process_index}")
    bar = tqdm(total=samples, initial=len(done), desc=title, unit="sample", disable=not state.is_main_process)
    with bar, RecordWriter(file, folder.owner(name)) as writer:
        for record in ask(share, batch_size) if share else ():
            writer.write(record)
            bar.update(min(state.num_processes, samples - bar.n))
        bar.update(samples - bar.n)
    state.wait_for_everyone()
    if state.is_main_process:
        folder.finish(name, settings, cell, samples)
    state.wait_for_everyone()
