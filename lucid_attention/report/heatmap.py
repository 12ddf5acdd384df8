"""Heat maps of scores: a number in every cell, colours that the colour-blind can tell apart."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw_heatmap(values: Mapping[tuple[Any, ...], float], axes: Sequence[str], path: Path, title: str) -> None:
    """Scores from 0 to 100 as a PNG.

    values: by (row, column). axes: what rows and columns are called. A cell without a value stays empty.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    rows, columns = (list(dict.fromkeys(key[axis] for key in values)) for axis in (0, 1))
    grid = [[values.get((row, column), float("nan")) for column in columns] for row in rows]
    size = 2.4 + 0.95 * len(columns), 1.8 + 0.55 * len(rows)
    figure, drawn = plt.subplots(figsize=size, layout="constrained")
    # Cividis rises evenly in brightness, and looks the same with and without red-green blindness.
    image = drawn.imshow(grid, cmap="cividis", vmin=0, vmax=100, aspect="auto")
    for y, line in enumerate(grid):
        for x, value in enumerate(line):
            if value == value:
                colour = "white" if value < 55 else "black"
                drawn.text(x, y, f"{value:.1f}", ha="center", va="center", color=colour, fontsize=9)
    drawn.set_xticks(range(len(columns)), [str(each) for each in columns])
    drawn.set_yticks(range(len(rows)), [str(each) for each in rows])
    drawn.set(ylabel=axes[0], xlabel=axes[1])
    drawn.set_title(title, fontsize=10)
    figure.colorbar(image, ax=drawn)
    figure.savefig(path, dpi=150)
    plt.close(figure)
