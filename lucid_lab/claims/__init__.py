"""The claims of the paper, a file each: CLAIM, arms as data, `judge()`, `run(lab)`. Here: how they are run.

`lucid experiment` and `lucid demo` call `run_experiments` and `run_demo`.
"""

import inspect
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from lucid_attention.files import write_record
from lucid_attention.messages import did_you_mean, text_table

from ..bench.harness import machine
from ..locks import locked
from ..report.page import duration, write_report
from ..toys.lab import DEMO, HOURS, QUICK, SCALES, Lab
from ..toys.results import Claim, Conclusion

# A claim comes after those whose models it uses.
CLAIMS = (
    "memory_update",
    "needle_grid",
    "learnability",
    "condition_number",
    "hit_rate",
    "language_model",
    "variants",
    "learned_beta",
    "finetuning_length",
    "length_extrapolation",
    "hybrid",
    "compute_matched",
    "needle_lm",
    "babilong",
    "operator_cost",
    "training_overhead",
    "decode_latency",
    "forgetting_mqar",
    "flip_flop",
    "word_problems",
    "centring",
    "larger_lm",
    "recipe",
    "both_directions",
)
# The claims that have runs of their own at `--scale hours`.
HAVE_HOURS = (
    *("needle_lm", "babilong", "variants", "learned_beta", "forgetting_mqar", "flip_flop", "word_problems", "centring"),
)
# The claims of `lucid demo`.
DEMONSTRATED = ("memory_update", "needle_grid", "condition_number", "operator_cost")
RESULT = "result.json"
NOT_JUDGED = "A run of this size shows that the parts fit together; its numbers say nothing about the claim."


class Experiment(Protocol):
    """A module of this package, named for its claim. It may have `lacks(lab)`: why it cannot run, or None."""

    CLAIM: Claim

    def judge(self, *numbers: Any) -> Any:
        """The verdict from the numbers. Its docstring is the rule that reports show."""

    def run(self, lab: Lab) -> Conclusion:
        """Train, measure and conclude."""


def load(name: str) -> Experiment:
    """A claim by its name."""
    if name not in CLAIMS:
        hint = did_you_mean(name, CLAIMS)
        raise ValueError(f"there is no experiment {name!r}{hint}: expected one of {', '.join(CLAIMS)}, all or list")
    return cast("Experiment", import_module(f"{__name__}.{name}"))


def run_claim(name: str, lab: Lab, command: str = "") -> dict[str, Any]:
    """Run a claim and write OUT/NAME-SCALE/result.json. Returns its content. A tiny scale has no verdict.

    command: for the report. finished: the day of the newest number. seconds: of processor time. The caller holds the
    lock of the lab's folder.
    """
    claim = load(name)
    conclusion = claim.run(lab)
    if lab.tiny:
        conclusion = replace(conclusion, verdict="too small to judge", because=NOT_JUDGED)
    about, scale = machine(), lab.scale.name
    parts = [about.get("GPU"), about["CPU"], about["cores"], f"torch {about['torch']}", f"Python {about['Python']}"]
    result = {
        "format": 1,
        "name": name,
        "scale": scale,
        "title": claim.CLAIM.title,
        "section": claim.CLAIM.section,
        "claim": claim.CLAIM.says,
        "paper": claim.CLAIM.paper,
        **vars(conclusion),
        "rule": inspect.getdoc(claim.judge) or "",
        "command": command or f"lucid experiment {name} --scale {scale}",
        "machine": ", ".join(filter(None, parts)),
        "finished": lab.finished,
        "seconds": round(lab.seconds, 1),
    }
    write_record(lab.out / f"{name}-{scale}" / RESULT, result, allow_nan=False)
    return result


def run_experiments(
    names: Sequence[str],
    *,
    scale: str,
    out: Path,
    processes: int | None = None,
    restart: bool = False,
    model: str = "",
    texts: str = "",
) -> None:
    """Run claims one after another and print their tables and verdicts. names: of CLAIMS, or "all", or "list".

    What a claim lacks, such as a checkpoint, is an error; "all" skips such a claim.
    """
    if list(names) == ["list"]:
        list_claims()
        return
    if scale not in SCALES:
        raise ValueError(f"--scale must be one of {', '.join(SCALES)}, got {scale!r}")
    every = list(names) == ["all"]
    if every:
        names = HAVE_HOURS if scale == HOURS.name else CLAIMS
    claims = {name: load(name) for name in names}
    if scale == HOURS.name and (without := [name for name in names if name not in HAVE_HOURS]):
        raise ValueError(f"--scale hours is for {', '.join(HAVE_HOURS)}, got {', '.join(without)}: use --scale small")
    with locked(out):
        for name, claim in claims.items():
            lab = Lab(SCALES[scale], out, processes=processes, restart=restart, model=model, texts=texts)
            print(f"{name} ({scale}): {claim.CLAIM.title}", flush=True)
            if (reason := getattr(claim, "lacks", lambda lab: None)(lab)) is not None:
                if not every:
                    raise ValueError(f"{name} cannot run: {reason}")
                print(f"  skipped: {reason}")
                continue
            options = f" --model {Path(model).name} --texts {Path(texts).name}" if model and texts else ""
            show(run_claim(name, lab, f"lucid experiment {name} --scale {scale}{options}"))
            print(f"  {out / f'{name}-{scale}' / RESULT}; `lucid report {out}` draws it")


def run_demo(full: bool, out: Path) -> None:
    """Run the claims of the demonstration, print the verdicts and write a report."""
    scale, start, command = DEMO if full else QUICK, time.monotonic(), "lucid demo --full" if full else "lucid demo"
    print(f"About {scale.about}. Ctrl-C stops, the same command resumes.", flush=True)
    report = out / "report.html"
    with locked(out):
        results = [run_claim(name, Lab(scale, out), command) for name in DEMONSTRATED]
        write_report(results, report, "LUCID attention: the demonstration")
    for result in results[:2]:
        for table in result["tables"][:2]:
            print(f"\n{result['title']}: {table['title'][0].lower()}{table['title'][1:]}\n{_table_text(table)}")
    print()
    for result in results:
        print(f"{result['verdict'].upper():<14} {result['title']} (§{result['section']})")
        print(f"{'':<14} {result['ours']}")
    print(f"\n{duration(time.monotonic() - start)} in all. Report: {report}")
    if not full:
        print(f"Every attention, with several seeds: lucid demo --full, or make demo ARGS=--full ({DEMO.about})")


def list_claims() -> None:
    """Print every claim with its section and its numbers in the paper."""
    for name in CLAIMS:
        claim = load(name).CLAIM
        # Some claims are not in the paper.
        section = f"§{claim.section}" if claim.section[0] in "A1234" else "new"
        print(f"{name:<20} {section:<5} {claim.title}")
        print(f"{'':<20} {'':<5} paper: {claim.paper}")


def show(result: dict[str, Any]) -> None:
    """Print the tables and the verdict of a result."""
    for table in result["tables"]:
        print(f"\n  {table['title']}\n{_table_text(table)}")
        if table["note"]:
            print(f"    {table['note']}")
    print(f"\n  paper: {result['paper']}\n  here:  {result['ours']}")
    print(f"  {result['verdict'].upper()}: {result['because']}")
    print(f"  {result['seeds']} seeds, {duration(result['seconds'])} of one core")


def _table_text(table: dict[str, Any]) -> str:
    def text(cell: Any) -> str:
        return "" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell)

    lines = text_table([[text(cell) for cell in row] for row in (table["columns"], *table["rows"])], rule=True)
    return "\n".join(f"    {line}" for line in lines.split("\n"))
