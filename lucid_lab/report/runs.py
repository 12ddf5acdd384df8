"""Results from the files of `lucid train` and `lucid eval`, and comparisons of several of them."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .numbers import shown, with_spread
from .records import (
    FORMAT,
    NUMBER,
    ReportError,
    Result,
    check_attention,
    checked_evaluation,
    expect,
    is_finite,
    parse_json,
    read_json,
)

RECIPE, METRICS, SUMMARY = "recipe.json", "metrics.jsonl", "summary.json"
EVALUATION = "results.json"
# Transformers' implementations of softmax attention.
SOFTMAX = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")
SAMPLES = "samples"

Cell = dict[str, Any]


def role_of(attention: str | Sequence[str]) -> str:
    """The role, and so the colour, of a model. attention: a name, or a name for every layer."""
    names = {attention} if isinstance(attention, str) else set(attention)
    names = {"softmax" if name in SOFTMAX else name for name in names}
    return names.pop() if len(names) == 1 else "hybrid"


def read_training(folder: Path) -> Result:
    """The result of a run of `lucid train`, finished or not."""
    where = str(folder / RECIPE)
    recipe = read_json(folder / RECIPE)
    for key in ("steps", "batch_size", "sequence_length"):
        expect(recipe, key, int, where)
    for key in ("about", "data"):
        expect(recipe, key, str, where)
    attention = expect(recipe, "attention", (str, list), where)
    check_attention(attention, where)
    entries = read_metrics(folder / METRICS)
    summary = read_json(folder / SUMMARY) if (folder / SUMMARY).exists() else None
    name = folder.resolve().name
    settings = ("sequence_length", "batch_size", "learning_rate", "precision", "seed")
    facts = [
        ["attention", attention if isinstance(attention, str) else ", ".join(map(str, attention))],
        ["data", Path(recipe["data"]).name],
        *([key.replace("_", " "), shown(recipe[key])] for key in settings if recipe.get(key) is not None),
    ]
    last = max((entry["step"] for entry in entries), default=0)
    outcome = f"not finished: step {last} of {recipe['steps']}"
    if summary is not None:
        for key in ("steps", "tokens", "parameters"):
            facts.append([key, f"{expect(summary, key, int, str(folder / SUMMARY)):,}"])
        if summary.get("median_tokens_per_second"):
            expect(summary, "median_tokens_per_second", NUMBER, str(folder / SUMMARY))
            facts.append(["tokens per second", f"{summary['median_tokens_per_second']:,.0f}"])
        loss = expect(summary, "validation_loss", NUMBER, str(folder / SUMMARY))
        _check_metrics(folder / METRICS, summary.get("metrics_sha256"))
        outcome = f"validation loss {loss:.4f} after {summary['steps']} steps"
    figure = loss_figure(entries, attention)
    return {
        "format": FORMAT,
        "kind": "training",
        "name": name,
        "title": name,
        "about": recipe["about"],
        "ours": outcome,
        "role": role_of(attention),
        "recipe": recipe,
        "facts": facts,
        "figures": [figure] if figure["series"] else [],
        "tables": [],
    }


def _check_metrics(file: Path, expected: Any) -> None:
    """Refuse other metrics than those of the finished run. A summary may be moved without them."""
    if expected and file.exists() and hashlib.sha256(file.read_bytes()).hexdigest() != expected:
        raise ReportError(
            f"{file}: not the file that the run wrote: remove {SUMMARY}, and the same `lucid train` command writes "
            "both again"
        )


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The entries of a metrics file; none if it does not exist. A last line that was cut off is left out."""
    *lines, _cut_off = file.read_bytes().split(b"\n") if file.exists() else [b""]
    entries = []
    for number, line in enumerate(lines, 1):
        entry = parse_json(line, f"{file}, line {number}")
        expect(entry, "step", int, f"{file}, line {number}")
        entries.append(entry)
    return entries


def loss_figure(entries: Sequence[Mapping[str, Any]], attention: str | Sequence[str]) -> dict[str, Any]:
    """Training and validation loss against steps. Values that are no finite numbers are left out."""
    series = []
    for key, name in (("loss", "training"), ("eval_loss", "validation")):
        x, y = _curve(entries, key)
        if x:
            series.append({"name": name, "role": role_of(attention), "x": x, "y": y, "spread": None})
    axes = {"x": {"label": "step"}, "y": {"label": "loss, nats per token"}}
    return {"kind": "lines", "title": "Loss during training", "series": series} | axes


