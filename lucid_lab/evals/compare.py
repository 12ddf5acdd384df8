"""`lucid compare`: differences between checkpoints on the same samples, with their paired standard errors."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from lucid_attention.files import parse_json, read_json, read_text
from lucid_attention.messages import text_table
from lucid_attention.models.checkpoint import check_checkpoint

from .evaluate import RESULTS, evaluate, result_name


def paired_difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """The mean of b − a over the samples, and its standard error: infinite for one sample."""
    gaps = [after - before for before, after in zip(a, b, strict=True)]
    return fmean(gaps), stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.inf


def read_scores(folder: Path, task: str) -> tuple[list[str], dict[str, list[float]]]:
    """Of the samples that `lucid eval` has written: their hashes, in order, and their scores, by metric."""
    file = folder / f"samples_{task}.jsonl"
    # Not splitlines: a text may hold other line ends.
    lines = [parse_json(line, f"{file}, line {i}") for i, line in enumerate(read_text(file).split("\n"), 1) if line]
    try:
        lines.sort(key=lambda line: line["doc_id"])
        # A perplexity is no mean over samples.
        metrics = [name for name in lines[0]["metrics"] if name != "perplexity"]
        hashes = [f"{line['doc_hash']} {line['prompt_hash']}" for line in lines]
        return hashes, {name: [float(line[name]) for line in lines] for name in metrics}
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: expected samples of `lucid eval`, got {type(error).__name__}: {error}") from error


def comparison(folders: Sequence[Path], tasks: Iterable[str] | None = None) -> str:
    """A table: scores of the first folder of results, and differences of the others.

    tasks: to compare; None for all that the folders have in common.
    """
    contents = [read_json(folder / RESULTS) for folder in folders]
    if any("checkpoint" not in content or "configs" not in content for content in contents):
        raise ValueError(f"expected folders with {RESULTS} of `lucid eval`, got {', '.join(map(str, folders))}")
    known = tasks if tasks is not None else contents[0]["configs"]
    shared = [task for task in known if all(task in content["configs"] for content in contents)]
    if not shared:
        raise ValueError("the results have no task in common: expected the same tasks, lengths and needles")
    names = [str(content["checkpoint"]["name"]) for content in contents]
    labels = names if len(set(names)) == len(names) else [f"{name} ({i})" for i, name in enumerate(names, 1)]
    rows = [["task", "metric", "samples", labels[0], *(f"{label} − {labels[0]}" for label in labels[1:])]]
    for task in shared:
        (hashes, first), *others = (read_scores(folder, task) for folder in folders)
        if any(other != hashes for other, _ in others):
            raise ValueError(f"{task}: the samples differ: evaluate with the same tokenizer, seed, samples and options")
        for metric, scores in first.items():
            gaps = [paired_difference(scores, other[metric]) for _, other in others]
            shown = [f"{mean:+.4f} ± {error:.4f}{' *' * (abs(mean) > 2 * error)}" for mean, error in gaps]
            rows.append([task, metric, str(len(scores)), f"{fmean(scores):.4f}", *shown])
    return f"{text_table(rows)}\n\n± paired standard error over samples; * more than two standard errors"


def compare(
    folders: Sequence[Path], tasks: Sequence[str], options: dict[str, Any], out: Path, **how: Any
) -> str | None:
    """Compare checkpoints, which are evaluated into folders of `out`, and results of `lucid eval`.

    tasks, options, how: as for `evaluate`. Returns the table; None in all processes but the first.
    """
    if len(folders) < 2:
        raise ValueError(f"expected two folders or more to compare, got {len(folders)}")
    checkpoints = [folder for folder in folders if not (folder / RESULTS).is_file()]
    if not checkpoints and (tasks or options):
        raise ValueError("--tasks and their options are for checkpoints, and these folders hold results")
    for folder in checkpoints:
        check_checkpoint(folder)
        if not tasks:
            raise ValueError(f"{str(folder)!r} holds no {RESULTS}: to evaluate checkpoints, give --tasks")
    done = {folder: evaluate(folder, tasks, options, out / result_name(folder), **how) for folder in checkpoints}
    results = [evaluation.results for evaluation in done.values()]
    if None in results:
        return None
    names = results[0]["configs"] if results and results[0] else None
    return comparison([done[folder].folder if folder in done else folder for folder in folders], names)
