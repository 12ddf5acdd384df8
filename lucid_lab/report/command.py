"""`lucid report`: results of experiments, training runs and evaluations as one page."""

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from .markdown import write_markdown
from .page import numbers_file, write_report
from .records import RESULT, VERDICTS, ReportError, Result, kind_of, read_result
from .runs import EVALUATION, METRICS, RECIPE, SUMMARY, comparisons, is_evaluation, read_evaluation, read_training

# The folder in which experiments keep the training runs and evaluations of their jobs.
JOBS = "jobs"
# What `lucid experiment --scale rehearsal` leaves in its folder of this name says nothing about a claim.
REHEARSAL = "rehearsal"
COUNTED = {"experiment": "experiment", "training": "training run", "evaluation": "evaluation"}


def run(args: argparse.Namespace) -> int:
    """`lucid report`. Without --out and --markdown the page is report.html."""
    try:
        _check_files(args.out, args.markdown)
        results = find_results(args.runs)
        if args.markdown is not None:
            print(write_markdown(results, args.markdown))
        if args.out is not None or args.markdown is None:
            out = write_report(results, args.out or Path("report.html"), args.title)
            print(f"{out}: {_counts(results)}; numbers in {out.with_suffix('.json')}")
    except ReportError as error:
        print(f"lucid report: error: {error}", file=sys.stderr)
        return 1
    return 0


def _check_files(out: Path | None, markdown: Path | None) -> None:
    if out is not None and markdown is not None and markdown.resolve() in (out.resolve(), numbers_file(out).resolve()):
        raise ReportError(f"--markdown must be another file than the page and its numbers, got {str(markdown)!r}")


def _counts(results: Sequence[Result]) -> str:
    counts = Counter(map(kind_of, results))
    return ", ".join(
        f"{counts[kind]} {noun}{'' if counts[kind] == 1 else 's'}" for kind, noun in COUNTED.items() if counts[kind]
    )


def find_results(paths: Iterable[Path]) -> list[Result]:
    """The results in files and folders: experiments first, then comparisons, training runs and evaluations.

    In the order of the paths; of a folder by verdict, the best first, and then by path. No file counts twice.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += _files_in(path)
        elif path.exists():
            files.append(path.parent / RECIPE if path.name in (METRICS, SUMMARY) else path)
        else:
            raise ReportError(f"{path}: no such file or folder")
    unique = {file.resolve(): file for file in reversed(files)}
    results = [_read(file) for file in reversed(unique.values())]
    experiments, trainings, evaluations = (
        [result for result in results if kind_of(result) == kind] for kind in COUNTED
    )
    for runs in (trainings, evaluations):
        _name_apart(runs)
    return [*experiments, *comparisons(results), *trainings, *evaluations]


def _files_in(folder: Path) -> list[Path]:
    experiments, trainings, evaluations = (
        [file for file in sorted(folder.rglob(name)) if not left_out & set(file.relative_to(folder).parts)]
        for name, left_out in ((RESULT, {REHEARSAL}), (RECIPE, {JOBS, REHEARSAL}), (EVALUATION, {JOBS, REHEARSAL}))
    )
    experiments.sort(key=lambda file: VERDICTS.index(read_result(file)["verdict"]))
    files = [*experiments, *trainings, *(file for file in evaluations if is_evaluation(file))]
    if not files:
        raise ReportError(
            f"{folder}: no {RESULT}, {RECIPE} or {EVALUATION} in it; `lucid experiment`, `lucid train` and "
            "`lucid eval` write them"
        )
    return files


def _read(file: Path) -> Result:
    if file.name == RECIPE:
        return read_training(file.parent)
    return read_evaluation(file) if file.name == EVALUATION else read_result(file)


def _name_apart(runs: list[Result]) -> None:
    """Number the titles of runs that have the same name."""
    counts = Counter(run["name"] for run in runs)
    numbers: Counter[str] = Counter()
    for run in runs:
        numbers[run["name"]] += 1
        if counts[run["name"]] > 1:
            run["title"] = f"{run['name']} ({numbers[run['name']]})"
