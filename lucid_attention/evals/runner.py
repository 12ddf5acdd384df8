"""Evaluate a checkpoint: every cell of every family, on one process or on several."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm
from transformers.utils import logging

from ..base.processes import distributed_state
from ..report.pictures import draw_heatmap
from .checkpoint import Checkpoint
from .families import FAMILIES
from .harness import Asked, Prompted, quiet
from .records import Folder, Writer, cell_name, cell_settings, summary
from .runs import EvalError, Family, Options, Record, Run
from .spans import load_tokenizer

Ask = Callable[[Sequence[int], int], Iterator[Record]]


class Cell(NamedTuple):
    """A run that is to be evaluated, and the name of its results."""

    name: str
    settings: dict[str, Any]
    run: Run


def chosen(tasks: Sequence[str]) -> dict[str, Family]:
    """Families by their names."""
    for name in tasks:
        if name not in FAMILIES:
            near = get_close_matches(name, FAMILIES, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise EvalError(f"there is no task {name!r}{hint}: {', '.join(FAMILIES)}, or list")
    return {name: FAMILIES[name] for name in tasks}


def planned(checkpoint: Checkpoint, tasks: Sequence[str], options: Options, limit: int | None) -> list[Cell]:
    """The cells of an evaluation. What cannot be evaluated is refused here, before a model is loaded."""
    families = chosen(tasks)
    digest = ""
    if any(family.needs_tokenizer for family in families.values()):
        options = replace(options, tokenizer=checkpoint.tokenizer_folder())
        digest = _tokenizer_hash(options.tokenizer)
    cells = []
    for name, family in families.items():
        for run in family.runs(options):
            settings = cell_settings(name, run, limit, digest if family.needs_tokenizer else "")
            cells.append(Cell(cell_name(settings), settings, run))
    return cells


def _tokenizer_hash(folder: str) -> str:
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
) -> list[dict[str, Any]]:
    """Evaluate what is not finished in `out`, and give the summaries of all cells.

    Samples of an unfinished cell stay, however many processes wrote them. Several processes share one folder.
    """
    if batch_size < 1:
        raise EvalError(f"--batch-size must be at least 1, got {batch_size}")
    if limit is not None and limit < 1:
        raise EvalError(f"--limit must be at least 1, got {limit}")
    folder, described = Folder(out), checkpoint.describe()
    folder.check_is_of(described)
    cells = planned(checkpoint, tasks, options, limit)
    if any(folder.finished(cell.name) is None for cell in cells):
        _ask_all(cells, folder, checkpoint, batch_size, limit, dtype)
    done = []
    for cell in cells:
        records = folder.finished(cell.name)
        assert records is not None, f"{cell.name} was not finished"
        done.append(summary(cell.name, cell.settings, cell.run, (record["score"] for record in records)))
        if distributed_state().is_main_process:
            folder.add(described, done[-1])
    if distributed_state().is_main_process:
        draw(done, out, checkpoint.name)
    distributed_state().wait_for_everyone()
    return done


def _ask_all(
    cells: list[Cell], folder: Folder, checkpoint: Checkpoint, batch_size: int, limit: int | None, dtype: str
) -> None:
    # One bar is enough.
    logging.disable_progress_bar()
    model = checkpoint.load(dtype)
    tokenizer, lm = None, None
    if any(cell.run.task or cell.settings["tokenizer_sha256"] for cell in cells):
        tokenizer = load_tokenizer(checkpoint.tokenizer_folder())
        with quiet():
            lm = Prompted(model, tokenizer, batch_size)
    for number, cell in enumerate(cells, 1):
        if folder.finished(cell.name) is not None:
            continue
        ask: Ask
        if cell.run.evaluate is not None:
            ask, samples = partial(cell.run.evaluate, model, tokenizer), cell.run.samples
        else:
            asked = Asked(cell.run, lm)
            ask, samples = asked, asked.samples
        title = f"{number}/{len(cells)} {_title(cell.settings)}"
        ask_cell(cell.name, ask, min(samples, limit or samples), folder, batch_size, title)


def ask_cell(name: str, ask: Ask, samples: int, folder: Folder, batch_size: int, title: str = "") -> list[Record]:
    """Ask for the samples of a cell that are not there yet; each process for its share."""
    ours = distributed_state()
    done = folder.so_far(name, samples)
    left = [index for index in range(samples) if index not in done]
    mine = left[ours.process_index :: ours.num_processes]
    # Nobody writes before everybody has read.
    ours.wait_for_everyone()
    file = folder.file(name)
    bar = tqdm(total=samples, initial=len(done), desc=title, unit="sample", disable=not ours.is_main_process)
    with bar, Writer(file.with_name(f"{file.name}.{ours.process_index}")) as writer:
        for record in ask(mine, batch_size) if mine else ():
            writer.write(record)
            bar.update(min(ours.num_processes, samples - bar.n))
        bar.update(samples - bar.n)
    ours.wait_for_everyone()
    if ours.is_main_process:
        folder.finish(name, samples)
    ours.wait_for_everyone()
    return folder.finished(name) or []


def _title(settings: dict[str, Any]) -> str:
    return " ".join([settings["family"], *(f"{name}={value}" for name, value in settings["labels"].items())])


def draw(cells: list[dict[str, Any]], out: Path, name: str) -> list[Path]:
    """A heat map for each family whose cells have two labels, and a best score."""
    drawn = []
    for family in dict.fromkeys(cell["family"] for cell in cells):
        ours = [cell for cell in cells if cell["family"] == family and cell["out_of"]]
        axes = list(ours[0]["labels"]) if ours else []
        if len(axes) == 2:
            values = {tuple(cell["labels"].values()): 100 * cell["mean"] / cell["out_of"] for cell in ours}
            drawn.append(out / f"{family}.png")
            draw_heatmap(values, axes, drawn[-1], f"{family}: {name}\n{ours[0]['metric']}, %")
    return drawn
