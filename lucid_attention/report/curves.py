"""Curves of training runs."""

from pathlib import Path
from typing import Any

# Colours that stay apart for the colour-blind (Okabe and Ito).
BLUE, ORANGE = "#0072B2", "#D55E00"


def draw_loss(entries: list[dict[str, Any]], path: Path, title: str) -> None:
    """Training and validation loss against steps, from the entries of a metrics file, as a PNG."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for key, label, colour, marker in (("loss", "training", BLUE, ""), ("eval_loss", "validation", ORANGE, "o")):
        points = [(entry["step"], entry[key]) for entry in entries if isinstance(entry.get(key), (int, float))]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, color=colour, marker=marker, markersize=4, linewidth=1.5)
    axes.set(xlabel="step", ylabel="loss, nats per token", title=title)
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
