"""`--scale paper`: the commands of the full recipe one after another, and what they left behind as a result."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .result import Conclusion, table
from .steps import Step, check_steps
from .study import load, save_result


def run_steps(name: str, out: Path) -> int:
    """Run them. Each goes on where it was stopped, and does nothing if it is finished. Gives an exit code."""
    steps, began = load(name).paper(), time.monotonic()
    check_steps(steps)
    for number, step in enumerate(steps, 1):
        print(f"{number}/{len(steps)}: {step.line}", flush=True)
        code = step.run()
        if code:
            print(f"lucid experiment: step {number} of {len(steps)} ended with {code}: {step.line}", file=sys.stderr)
            return code
    command = f"lucid experiment {name} --scale paper"
    save_result(load(name).CLAIM, gathered(steps), name, "paper", out, command, time.monotonic() - began)
    return 0


def gathered(steps: Sequence[Step]) -> Conclusion:
    """Losses of training and scores of evaluations, side by side. What they mean is for the reader to say."""
    losses, scores = [], []
    for step in steps:
        if "--out" not in step.words:
            continue
        folder = Path(step.words[step.words.index("--out") + 1])
        if step.words[0] == "train":
            summary = _read(folder / "summary.json")
            speed = summary["median_tokens_per_second"]
            losses.append([folder.name, summary["steps"], round(summary["validation_loss"], 4), speed and round(speed)])
        elif step.words[0] == "eval":
            for cell in _read(folder / "results.json")["cells"]:
                labels = ", ".join(f"{key} {value}" for key, value in cell["labels"].items())
                around = None if cell["standard_error"] is None else round(cell["standard_error"], 4)
                scores.append([folder.name, cell["family"], labels, round(cell["mean"], 4), around])
    tables = []
    if losses:
        tables.append(table("Training", ["run", "steps", "validation loss", "tokens/s"], losses))
    if scores:
        tables.append(table("Scores", ["model", "task", "cell", "score", "standard error"], scores))
    return Conclusion(
        ours="see the tables",
        verdict="measured",
        because="The full recipe: its numbers stand beside the paper's for the reader to compare.",
        seeds=1,
        tables=tables,
    )


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found
