"""The conclusion of a full recipe: read what its commands have written, and judge it against the paper's numbers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from lucid_attention.files import parse_json, read_json, read_text
from lucid_attention.messages import first_line

from ...report.records import RESULT
from ...training.run import METRICS
from .arguments import EXPERIMENTS_OUT
from .result import Conclusion, Table, table
from .steps import Step
from .verdict import Judged, Measure, Measured, Place, Verdict, verdict_on

# The files that hold the results of the commands.
RECORDS = {
    "train": "summary.json",
    "eval": "results.json",
    "analyze": "analysis.json",
    "bench": "on_device.json",
    "experiment": RESULT,
}
LOSS, WORST, SPEED, KAPPA, LARGEST = "loss", "worst loss on the way", "tokens/s", "κ(P), median", "κ(P), largest"
HEADINGS = {"train": "Training", "eval": "Scores", "analyze": "Measurements", "bench": "Measurements"}

Numbers = dict[Place, Measure]
# Sizes of a rehearsal → those of the paper that they stand for.
Sizes = Mapping[int, int]


def conclude_full(
    experiment: Judged, steps: Sequence[Step], root: Path = Path(), sizes: Sizes | None = None
) -> Conclusion:
    """The conclusion from what the steps of a full recipe have written below `root`.

    sizes: of a rehearsal: its lengths, and those that they stand for.
    """
    measured, tables = read_steps(steps, root, sizes)
    verdict, numbers = verdict_on(experiment, measured)
    shown = [numbers] if numbers["rows"] else []
    return Conclusion(verdict.ours, verdict.verdict, verdict.because, seeds=1, tables=[*shown, *tables])


def read_steps(steps: Sequence[Step], root: Path = Path(), sizes: Sizes | None = None) -> tuple[Measured, list[Table]]:
    """The numbers that finished steps have written, by place and as tables. Steps without a record are left out."""
    numbers: Numbers = {}
    verdicts: dict[str, Verdict] = {}
    rows: dict[str, list[list[Any]]] = {}
    for step in steps:
        file = record_of(step, root)
        if file is None or not file.exists():
            continue
        command, name = step.words[0], file.parent.name
        try:
            content = read_json(file)
            if command == "experiment":
                verdicts[step.words[1]] = Verdict(content["verdict"], content["ours"], content["because"])
                continue
            found = READERS[command](name, content, sizes or {})
            if command == "train" and (worst := _worst_loss(file.with_name(METRICS))) is not None:
                found[Place(name, WORST)] = Measure(worst)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{file} is not what {step.line} writes ({type(error).__name__}: {first_line(error)}): "
                "remove it and run that command again"
            ) from error
        numbers |= found
        rows.setdefault(HEADINGS[command], []).extend(
            [*place, round(value, 4), round(error, 4) or None] for place, (value, error) in found.items()
        )
    columns = ["record", "what", "where", "value", "± error"]
    return Measured(numbers, verdicts), [table(title, columns, found) for title, found in rows.items()]


def record_of(step: Step, root: Path) -> Path | None:
    """The file that holds the result of a step; None for a command without one."""
    if step.words[0] not in RECORDS:
        return None
    out = step.words[step.words.index("--out") + 1] if "--out" in step.words else ""
    if step.words[0] == "experiment":
        scale = step.words[step.words.index("--scale") + 1]
        return root / (out or EXPERIMENTS_OUT) / f"{step.words[1]}-{scale}" / RESULT
    return root / out / RECORDS[step.words[0]] if out else None


def _losses(name: str, summary: dict[str, Any], sizes: Sizes) -> Numbers:
    found = {Place(name, LOSS): Measure(summary["validation_loss"])}
    speed = summary["median_tokens_per_second"]
    return found | ({Place(name, SPEED): Measure(speed)} if speed else {})


def _worst_loss(metrics: Path) -> float | None:
    """The largest validation loss on the way; None without any."""
    lines = read_text(metrics).splitlines() if metrics.exists() else []
    entries = [parse_json(line, f"{metrics}, line {number}") for number, line in enumerate(lines, 1)]
    return max((entry["eval_loss"] for entry in entries if entry.get("eval_loss") is not None), default=None)


def _scores(name: str, results: dict[str, Any], sizes: Sizes) -> Numbers:
    """Every metric of every cell, and the means over cells."""
    found: Numbers = {}
    for cell in [*results["cells"], *results.get("means", [])]:
        labels = {label: _sized(value, sizes) for label, value in cell["labels"].items()}
        factor = 100 / cell["out_of"] if cell.get("out_of") else 1.0
        for metric, score in {cell["metric"]: cell, **cell.get("metrics", {})}.items():
            error = factor * (score["standard_error"] or 0.0)
            what = cell["family"] if metric == cell["metric"] else f"{cell['family']} {metric}"
            place = Place(name, what, cell_text(**labels))
            found[place] = Measure(factor * score["mean"], error)
    return found


def cell_text(**labels: object) -> str:
    """The labels of a cell in the order of their names, for a place."""
    return ", ".join(f"{label} {labels[label]}" for label in sorted(labels))


def _sized(value: Any, sizes: Sizes) -> Any:
    """A number of a shrunken recipe as the one it stands for; ranges, such as "64-256", too."""
    if isinstance(value, str) and all(part.isdigit() for part in value.split("-")):
        return "-".join(str(sizes.get(int(part), int(part))) for part in value.split("-"))
    return sizes.get(value, value) if isinstance(value, int) else value


def _analyses(name: str, analysis: dict[str, Any], sizes: Sizes) -> Numbers:
    """κ by length, the median and the largest of all heads, and the mean hit rates."""
    results, kappas = analysis["results"], dict[int, list[float]]()
    for record in results.get("conditioning", []):
        kappas.setdefault(_sized(record["length"], sizes), []).append(record["kappa"])
    found = {}
    for length, values in sorted(kappas.items()):
        for what, value in ((KAPPA, median(values)), (LARGEST, max(values))):
            found[Place(name, what, cell_text(length=length))] = Measure(value)
    hit_rates = results.get("mean_hit_rate", {})
    return found | {Place(name, f"hit rate, {measure}"): Measure(value) for measure, value in hit_rates.items()}


def _times(name: str, results: dict[str, Any], sizes: Sizes) -> Numbers:
    """Milliseconds of every contestant of a benchmark, and the ratio to its peer."""
    found = {}
    for record in results["records"]:
        cell = f"{record['sizes']['model']} {_sized(record['sizes']['tokens'], sizes)}"
        for contestant, seconds in record["seconds"].items():
            found[Place(name, f"{contestant}, ms", cell)] = Measure(1000 * seconds[0])
        for ratio, (value, *_) in record["ratios"].items():
            found[Place(name, f"{ratio.partition(' / ')[0]}, ratio", cell)] = Measure(value)
    return found


READERS = {"train": _losses, "eval": _scores, "analyze": _analyses, "bench": _times}
