"""The hours in the last column of the table of docs/guides/reproduce.md, written from the estimates of the dry runs.

Run without arguments to write them. A test compares them with the dry runs.
"""

import re
import sys
from pathlib import Path

from lucid_lab.claims.engine.full_recipe import gpu_hours
from lucid_lab.claims.engine.steps import unique
from lucid_lab.claims.engine.study import EXPERIMENTS, load

GUIDE = Path(__file__).resolve().parents[1] / "docs" / "guides" / "reproduce.md"
COMMAND = re.compile(r"`lucid experiment (\w+)`")
NONE = "none"
TOTAL = re.compile(r"<!-- total: written by tools/costs.py -->.*?<!-- end of total -->", re.DOTALL)


def hours() -> dict[str, float]:
    """The GPU hours of every experiment."""
    return {name: gpu_hours(step.estimate() for step in load(name).paper()) for name in EXPERIMENTS}


def total() -> float:
    """The GPU hours of all experiments, each command once."""
    return gpu_hours(step.estimate() for step in unique(step for name in EXPERIMENTS for step in load(name).paper()))


def written(text: str, costs: dict[str, float], together: float) -> str:
    """The guide with these hours. An experiment that has several rows has its hours in the first."""
    lines, seen = [], set()
    for line in text.splitlines():
        cells = line.split("|")
        match = COMMAND.search(cells[3]) if line.startswith("|") and len(cells) == 7 else None
        if match:
            name = match[1]
            cost = f"{costs[name]:,.0f}" if costs[name] else NONE
            cells[5] = " above " if name in seen else f" {cost} "
            seen.add(name)
        lines.append("|".join(cells))
    sentence = (
        f"All experiments together take about {together:,.0f} hours, of which `language_model` takes "
        f"{costs['language_model']:,.0f}: those that share models train them once."
    )
    marked = f"<!-- total: written by tools/costs.py -->\n{sentence}\n<!-- end of total -->"
    return TOTAL.sub(marked, "\n".join(lines) + "\n")


def main() -> int:
    """Write the guide."""
    GUIDE.write_text(written(GUIDE.read_text(encoding="utf-8"), hours(), total()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
