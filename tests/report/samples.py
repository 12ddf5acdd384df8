"""Results like those of experiments, with made-up numbers, and files like those of other commands."""

import json
import math
from pathlib import Path
from typing import Any

NASTY = "</title><script>alert('x')</script> & \"quotes\" <img src=http://example.invalid/x.png onerror=alert(1)>"


def result(name: str, **changes: Any) -> dict[str, Any]:
    made = {"format": 1, "name": name, "scale": "small", "title": name.replace("_", " ").capitalize()}
    made |= {"section": "2.1", "claim": "What the paper claims.", "paper": "1.0", "ours": "1.0 ± 0.1"}
    made |= {"verdict": "holds", "because": "It was so in all seeds.", "command": f"lucid experiment {name}"}
    made |= {"machine": "2 cores", "finished": "2026-11-16", "seconds": 312.4, "seeds": 3, "figures": [], "tables": []}
    return made | changes


def bar(name: str, role: str, value: float | None, spread: float | None = None) -> dict[str, Any]:
    return {"name": name, "role": role, "value": value, "spread": spread}


def memory_update() -> dict[str, Any]:
    """Two figures with bars and one with lines."""

    def bars(title: str, groups: dict[str, float]) -> dict[str, Any]:
        listed = [
            {"name": name, "bars": [bar("LUCID", "lucid", 100.0, 0.0), bar("softmax", "softmax", value, 2.6)]}
            for name, value in groups.items()
        ]
        made = {"kind": "bars", "title": title, "value": {"label": "accuracy, %", "range": [0, 100]}, "groups": listed}
        return made | {"references": [{"name": "chance", "value": 1.6}], "note": "One layer."}

    lines = {
        "kind": "lines",
        "title": "Accuracy beyond the length of training",
        "x": {"label": "length", "log": True},
        "y": {"label": "accuracy, %", "range": [0, 103]},
        "series": [
            {"name": "LUCID", "role": "lucid", "x": [64, 128, 256], "y": [100, 98.1, 91.2], "spread": [0, 0.4, 1.8]},
            {"name": "softmax", "role": "softmax", "x": [64, 128, 256], "y": [93.6, 69, None], "spread": [1, 2, None]},
            {"name": "softmax again", "role": "softmax", "x": [64, 256], "y": [93, 38], "dashed": True},
        ],
        "marks": [{"x": 64, "name": "trained here"}],
    }
    figures = [bars("By number of keys", {"n = 2": 83.1, "n = 16": 16.3}), bars("At 256 tokens", {"": 38.4}), lines]
    return result("memory_update", figures=figures)


def needle_grid() -> dict[str, Any]:
    """Heat maps with numbers, a large signed one without, and a table."""
    panels = [
        {"name": name, "rows": [2, 4], "columns": [64, 2048], "values": [[100.0, 99.5], [50.0, None]]}
        for name in ("LUCID", "softmax")
    ]
    grid = {"kind": "heatmaps", "title": "Needles recalled", "rows": {"label": "needles"}, "unit": "%"}
    grid |= {"columns": {"label": "length"}, "range": [0, 100], "panels": panels}
    values = [[math.sin(i * j) for j in range(32)] for i in range(32)]
    pixels = grid | {"title": "Map", "range": [-1, 1], "signed": True, "numbers": False}
    pixels["panels"] = [{"name": "W", "rows": [*range(32)], "columns": [*range(32)], "values": values}]
    table = {"title": "Controls", "note": "At n = 16.", "columns": ["model", "%"]}
    rows = [["softmax", "11.2 ± 2.0"], ["none", float("nan")]]
    return result("needle_grid", verdict="partly", figures=[grid, pixels], tables=[table | {"rows": rows}])


def nasty() -> dict[str, Any]:
    """Markup in every text, numbers that overflow, empty and broken figures."""
    lines = {
        "kind": "lines",
        "title": NASTY,
        "note": NASTY,
        "x": {"label": "$x_1$ " + NASTY, "log": True},
        "y": {"label": "y", "log": True},
        "series": [{"name": NASTY, "role": "gsa", "x": [1, 2, 3], "y": [None, 0.0, 1e308], "spread": [1e308, 1, 1]}],
        "marks": [{"x": 1.5, "name": NASTY}],
    }
    huge = [bar(NASTY, "lucid", 1e308, 1e308), bar("a", "b", -1e308), bar("c", "d", None), bar("e", "f", 10**400)]
    bars = {"kind": "bars", "title": "Huge", "value": {"label": "ΔL"}, "groups": [{"name": NASTY, "bars": huge}]}
    panel = {"name": NASTY, "rows": ["a"], "columns": [1, 2], "values": [[1e308, float("inf")]]}
    map_ = {"kind": "heatmaps", "title": "Map", "rows": {"label": ""}, "columns": {"label": ""}, "range": [0, 1]}
    empty = {"kind": "bars", "title": "Empty", "value": {"label": ""}, "groups": [{"name": "", "bars": []}]}
    figures = [lines, bars, empty, map_ | {"panels": [panel]}, {"kind": "pie", "title": "Broken"}]
    table = {"title": NASTY, "note": NASTY, "columns": [NASTY, "b"], "rows": [[None, 65536], [1e-9, -2.5]]}
    texts = {
        "title": NASTY,
        "claim": NASTY + "\x00 \ud800 日本語 " + "unbroken" * 30,
        "because": NASTY,
        "command": NASTY,
    }
    rest = {"verdict": "too small to judge", "machine": NASTY, "seconds": None, "seeds": None}
    return result("no<t> & a/name", figures=figures, tables=[table], **texts, **rest)


def write_json(file: Path, content: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))
    return file


def write_training(folder: Path, attention: str) -> None:
    """A run with a loss of NaN, one of 1e308, and a last line that was cut off."""
    write_json(folder / "recipe.json", {"about": "a small model", "attention": attention, "steps": 300, "data": "x"})
    losses = [5.0, math.nan, 1e308, 4.0]
    lines = [{"step": 100 * i, "loss": loss} for i, loss in enumerate(losses)] + [{"step": 300, "eval_loss": 4.25}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4')


def write_state(file: Path, step: int, loss: float) -> None:
    history = [{"step": step // 2, "loss": 2 * loss}, {"step": step, "eval_loss": loss}, {"step": step, "loss": loss}]
    write_json(file, {"max_steps": 40, "global_step": step, "log_history": history})


def write_evaluation(file: Path, model: str, accuracy: float) -> None:
    arc = {"alias": "arc_easy", "acc,none": accuracy, "acc_stderr,none": 0.01, "exact_match,strict": "N/A"}
    niah = {"alias": "niah_single_1", "4096,none": 0.5, "4096_stderr,none": "N/A", "8192,none": -1}
    needles = {"exact_match,none": 0.25, "exact_match_stderr,none": 0.1}
    ours = {f"mniah-needles_4-{length}": needles for length in (64, 128)}
    results = {"arc_easy": arc, "niah_single_1": niah, **ours}
    content = {"results": results, "configs": {task: {} for task in results}, "checkpoint": {"attention": "lucid"}}
    write_json(file, content | {"model_name": model, "n-samples": {"arc_easy": {"original": 9, "effective": 8}}})


def write_analysis(file: Path) -> None:
    figure = memory_update()["figures"][2]
    content = {"checkpoint": {"name": "model"}, "input": {"about": "a text"}}
    write_json(file, content | {"figures": [figure], "results": {}})
