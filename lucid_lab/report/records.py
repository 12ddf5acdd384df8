"""What the report shows, read from the files of the other commands and checked before anything is drawn.

A result is a dictionary of one `kind`: "experiment" (the default, as in result.json), "training", "evaluation",
"analysis", "comparison" of several of them, or "damaged": a file that could not be read.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lucid_attention.files import parse_json, read_bytes, read_json

FORMAT = 1
RESULT, METRICS, STATE = "result.json", "metrics.jsonl", "trainer_state.json"
VERDICTS = ("holds", "partly", "does not hold", "incomplete", "too small to judge")
TEXTS = ("name", "scale", "title", "section", "claim", "paper", "ours", "because", "command", "machine", "finished")
# Transformers' implementations of softmax attention.
SOFTMAX = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")
# Folders with the files of an experiment's jobs.
LEFT_OUT = {"kept"}
# Larger numbers would overflow in the computation of axes.
LARGEST = 1e100

Result = dict[str, Any]


def read_results(paths: Iterable[Path]) -> list[Result]:
    """The results in files and folders: experiments first, the best verdict first, then comparisons and runs.

    A file that cannot be read becomes a result of the kind "damaged"; ValueError if there is no other.
    """
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(2, "No such file or directory", str(path))
        files += _files_in(path) if path.is_dir() else [path]
    results = [_read(file) for file in {file.resolve(): file for file in files}.values()]
    if all(result["kind"] == "damaged" for result in results):
        expected = f"expected one of {', '.join(READERS)} in the folders, got none"
        raise ValueError(results[0]["error"] if results else expected)
    experiments, trainings, evaluations, analyses, damaged = (
        [result for result in results if result["kind"] == kind]
        for kind in ("experiment", "training", "evaluation", "analysis", "damaged")
    )
    experiments.sort(key=lambda result: VERDICTS.index(result["verdict"]))
    for runs in (trainings, evaluations, analyses):
        for run in runs:
            equal = [other for other in runs if other["name"] == run["name"]]
            if len(equal) > 1:
                run["title"] = f"{run['name']} ({[other is run for other in equal].index(True) + 1})"
    compared = [*_compared("Training runs", trainings), *_compared("Evaluations", evaluations)]
    return [*experiments, *compared, *trainings, *evaluations, *analyses, *damaged]


def _files_in(folder: Path) -> list[Path]:
    found = [
        file
        for name in READERS
        for file in sorted(folder.rglob(name))
        if not LEFT_OUT & set(file.relative_to(folder).parts)
    ]
    # A run has one curve: its metrics, else the state in its folder, else that of its last checkpoint.
    curves: dict[Path, tuple[float, Path]] = {}
    for file in (file for file in found if READERS.get(file.name) is _read_training):
        name, _, step = file.parent.name.rpartition("-")
        saved = name == "checkpoint" and step.isdigit()
        rank = float(step) if saved else math.inf if file.name == METRICS else 1e300
        run = file.parent.parent if saved else file.parent
        curves[run] = max(curves.get(run, (-1.0, file)), (rank, file))
    chosen = {file for _, file in curves.values()}
    return [file for file in found if READERS.get(file.name) is not _read_training or file in chosen]


def _read(file: Path) -> Result:
    reader = next((reader for name, reader in READERS.items() if file.match(name)), read_result)
    try:
        return reader(file)
    except (ValueError, OSError) as error:
        return {"kind": "damaged", "error": str(error)}
    except (TypeError, KeyError, AttributeError) as error:
        return {"kind": "damaged", "error": f"{file}: not in the expected form: {type(error).__name__}: {error}"}


def read_result(file: Path) -> Result:
    """The result of an experiment, checked."""
    return checked(read_json(file), str(file))


def checked(result: Any, where: str = "result") -> Result:
    """A copy of a result as the page shows it: None for numbers that are not finite, no control characters.

    Figures are of the kinds
      lines: "x", "y": {"label", "log", "range"}, "series": [{"name", "role", "x", "y", "spread"}], "marks"
      bars: "value": {"label", "range"}, "groups": [{"name", "bars": [{"name", "role", "value", "spread"}]}]
      heatmaps: "rows", "columns": {"label"}, "range", "panels": [{"name", "rows", "columns", "values": by row}]
    A figure of another shape is refused when it is drawn.
    """
    result = {"kind": "experiment", **_clean(_expect({"result": result}, "result", dict, where))}
    if result["kind"] == "damaged":
        return result
    if result.get("format") != FORMAT:
        raise ValueError(f"{where}: format must be {FORMAT}, got {result.get('format')!r:.80}")
    for key in TEXTS if result["kind"] == "experiment" else ("name", "title", "about", "ours"):
        _expect(result, key, str, where)
    if result["kind"] == "experiment" and result.get("verdict") not in VERDICTS:
        raise ValueError(f"{where}: verdict must be one of {', '.join(VERDICTS)}, got {result.get('verdict')!r:.80}")
    for number, figure in enumerate(_expect(result, "figures", list, where)):
        _expect(figure, "title", str, f"{where}: figures[{number}]")
    for number, table in enumerate(_expect(result, "tables", list, where)):
        place = f"{where}: tables[{number}]"
        _expect(table, "title", str, place)
        width = len(_expect(table, "columns", list, place))
        for row in _expect(table, "rows", list, place):
            if not isinstance(row, list) or len(row) != width:
                raise ValueError(f"{place}: every row must have {width} cells, got {row!r:.80}")
    return result


def _expect(holder: Any, key: str, expected: type, where: str) -> Any:
    value = holder.get(key) if isinstance(holder, Mapping) else None
    if not isinstance(value, expected) or isinstance(value, bool):
        raise ValueError(f"{where}: {key} must be of type {expected.__name__}, got {value!r:.80}")
    return value


def is_finite(value: Any) -> bool:
    """Whether a value is a number that a figure can show."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        text = value.encode(errors="replace").decode()
        return "".join(letter if letter >= " " or letter in "\n\t" else "\ufffd" for letter in text)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value if is_finite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _clean(entry) for key, entry in value.items()}
    return [_clean(entry) for entry in value] if isinstance(value, list | tuple) else value


