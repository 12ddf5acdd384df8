"""Pictures of attention maps, before and after P⁻¹, and of condition numbers against the length."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]
# Weights above this share of all others do not set the scale: the first rows of every map are full.
QUANTILE = 0.995


def draw_maps(records: Sequence[Record], path: Path, title: str) -> None:
    """Two maps for every head, on one scale: the softmax's weights and the effective ones, as a PNG.

    records: {"head", "borders": [bins + 1], "softmax", "effective": rows of numbers}.
    """
    import matplotlib

    matplotlib.use("agg")
    import numpy as np
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(
        len(records), 2, figsize=(7.2, 0.5 + 3.2 * len(records)), layout="constrained", squeeze=False
    )
    for axes, record in zip(grid, records, strict=True):
        maps = [np.asarray(record[name], dtype=float) for name in ("softmax", "effective")]
        sizes = np.abs(np.concatenate([each.ravel() for each in maps]))
        limit = float(np.quantile(sizes[sizes > 0], QUANTILE)) or 1.0
        tokens = record["borders"][-1]
        for drawn, values, name in zip(axes, maps, ("softmax  A", "effective  W = A P⁻¹"), strict=True):
            # Around white, apart for the colour-blind: orange adds, purple takes away.
            image = drawn.imshow(
                values, cmap="PuOr_r", vmin=-limit, vmax=limit, extent=(0, tokens, tokens, 0), interpolation="nearest"
            )
            drawn.set_title(f"head {record['head']}: {name}", fontsize=9)
            drawn.set(xlabel="value of token", ylabel="query of token")
        figure.colorbar(image, ax=list(axes), shrink=0.8, extend="both")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_condition_numbers(records: Sequence[Record], path: Path, title: str) -> None:
    """κ(P) against the length, a line for every head, coloured by layer, as a PNG.

    records: {"layer", "row", "head", "length", "kappa"}.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import colormaps
    from matplotlib import pyplot as plt

    layers = list(dict.fromkeys(each["layer"] for each in records))
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for place, layer in enumerate(layers):
        colour = colormaps["cividis"](place / max(1, len(layers) - 1) * 0.9)
        heads = dict.fromkeys((each["row"], each["head"]) for each in records if each["layer"] == layer)
        for first, (row, head) in enumerate(heads):
            line = [each for each in records if (each["layer"], each["row"], each["head"]) == (layer, row, head)]
            line.sort(key=lambda each: each["length"])
            label = f"layer {layer}" if first == 0 else None
            points = [each["length"] for each in line], [each["kappa"] for each in line]
            axes.plot(*points, color=colour, linewidth=1.2, marker="o", markersize=2.5, alpha=0.8, label=label)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="κ₂(P)", title=title)
    lengths = sorted({each["length"] for each in records})
    axes.set_xticks(lengths, [str(each) for each in lengths])
    axes.set_xticks([], minor=True)
    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which(lambda value, place: f"{value:.3g}")
    axes.grid(alpha=0.3)
    if len(layers) <= 12:
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