def _curve(entries: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    points = [(entry["step"], entry[key]) for entry in entries if is_finite(entry.get(key))]
    return [step for step, _ in points], [value for _, value in points]


def is_evaluation(file: Path) -> bool:
    """Whether a results.json is one of `lucid eval`: others use the name, too."""
    content = read_json(file, object)
    return isinstance(content, dict) and ("checkpoint" in content or "cells" in content)


def read_evaluation(file: Path) -> Result:
    """The result of `lucid eval` on one checkpoint."""
    content = checked_evaluation(read_json(file), str(file))
    checkpoint, cells, means = content["checkpoint"], content["cells"], content.get("means", [])
    if not cells:
        raise ReportError(f"{file}: cells must hold at least one cell, got none")
    for cell in cells:
        _check_samples(file.parent / SAMPLES / f"{cell['name']}.jsonl", cell)
    name = checkpoint["name"]
    attention = checkpoint.get("attention") or "softmax"
    names = attention if isinstance(attention, str) else ", ".join(map(str, attention))
    facts = [["attention", names], ["model type", str(checkpoint.get("model_type", "–"))]]
    if checkpoint.get("sha256"):
        facts.append(["checkpoint", str(checkpoint["sha256"])[:12]])
    for package, version in (cells[-1].get("versions") or {}).items():
        facts.append([str(package), str(version)])
    families = ", ".join(dict.fromkeys(cell["family"] for cell in cells))
    evaluation: Result = {
        "format": FORMAT,
        "kind": "evaluation",
        "name": name,
        "title": name,
        "about": f"scores on {families}",
        "role": role_of(attention),
        "cells": _drawn(cells, means),
        "facts": facts,
    }
    headlines = []
    for family, members in _by_family([evaluation]).items():
        values = [_scaled(cell)[0] for cell in members[0][1]]
        mean = "–" if None in values else f"{math.fsum(values) / len(values):.4g}"
        headlines.append(f"{family[0]} {mean}{' %' if family[3] else ''} ({family[1]})")
    figures = family_figures([evaluation])
    tables = [*_cell_tables(cells), *_cell_tables([mean | {"family": f"{mean['family']}, means"} for mean in means])]
    return evaluation | {"ours": "; ".join(headlines), "figures": figures, "tables": tables}


def _drawn(cells: Sequence[Cell], means: Sequence[Cell]) -> list[Cell]:
    """The cells for figures. Three labels are too many: there the means over tasks stand in the place of the cells."""
    over_tasks = [mean for mean in means if list(mean["over"]) == ["task"]]
    replaced = {mean["family"] for mean in over_tasks} & {cell["family"] for cell in cells if len(cell["labels"]) > 2}
    return [
        *(cell for cell in cells if cell["family"] not in replaced),
        *(mean for mean in over_tasks if mean["family"] in replaced),
    ]


def _check_samples(file: Path, cell: Cell) -> None:
    """Refuse a file of samples that is not the one the mean was taken over. Results may be moved without samples."""
    if cell.get("sha256") and file.exists() and hashlib.sha256(file.read_bytes()).hexdigest() != cell["sha256"]:
        raise ReportError(
            f"{file}: not the file that {EVALUATION} describes, which has {cell['samples']} samples and the sha256 "
            f"{cell['sha256'][:12]}: the same `lucid eval` command asks its samples again"
        )


def _scaled(cell: Cell) -> tuple[Any, Any]:
    """Mean and standard error of a cell: in percent if there is a best score; None for a missing one."""
    factor = 100 / cell["out_of"] if cell.get("out_of") else 1.0
    values: tuple[Any, Any] = (cell["mean"], cell.get("standard_error"))
    mean, error = (factor * value if is_finite(value) else None for value in values)
    return mean, error


def _unit(metric: str, out_of: Any) -> str:
    return f"{metric}, %" if out_of else metric


def _cell_tables(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """A table for each family: every cell with its labels, mean ± standard error and samples."""
    tables = []
    for family in dict.fromkeys(cell["family"] for cell in cells):
        members = [cell for cell in cells if cell["family"] == family]
        labels = list(dict.fromkeys(label for cell in members for label in cell["labels"]))
        columns = [*labels, "metric", "score", "samples"]
        rows = []
        for cell in members:
            places = 1 if cell.get("out_of") else 4
            score = with_spread(*_scaled(cell), places)
            metric = _unit(cell["metric"], cell.get("out_of"))
            rows.append([*(cell["labels"].get(label) for label in labels), metric, score, cell["samples"]])
        note = "± standard error over samples."
        tables.append({"title": family, "note": note, "columns": columns, "rows": rows})
    return tables


# Family, metric, names of labels, whether scores are in percent.
Family = tuple[str, str, tuple[str, ...], bool]


def _by_family(evaluations: Sequence[Result]) -> dict[Family, list[tuple[Result, list[Cell]]]]:
    families: dict[Family, list[tuple[Result, list[Cell]]]] = {}
    for evaluation in evaluations:
        groups: dict[Family, list[Cell]] = {}
        for cell in evaluation["cells"]:
            key = (cell["family"], cell["metric"], tuple(cell["labels"]), bool(cell.get("out_of")))
            groups.setdefault(key, []).append(cell)
        for key, cells in groups.items():
            families.setdefault(key, []).append((evaluation, cells))
    return families


def family_figures(evaluations: Sequence[Result], at_least: int = 1) -> list[dict[str, Any]]:
    """A figure for each family that at least `at_least` evaluations have. The figure shows all these evaluations.

    Two labels make heat maps, a label of numbers makes curves, all others make bars.
    """
    figures = []
    for (family, metric, labels, percent), members in _by_family(evaluations).items():
        if len(members) < at_least:
            continue
        # Cells with equal labels differ in other settings. The figure shows the newest cell, the table shows all.
        scores = {
            evaluation["title"]: {tuple(cell["labels"].values()): _scaled(cell) for cell in cells}
            for evaluation, cells in members
        }
        title, unit = f"{family}: {metric}", _unit(metric, percent)
        places = {place for cells in scores.values() for place in cells}
        if len(labels) == 2:
            means = {name: {place: mean for place, (mean, _) in cells.items()} for name, cells in scores.items()}
            values = [mean for cells in means.values() for mean in cells.values() if mean is not None]
            ends = (0.0, 100.0) if percent else (min(values, default=0.0), max(values, default=1.0))
            figures.append(grid_figure(means, labels, title, ends, "%" if percent else ""))
        elif len(labels) == 1 and len(places) > 1 and all(isinstance(place[0], NUMBER) for place in places):
            figures.append(_score_lines(members, scores, labels[0], title, unit))
        else:
            figures.append(_score_bars(members, scores, labels, title, unit, percent))
    return figures


def grid_figure(
    panels: Mapping[str, Mapping[tuple[Any, ...], Any]],
    axes: Sequence[str],
    title: str,
    ends: tuple[float, float],
    unit: str = "",
) -> dict[str, Any]:
    """Heat maps on one scale. panels: values by (row, column). axes: the names of rows and columns."""
    rows, columns = (_ordered([key[axis] for cells in panels.values() for key in cells]) for axis in (0, 1))
    panel_list = [
        {
            "name": name,
            "rows": rows,
            "columns": columns,
            "values": [[cells.get((row, column)) for column in columns] for row in rows],
        }
        for name, cells in panels.items()
    ]
    names = {"rows": {"label": axes[0]}, "columns": {"label": axes[1]}}
    return {"kind": "heatmaps", "title": title, "range": list(ends), "unit": unit, "panels": panel_list} | names


def _ordered(labels: list[Any]) -> list[Any]:
    """Distinct labels: numbers sorted, others in order of appearance."""
    distinct = list(dict.fromkeys(labels))
    return sorted(distinct) if all(isinstance(label, NUMBER) for label in distinct) else distinct


Members = Sequence[tuple[Result, list[Cell]]]
Scores = Mapping[str, Mapping[tuple[Any, ...], tuple[Any, Any]]]


def _score_lines(members: Members, scores: Scores, label: str, title: str, unit: str) -> dict[str, Any]:
    series = []
    for evaluation, _ in members:
        points = sorted((place[0], *score) for place, score in scores[evaluation["title"]].items())
        x, y, spread = (list(column) for column in zip(*points, strict=True))
        series.append({"name": evaluation["title"], "role": evaluation["role"], "x": x, "y": y, "spread": spread})
    every_x = [x for line in series for x in line["x"]]
    log = min(every_x) > 0 and max(every_x) >= 8 * min(every_x)
    axes = {"x": {"label": label, "log": log}, "y": {"label": unit}}
    return {"kind": "lines", "title": title, "series": series, "band": "± standard error over samples"} | axes


def _score_bars(
    members: Members, scores: Scores, labels: Sequence[str], title: str, unit: str, percent: bool
) -> dict[str, Any]:
    """One evaluation: a bar for each cell. Several: a group for each cell, a bar for each evaluation."""
    places = list(dict.fromkeys(place for cells in scores.values() for place in cells))

    def bar(evaluation: Result, place: tuple[Any, ...], name: str) -> dict[str, Any]:
        mean, error = scores[evaluation["title"]].get(place, (None, None))
        return {"name": name, "role": evaluation["role"], "value": mean, "spread": error}

    if len(members) == 1:
        bars = [bar(members[0][0], place, _place_name(labels, place)) for place in places]
        groups: list[dict[str, Any]] = [{"name": "", "bars": bars}]
    else:
        groups = [
            {
                "name": _place_name(labels, place),
                "bars": [bar(evaluation, place, evaluation["title"]) for evaluation, _ in members],
            }
            for place in places
        ]
    value = {"label": unit, "range": [0, 100] if percent else None}
    note = "± standard error over samples."
    return {"kind": "bars", "title": title, "note": note, "value": value, "groups": groups}


def _place_name(labels: Sequence[str], place: tuple[Any, ...]) -> str:
    if len(labels) == 1:
        return str(place[0])
    return ", ".join(f"{label} {value}" for label, value in zip(labels, place, strict=True)) or "score"


def comparisons(results: Sequence[Result]) -> list[Result]:
    """Figures of several training runs on the same data, and of several evaluations of the same family."""
    compared = []
    trainings: dict[str, list[Result]] = {}
    for result in results:
        if result.get("kind") == "training":
            recipe = result["recipe"]
            same = [recipe.get(key) for key in ("data", "data_options", "sequence_length")]
            trainings.setdefault(json.dumps(same, sort_keys=True), []).append(result)
    for members in trainings.values():
        if len(members) > 1:
            compared.append(_compared_trainings(members))
    evaluations = [result for result in results if result.get("kind") == "evaluation"]
    figures = family_figures(evaluations, at_least=2)
    if figures:
        title, about = "Evaluations compared", f"{len(evaluations)} checkpoints"
        names = "; ".join(evaluation["title"] for evaluation in evaluations)
        compared.append(_comparison("evaluations", title, about, names, figures))
    return compared


def _comparison(name: str, title: str, about: str, ours: str, figures: list[dict[str, Any]]) -> Result:
    head = {"format": FORMAT, "kind": "comparison", "name": name, "title": title, "about": about, "ours": ours}
    return head | {"facts": [], "figures": figures, "tables": []}


def _compared_trainings(runs: Sequence[Result]) -> Result:
    """Losses against steps, or against tokens if batches differ in size."""
    batches = {run["recipe"]["batch_size"] for run in runs}
    figures = []
    for index, kind in enumerate(("training", "validation")):
        series = []
        for run in runs:
            tokens = 1 if len(batches) == 1 else run["recipe"]["batch_size"] * run["recipe"]["sequence_length"]
            for line in (line for figure in run["figures"] for line in figure["series"] if line["name"] == kind):
                x = [tokens * step for step in line["x"]]
                series.append({"name": run["title"], "role": run["role"], "x": x, "y": line["y"], "spread": None})
        axes = {"x": {"label": "step" if len(batches) == 1 else "tokens"}, "y": {"label": "loss, nats per token"}}
        if series:
            title = ("Training loss", "Validation loss")[index]
            figures.append({"kind": "lines", "title": title, "series": series} | axes)
    data, length = Path(runs[0]["recipe"]["data"]).name, runs[0]["recipe"]["sequence_length"]
    about = f"{len(runs)} runs on {data}, sequences of {length} tokens"
    ours = "; ".join(f"{run['title']}: {run['ours']}" for run in runs)
    return _comparison("training-runs", "Training runs compared", about, ours, figures)
