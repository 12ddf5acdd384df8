"""PNG files of `lucid train`, `lucid eval` and `lucid analyze`, drawn like the figures of the page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .drawing import Colours, write_png
from .lines import plot_lines
from .palette import Look
from .panels import plot_panel
from .runs import grid_figure, loss_figure

Record = dict[str, Any]
# The largest 0.5 % of the weights do not set the scale of a map: the first rows of every map are full.
QUANTILE = 0.995
# With more layers the legend would cover the curves.
MOST_LAYERS = 12


def draw_loss(entries: Sequence[Record], path: Path, title: str, attention: str | Sequence[str] = "lucid") -> None:
    """Training and validation loss against steps. entries: of a metrics file. attention: of the run, for its colour."""
    figure = loss_figure(entries, attention)
    write_png(path, 7, 4, lambda canvas, colours: _lines(canvas, colours, figure, title, bool(figure["series"])))


def draw_heatmap(values: Mapping[tuple[Any, ...], float], axes: Sequence[str], path: Path, title: str) -> None:
    """Scores from 0 to 100. values: by (row, column). axes: the names of rows and columns. Cells may be missing."""
    figure = grid_figure({"": values}, axes, "", (0, 100))
    (panel,) = figure["panels"]

    def plot(canvas: Any, colours: Colours) -> None:
        drawn = canvas.subplots()
        image = plot_panel(drawn, figure, panel, colours)
        drawn.set_title(title)
        canvas.colorbar(image, ax=drawn)

    write_png(path, 2.4 + 0.95 * len(panel["columns"]), 1.8 + 0.55 * len(panel["rows"]), plot, 150)


def draw_maps(records: Sequence[Record], path: Path, title: str) -> None:
    """Two maps for every head, on one scale: the weights A of the softmax and the effective weights W.

    records: {"head", "borders": [bins + 1], "softmax", "effective": rows of numbers}.
    """

    def plot(canvas: Any, colours: Colours) -> None:
        grid = canvas.subplots(len(records), 2, squeeze=False)
        for axes, record in zip(grid, records, strict=True):
            limit = _limit(record)
            shape = {"rows": {"label": "query of token"}, "columns": {"label": "value of token"}}
            figure = shape | {"range": [-limit, limit], "signed": True, "numbers": False, "panels": []}
            tokens = record["borders"][:-1]
            for drawn, name, label in zip(
                axes, ("softmax", "effective"), ("softmax  A", "effective  W = A P⁻¹"), strict=True
            ):
                panel = {"rows": tokens, "columns": tokens, "values": record[name]}
                image = plot_panel(drawn, figure, panel, colours)
                drawn.set_title(f"head {record['head']}: {label}")
                drawn.set_box_aspect(1)
            canvas.colorbar(image, ax=list(axes), shrink=0.8, extend="both")
        canvas.suptitle(title, fontsize=11)

    write_png(path, 7.2, 0.5 + 3.2 * len(records), plot)


def _limit(record: Record) -> float:
    """The weight at the end of the colour scale."""
    import numpy as np

    sizes = np.abs(np.asarray([record["softmax"], record["effective"]], dtype=float))
    return float(np.quantile(sizes[sizes > 0], QUANTILE)) or 1.0


def draw_condition_numbers(records: Sequence[Record], path: Path, title: str) -> None:
    """κ(P) against the length: a line for every head, coloured by layer.

    records: {"layer", "row", "head", "length", "kappa"}.
    """
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    heads = dict.fromkeys((record["layer"], record["row"], record["head"]) for record in records)
    layers = list(dict.fromkeys(layer for layer, _, _ in heads))
    series, styles, named = [], [], set()
    for place in heads:
        line = [record for record in records if (record["layer"], record["row"], record["head"]) == place]
        line.sort(key=lambda record: record["length"])
        # A name that begins with "_" is not in matplotlib's legend: one entry for each layer.
        name = f"{'_' if place[0] in named else ''}layer {place[0]}"
        named.add(place[0])
        x, y = [record["length"] for record in line], [record["kappa"] for record in line]
        series.append({"name": name, "role": "lucid", "x": x, "y": y})
        shade = layers.index(place[0]) / max(1, len(layers) - 1) * 0.9
        styles.append(Look(to_hex(colormaps["cividis"](shade)), "o", 1.2, ()))
    axes = {"x": {"label": "tokens", "log": True}, "y": {"label": "κ₂(P)", "log": True}}
    figure = {"series": series} | axes
    legend = len(layers) <= MOST_LAYERS
    write_png(path, 7, 4, lambda canvas, colours: _lines(canvas, colours, figure, title, legend, styles))


def _lines(
    canvas: Any, colours: Colours, figure: Record, title: str, legend: bool, styles: list[Look] | None = None
) -> None:
    axes = canvas.subplots()
    plot_lines(axes, figure, colours, styles)
    axes.set_title(title)
    if legend:
        axes.legend(frameon=False, fontsize=9)
