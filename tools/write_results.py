"""Write docs/results.md, and the picture of the README, from the results in records/claims.

    python tools/write_results.py

To publish a run, copy its result.json to records/claims/NAME-SCALE/, name the commit of the code that made it in
records/claims/commits.toml, and run this.
"""

import tomllib
from pathlib import Path
from typing import Any

from lucid_attention.files import read_json, write_whole
from lucid_lab.claims import CLAIMS
from lucid_lab.report.figures import write_png

# The picture: accuracy against length, of these arms.
PICTURE, PICTURED = Path("docs", "images", "forgetting_mqar.png"), "forgetting_mqar-hours"
ARMS = ("softmax, equal time", "FoX", "PaTH", "DeltaFormer", "LUCID", "LUCID-PaTH")
ROOT = Path(__file__).parents[1]
RECORDS, PAGE = Path("records", "claims"), Path("docs", "results.md")
INTRODUCTION = """\
# Results

Every claim of the paper with its verdict, from toys that learn in minutes (*small*) and from longer runs (*hours*). ±
is the standard deviation over seeds. [rules.md](rules.md) names every change of a rule that was made after a result was
seen; † marks verdicts by such a later rule on older numbers (`records/claims/rejudged.toml` has the reasons).

Written by `python tools/write_results.py` from `records/claims`, which has the tables and figures of each run (`lucid
report records/claims` draws them); `lucid experiment NAME --scale SCALE` makes them again. Of the runs of 2026-11-16
only the published page was kept. Three records need the commit 87cf805: `needle_lm-small`, `babilong-small` (both
claims have had the task in words of *hours* since) and `longqa-small`, whose claim is gone, because its stand-in for
LongBench and SCROLLS taught no attention anything. `recipe` has replaced two claims, whose records need d07a032
(`pretrained-small`) and 2830945 (`warm_start-small`)."""


def page(root: Path = ROOT) -> str:
    """The page: a table of verdicts, then the numbers behind each."""
    commits, rejudged = (
        tomllib.loads((root / RECORDS / f"{name}.toml").read_text()) for name in ("commits", "rejudged")
    )
    results = [read_json(file) for file in sorted((root / RECORDS).glob("*/result.json"))]
    scales = {(result["name"], result["scale"]) for result in results}
    rows = ["| claim | scale | verdict | made | record |", "| --- | --- | --- | --- | --- |"]
    sections = []
    for result in results:
        key = f"{result['name']}-{result['scale']}"
        made = f"{result['finished']}, {commits[key]}, {_minutes(result['seconds'])}"
        later = rejudged.get(key, {})
        verdict = later.get("verdict", result["verdict"])
        marked = f"{verdict} †" if later else verdict
        record = f"[{key}](../{(RECORDS / key / 'result.json').as_posix()})"
        rows.append(f"| {result['title']} ({_place(result)}) | {result['scale']} | {marked} | {made} | {record} |")
        larger = result["scale"] == "small" and (result["name"], "hours") in scales
        if larger or result["name"] not in CLAIMS or verdict == "too small to judge":
            continue
        paper = "" if result["paper"] in ("none", "no number given") else f" *Paper:* {result['paper']}."
        because = f"{result['because']} *By the later rule:* {later['because']}" if later else result["because"]
        if verdict.startswith("not run yet"):
            because = later["because"]
        sections.append(f"**{key}: {marked}.**{paper} *Here:* {because}")
    made = (
        "Made: the day, the commit of the code, the time of one core. Runs that a larger one or another claim "
        "replaced, or that were too small to judge, have their numbers in the record alone."
    )
    return "\n\n".join([INTRODUCTION, "\n".join(rows), made, "## Numbers", *sections]).replace("~", "\\~") + "\n"


def _place(result: dict[str, Any]) -> str:
    section = str(result["section"])
    return f"§{section}" if section[0].isdigit() else section


def _minutes(seconds: float) -> str:
    return f"{max(1, round(seconds / 60))} min"


def picture(root: Path = ROOT) -> dict[str, Any]:
    """The figure of forgetting MQAR with the arms of ARMS alone: a line each."""
    figure: dict[str, Any] = read_json(root / RECORDS / PICTURED / "result.json")["figures"][0]
    return figure | {"series": [line for line in figure["series"] if line["name"] in ARMS]}


if __name__ == "__main__":
    print(write_whole(ROOT / PAGE, page()))
    print(write_png(picture(), ROOT / PICTURE))
