"""Write docs/results.md from the results in records/claims.

    python tools/write_results.py

To publish a run, copy its result.json to records/claims/NAME-SCALE/, name the commit of the code that made it in
records/claims/commits.toml, and run this.
"""

import tomllib
from pathlib import Path
from typing import Any

from lucid_attention.files import read_json, write_whole

ROOT = Path(__file__).parents[1]
RECORDS, PAGE = Path("records", "claims"), Path("docs", "results.md")
INTRODUCTION = """\
# Results

Every claim of the paper with its verdict, from toys that learn in minutes (*small*), from tasks in words and toys that
are trained for longer (*hours*), and from a real pretrained model (`pretrained`). ± is the standard deviation over
seeds. [rules.md](rules.md) names every change of a rule that was made after a result was seen.

Written by `python tools/write_results.py` from `records/claims`; each record has the tables and, from 2026-11-18 on,
the figures of its run (`lucid report records/claims` draws them). The records were made by the code of the commits
named below, before the laboratory had its own package; the claims, arms and rules are the same since, and
`lucid experiment NAME --scale SCALE` runs them again. Of the runs of 2026-11-16 only the published page was kept: their
records were copied from it.

Three records can only be made again with the commit 87cf805, which trained on prompts with `lucid train` and scored
with `lucid eval`: `needle_lm-small` and `babilong-small`, whose claims have the task in words of *hours* at every scale
since, and `longqa-small`, whose claim is gone: its stand-in for LongBench and SCROLLS taught no attention anything.
These tasks themselves are in `lucid eval`."""


def page(root: Path = ROOT) -> str:
    """The page: a table of verdicts, then the numbers behind each."""
    commits = tomllib.loads((root / RECORDS / "commits.toml").read_text())
    results = [read_json(file) for file in sorted((root / RECORDS).glob("*/result.json"))]
    rows = ["| claim | scale | verdict | made | record |", "| --- | --- | --- | --- | --- |"]
    sections = []
    for result in results:
        key = f"{result['name']}-{result['scale']}"
        made = f"{result['finished']}, {commits[key]}, {_minutes(result['seconds'])}"
        record = f"[{key}](../{(RECORDS / key / 'result.json').as_posix()})"
        rows.append(
            f"| {result['title']} ({_place(result)}) | {result['scale']} | {result['verdict']} | {made} | {record} |"
        )
        paper = "" if result["paper"] in ("none", "no number given") else f" *Paper:* {result['paper']}."
        reason = result["because"]
        sections.append(f"**{key}: {result['verdict']}.**{paper} *Here:* {reason}")
    made = "Made: the day, the commit of the code, the time of one core."
    return "\n\n".join([INTRODUCTION, "\n".join(rows), made, "## Numbers", *sections]).replace("~", "\\~") + "\n"


def _place(result: dict[str, Any]) -> str:
    section = str(result["section"])
    return f"§{section}" if section[0].isdigit() else section


def _minutes(seconds: float) -> str:
    return f"{max(1, round(seconds / 60))} min"


if __name__ == "__main__":
    print(write_whole(ROOT / PAGE, page()))