def _run(kind: str, name: str, about: str, ours: str, **rest: Any) -> Result:
    head = {"format": FORMAT, "kind": kind, "name": name, "title": name, "about": about, "ours": ours}
    return checked(head | {"facts": [], "figures": [], "tables": []} | rest, name)


def _facts(settings: Mapping[str, Any]) -> list[list[Any]]:
    return [[key.replace("_", " "), value] for key, value in settings.items() if isinstance(value, str | int | float)]


def _read_training(file: Path) -> Result:
    """A training run, finished or not: metrics.jsonl of `lucid train`, or trainer_state.json of Transformers."""
    run = file.parent.parent if file.parent.name.startswith("checkpoint-") else file.parent
    state = read_json(file) if file.name == STATE else {}
    if file.name == STATE:
        entries = _expect(state, "log_history", list, str(file))
    else:
        # The last line of a run that was killed may be cut off.
        lines = read_bytes(file).split(b"\n")[:-1]
        entries = [parse_json(line, f"{file}, line {number}") for number, line in enumerate(lines, 1)]
    for entry in entries:
        _expect(entry, "step", int, str(file))
    recipe, summary = (
        read_json(run / name) if (run / name).exists() else {} for name in ("recipe.json", "summary.json")
    )
    attention = recipe.get("attention") or "softmax"
    names = sorted(set(map(str, attention))) if isinstance(attention, list) else [str(attention)]
    steps = state.get("max_steps") or recipe.get("steps")
    ours = f"step {max((entry['step'] for entry in entries), default=0)}" + (f" of {steps}" if steps else "")
    if losses := [entry["eval_loss"] for entry in entries if is_finite(entry.get("eval_loss"))]:
        ours += f", validation loss {losses[-1]:.4g}"
    keys = ("data", "sequence_length", "batch_size", "learning_rate", "seed")
    facts = {"attention": ", ".join(names)} | {key: recipe.get(key) for key in keys}
    facts |= {key: summary.get(key) for key in ("tokens", "parameters")}
    figure = loss_figure(entries, _role(attention))
    figures = [figure] if figure["series"] else []
    return _run(
        "training", run.resolve().name, str(recipe.get("about", "")), ours, facts=_facts(facts), figures=figures
    )


def loss_figure(entries: Sequence[Mapping[str, Any]], role: str, title: str = "Loss during training") -> dict[str, Any]:
    """Training and validation loss against steps. Values that are no finite numbers are left out."""
    series = []
    for key, name in (("loss", "training"), ("eval_loss", "validation")):
        points = [(entry["step"], entry[key]) for entry in entries if is_finite(entry.get(key))]
        x, y = ([point[at] for point in points] for at in (0, 1))
        series += [{"name": name, "role": role, "x": x, "y": y}] if points else []
    return {"kind": "lines", "title": title, "x": {"label": "step"}, "y": {"label": "loss"}, "series": series}


def _read_evaluation(file: Path) -> Result:
    """An evaluation as lm-eval writes it: {"results": {task: {"metric,filter": value}}, "configs": {task: …}}."""
    content = read_json(file)
    results = _expect(content, "results", dict, f"{file} (of lm-eval)")
    _expect(content, "configs", dict, f"{file} (of lm-eval)")
    scores: list[dict[str, Any]] = []
    for task, values in results.items():
        for key, value in (values if isinstance(values, dict) else {}).items():
            metric, _, kind = key.partition(",")
            # RULER's tasks report -1 for a length that was not run.
            if metric.endswith("_stderr") or not kind or not is_finite(value) or (metric.isdigit() and value < 0):
                continue
            error = values.get(f"{metric}_stderr,{kind}")
            samples = (content.get("n-samples") or {}).get(task) or {}
            score = {"task": task, "metric": metric if kind == "none" else f"{metric} ({kind})", "value": value}
            scores.append(score | {"error": error if is_finite(error) else None, "samples": samples.get("effective")})
    if not scores:
        raise ValueError(f"{file}: results must hold at least one score, got none")
    # Written by `lucid eval`.
    checkpoint = content.get("checkpoint") if isinstance(content.get("checkpoint"), dict) else {}
    model = str(checkpoint.get("name") or content.get("model_name") or file.resolve().parent.name)
    name, role = Path(model).name or model, _role(checkpoint.get("attention") or "softmax")
    rows = [[score[key] for key in ("task", "metric", "value", "error", "samples")] for score in scores]
    table = {"title": "Scores", "columns": ["task", "metric", "score", "standard error", "samples"], "rows": rows}
    ours = "; ".join(f"{score['task']} {score['metric']} {score['value']:.4g}" for score in scores[:4])
    ours += f"; {len(scores) - 4} more" if len(scores) > 4 else ""
    facts = {key: checkpoint.get(key) for key in ("model_type", "attention")}
    facts |= {key: content.get(key) for key in ("model_name", "lm_eval_version", "transformers_version")}
    rest = {"facts": _facts(facts), "tables": [table], "scores": scores, "role": role}
    return _run(
        "evaluation", name, f"scores on {', '.join(results)}", ours, figures=score_figures([(name, rest)]), **rest
    )


def _role(attention: str | list[str]) -> str:
    """The role, and so the colour, of a model. attention: a name, or a name for every layer."""
    names = {
        "softmax" if name in SOFTMAX else str(name)
        for name in ([attention] if isinstance(attention, str) else attention)
    }
    return names.pop() if len(names) == 1 else "hybrid"


def score_figures(evaluations: Sequence[tuple[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Maps of the scores that have a length, and bars of the others, for every metric.

    evaluations: (name, {"role", "scores": [{"task", "metric", "value", "error"}]}). The length ends the name of a task,
    as in `lucid eval`, or is the name of a metric, as in RULER. A task of several evaluations is a group of bars.
    """
    grids: dict[str, dict[str, dict[tuple[str, int], float]]] = {}
    groups: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name, run in evaluations:
        for score in run["scores"]:
            task, metric, value = score["task"], score["metric"], score["value"]
            if metric.isdigit():
                grids.setdefault("score", {}).setdefault(name, {})[task, int(metric)] = value
            elif (parts := task.rpartition("-"))[2].isdigit():
                grids.setdefault(metric, {}).setdefault(name, {})[parts[0], int(parts[2])] = value
            else:
                several = len(evaluations) > 1
                bar = {"name": name if several else task, "role": run["role"], "value": value, "spread": score["error"]}
                groups.setdefault(metric, {}).setdefault(task if several else "", []).append(bar)
    figures: list[dict[str, Any]] = []
    for metric, panels in grids.items():
        cells = [cell for panel in panels.values() for cell in panel]
        rows, columns = list(dict.fromkeys(task for task, _ in cells)), sorted({length for _, length in cells})
        values = [value for panel in panels.values() for value in panel.values()]
        listed = [
            {
                "name": name,
                "rows": rows,
                "columns": columns,
                "values": [[panel.get((r, c)) for c in columns] for r in rows],
            }
            for name, panel in panels.items()
        ]
        ends = [0, 1] if min(values) >= 0 and max(values) <= 1 else [min(values), max(values)]
        labels = {"rows": {"label": "task"}, "columns": {"label": "length"}, "range": ends}
        figures.append({"kind": "heatmaps", "title": f"{metric} by length", "panels": listed} | labels)
    for metric, tasks in groups.items():
        listed = [{"name": task, "bars": bars} for task, bars in tasks.items()]
        figure = {"kind": "bars", "title": metric, "value": {"label": metric}, "groups": listed}
        figures.append(figure | {"note": "± standard error over samples."})
    return figures


def _compared(what: str, runs: Sequence[Result]) -> list[Result]:
    """The curves or scores of several runs in the same figures."""
    if len(runs) < 2:
        return []
    figures = []
    for kind in ("training", "validation"):
        drawn = [(run["title"], figure) for run in runs for figure in run["figures"] if figure["kind"] == "lines"]
        series = [line | {"name": name} for name, f in drawn for line in f["series"] if line["name"] == kind]
        axes = {"x": {"label": "step"}, "y": {"label": "loss"}}
        figures += [{"kind": "lines", "title": f"Loss, {kind}", "series": series} | axes] if series else []
    figures += score_figures([(run["title"], run) for run in runs if "scores" in run])
    ours = "; ".join(f"{run['title']}: {run['ours']}" for run in runs)
    return [_run("comparison", f"{what} compared", f"{len(runs)} runs", ours, figures=figures)]


def _read_analysis(file: Path) -> Result:
    """The analysis.json or maps.json of `lucid analyze`, which hold the figures themselves."""
    content = read_json(file)
    checkpoint, source = (_expect(content, key, dict, str(file)) for key in ("checkpoint", "input"))
    name = _expect(checkpoint, "name", str, f"{file}: checkpoint")
    facts = _facts({key: checkpoint.get(key) for key in ("model_type", "attention")} | {"tokens": source.get("tokens")})
    figures = _expect(content, "figures", list, str(file))
    titles = ", ".join(dict.fromkeys(str(figure.get("title", "")) for figure in figures[:4]))
    return _run("analysis", name, f"{file.stem}: {source.get('about', '')}", titles, facts=facts, figures=figures)


# Name of a file, or pattern of names, and the function that reads it.
READERS: dict[str, Callable[[Path], Result]] = {
    RESULT: read_result,
    METRICS: _read_training,
    STATE: _read_training,
    "results.json": _read_evaluation,
    "results_*.json": _read_evaluation,
    "analysis.json": _read_analysis,
    "maps.json": _read_analysis,
}
