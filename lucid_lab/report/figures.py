"""A figure of a result, a dictionary of the kind "lines", "bars" or "heatmaps", as pictures and as tables.

`records.checked` describes the kinds. One look for each attention, the same on every figure: a colour and a marker. The
colours are those of Okabe and Ito, darkened where they would fade on white; the page inverts the pictures in dark mode.
"""

import base64
import io
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

from lucid_attention.files import write_whole

Figure = Mapping[str, Any]
# By role, which is the name of an attention or "control": colour and marker.
ROLES = {
    "lucid": ("#0067b1", "o"),
    "softmax": ("#d55e00", "s"),
    "lucid_path": ("#2f93c9", "D"),
    "path": ("#00805d", "^"),
    "diff": ("#b1508a", "v"),
    "delta": ("#8a6d00", "P"),
    "gated_delta": ("#b88000", "X"),
    "gla": ("#6b4fa0", "<"),
    "gsa": ("#7a4a2b", ">"),
    "sliding": ("#8b2635", "h"),
    "forgetting": ("#00747f", "d"),
    "deltaformer": ("#a3238e", "p"),
    "gated": ("#4d7a12", "8"),
    "exclusive": ("#c2185b", "H"),
    "control": ("#5b6470", "*"),
}
# Colours of roles that are not in ROLES, such as a new attention.
RESERVE = ("#00747f", "#a3238e", "#4d7a12", "#4a4fd0", "#c2185b", "#8c5a3c", "#2f6f4f", "#6a737c")
MARKERS, DASHES = ("s", "^", "D", "v", "P", "X"), ("-", (0, (5, 2.2)), (0, (1.2, 1.8)), (0, (7, 2, 1.5, 2)))
INK, MUTED, GRID = "#1b232c", "#5a6673", "#dfe4ea"
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "font.family": ["DejaVu Sans"],
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "grid.color": GRID,
    "legend.frameon": False,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    # Text stays text, "$" is a dollar, and equal figures give equal bytes.
    "svg.fonttype": "none",
    "svg.hashsalt": "lucid",
    "text.parse_math": False,
}
# Both colour maps suit readers with red-green blindness, and stay readable when dark mode inverts them.
SEQUENTIAL, DIVERGING = "Blues", "RdBu"
# Inches of a picture: at the width of a phone its letters have ten pixels.
WIDTH = 4.2
# Longer names are cut in pictures.
MOST_LETTERS, BAR_NAME = 44, 28
# A map of more cells becomes plain text on the page: thousands of table cells make a page slow.
MOST_CELLS = 400
MISSING = "–"
SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


def colour_of(role: str) -> str:
    """The colour of a role. An unknown role gets one of RESERVE, always the same one."""
    return ROLES[role][0] if role in ROLES else RESERVE[crc32(role.encode()) % len(RESERVE)]


def draw(figure: Figure) -> list[dict[str, str]]:
    """The pictures of a figure: {"heading", "alt", "source": a data URI of an SVG}. Groups and panels have one each."""
    made = []
    with _style():
        for heading, size, plot in _parts(figure):
            canvas = _canvas(*size)
            plot(canvas.subplots())
            file = io.BytesIO()
            canvas.savefig(file, format="svg", transparent=True, dpi=200, metadata={"Date": None})
            source = f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"
            alt = ": ".join(filter(None, [str(figure["title"]), heading])) + _described(figure)
            made.append({"heading": heading, "alt": alt, "source": source})
    return made


def write_png(figure: Figure, path: Path, columns: int = 2) -> Path:
    """Write a figure as a PNG, its pictures in rows of at most `columns`."""
    with _style():
        parts = list(_parts(figure))
        columns = min(columns, len(parts))
        rows = math.ceil(len(parts) / columns)
        width, height = (max(size[axis] for _, size, _ in parts) for axis in (0, 1))
        canvas = _canvas(columns * width, rows * height + 0.4)
        grid = canvas.subplots(rows, columns, squeeze=False).flatten()
        for axes, (heading, _, plot) in zip(grid, parts, strict=False):
            plot(axes)
            axes.set_title(_short(heading))
        for axes in grid[len(parts) :]:
            axes.set_axis_off()
        canvas.suptitle(str(figure["title"]), fontsize=11)
        file = io.BytesIO()
        canvas.savefig(file, format="png", dpi=140, facecolor="white")
    return write_whole(path, file.getvalue())


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib

    with warnings.catch_warnings(), matplotlib.rc_context(STYLE):
        # The browser has letters that matplotlib's own font lacks.
        warnings.filterwarnings("ignore", message="Glyph")
        warnings.filterwarnings("ignore", message="constrained_layout not applied")
        yield


def _canvas(width: float, height: float) -> Any:
    from matplotlib.figure import Figure as Canvas

    return Canvas(figsize=(width, height), layout="constrained")


Part = tuple[str, tuple[float, float], Callable[[Any], None]]


def _parts(figure: Figure) -> Iterator[Part]:
    """(heading, size in inches, function that draws into axes) of every picture."""
    if figure["kind"] == "lines":
        rows = math.ceil(len(figure["series"]) / 2)
        yield "", (WIDTH, 2.7 + 0.2 * rows), partial(_plot_lines, figure=figure)
    elif figure["kind"] == "bars":
        ends = _bar_limits(figure)
        for group in figure["groups"]:
            size = WIDTH, 0.75 + 0.27 * max(1, len(group["bars"]))
            yield group["name"], size, partial(_plot_bars, figure=figure, group=group, ends=ends)
    else:
        for panel in figure["panels"]:
            rows, columns = len(panel["rows"]), len(panel["columns"])
            pixels = figure.get("numbers") is False
            shape = (3.6, 3.2) if pixels else (1.5 + 0.62 * min(columns, 12), 0.8 + 0.36 * min(rows, 16))
            yield panel["name"], shape, partial(_plot_panel, figure=figure, panel=panel)


def _described(figure: Figure) -> str:
    """What the alternative text says after the title."""
    if figure["kind"] == "lines":
        names = ", ".join(_short(line["name"]) for line in figure["series"])
        return f". Lines of {names}; {figure['y'].get('label', '')} against {figure['x'].get('label', '')}."
    labels = [figure[key].get("label") or "" for key in ("value", "rows", "columns") if key in figure]
    return f". {'Bars' if figure['kind'] == 'bars' else 'Map'} of {' by '.join(labels)}."


def _plot_lines(axes: Any, figure: Figure) -> None:
    seen: dict[str, int] = {}
    for line in figure["series"]:
        colour, role = colour_of(line["role"]), line["role"]
        earlier = seen.setdefault(colour, 0)
        seen[colour] += 1
        first = ROLES.get(role, ("", "D"))[1]
        style = {
            "color": colour,
            "marker": first if not earlier else MARKERS[(earlier - 1) % len(MARKERS)],
            "linestyle": DASHES[1] if line.get("dashed") else DASHES[earlier % len(DASHES)],
            "linewidth": 2.2 if role == "lucid" and not earlier else 1.5,
            "markersize": 4.5 if len(line["x"]) <= 40 else 0,
        }
        x, y = (_values(line[name], bool(figure[name].get("log"))) for name in ("x", "y"))
        axes.plot(x, y, label=_short(line["name"]), **style)
        if line.get("spread"):
            around = _values(line["spread"])
            low = [value - by for value, by in zip(y, around, strict=True)]
            high = [value + by for value, by in zip(y, around, strict=True)]
            if figure["y"].get("log"):
                low = [value if value > 0 else part / 10 for value, part in zip(low, y, strict=True)]
            axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)
    for mark in figure.get("marks") or []:
        axes.axvline(mark["x"], color=MUTED, linewidth=1, linestyle=":")
        axes.annotate(_short(mark["name"]), (mark["x"], 1), xycoords=("data", "axes fraction"), color=MUTED)
    for name in ("x", "y"):
        _scale_axis(axes, figure, name)
    if figure["series"]:
        columns = 2 if max(len(line["name"]) for line in figure["series"]) <= 24 else 1
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=columns)


def _scale_axis(axes: Any, figure: Figure, name: str) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    description, axis = figure[name], getattr(axes, f"{name}axis")
    axis.set_label_text(_short(description.get("label") or "", 60))
    is_log = bool(description.get("log"))
    values = sorted({value for line in figure["series"] for value in _values(line[name], is_log) if value > 0})
    if is_log and values:
        getattr(axes, f"set_{name}scale")("log")
        apart = all(low * 1.6 <= high for low, high in pairwise(values))
        if name == "x" and len(values) <= 9 and apart:
            axis.set_ticks(values)
        elif values[-1] < 20 * values[0]:
            # Powers of ten would be too few.
            axis.set_major_locator(MaxNLocator(5))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
    elif name == "x":
        whole = all(isinstance(x, int) for line in figure["series"] for x in line["x"])
        axis.set_major_locator(MaxNLocator(6, integer=whole))
    low, high = description.get("range") or (0, 0)
    if low < high and not (is_log and low <= 0):
        margin = 0 if is_log else 0.02 * (high - low)
        getattr(axes, f"set_{name}lim")(low - margin, high + margin)


def _values(values: Sequence[float | None], log: bool = False) -> list[float]:
    """Values that can be drawn: NaN for a missing one, and on a log axis for zero."""
    return [math.nan if value is None or (log and value <= 0) else float(value) for value in values]


def _bar_limits(figure: Figure) -> tuple[float, float]:
    """One scale for all groups."""
    found = [bar.get("value") for group in figure["groups"] for bar in group["bars"]]
    found += [reference["value"] for reference in figure.get("references") or []]
    low, high = figure["value"].get("range") or (min([0.0, *filter(None, found)]), max([0.0, *filter(None, found)]))
    return (low, high) if low < high else (0.0, 1.0)


def _plot_bars(axes: Any, figure: Figure, group: Mapping[str, Any], ends: tuple[float, float]) -> None:
    bars, places = group["bars"], _places(figure)
    drawn, spreads = ([bar.get(key) or 0.0 for bar in bars] for key in ("value", "spread"))
    around = {"ecolor": INK, "elinewidth": 1, "capsize": 2}
    colours = [colour_of(bar["role"]) for bar in bars]
    container = axes.barh(range(len(bars)), drawn, xerr=spreads, error_kw=around, color=colours, height=0.68)
    axes.bar_label(container, [with_spread(bar.get("value"), bar.get("spread"), places) for bar in bars], padding=4)
    for reference in figure.get("references") or []:
        axes.axvline(reference["value"], color=MUTED, linewidth=1, linestyle="--")
    axes.set_yticks(range(len(bars)), [_short(bar["name"], BAR_NAME) for bar in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.locator_params(axis="x", nbins=5)
    axes.set_xlim(*ends)
    axes.set_xlabel(_short(figure["value"].get("label") or "", 60))


def _plot_panel(axes: Any, figure: Figure, panel: Mapping[str, Any]) -> None:
    low, high = figure["range"]
    if figure.get("signed"):
        low, high = -max(abs(low), abs(high)), max(abs(low), abs(high))
    high = high if high > low else low + 1.0
    colours = DIVERGING if figure.get("signed") else SEQUENTIAL
    numbers = figure.get("numbers", True)
    values = [_values(row) for row in panel["values"]]
    axes.set_facecolor(GRID)
    image = axes.imshow(values, cmap=colours, vmin=low, vmax=high, aspect="auto", interpolation="nearest")
    if numbers:
        places = _places(figure)
        for i, row in enumerate(panel["values"]):
            for j, value in enumerate(row):
                red, green, blue, _ = image.cmap(image.norm(values[i][j]))
                bright = value is None or 0.3 * red + 0.6 * green + 0.1 * blue > 0.5
                style = {"ha": "center", "va": "center", "color": "black" if bright else "white"}
                axes.text(j, i, with_spread(value, None, places), **style)
    else:
        axes.figure.colorbar(image, ax=axes, shrink=0.9, extend="both" if figure.get("signed") else "neither")
    for axis, names, key in ((axes.xaxis, panel["columns"], "columns"), (axes.yaxis, panel["rows"], "rows")):
        step = math.ceil(len(names) / (12 if numbers else 5))
        axis.set_ticks(range(0, len(names), step), [_short(name_of(name), 24) for name in names[::step]])
        axis.set_label_text(_short(figure[key].get("label") or "", 60))
    axes.grid(False)
    axes.spines[:].set_visible(False)


def _short(text: str, most: int = MOST_LETTERS) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def name_of(value: Any) -> str:
    """The name of a row or column: a length of 2048 is 2K."""
    return tick(value) if isinstance(value, int | float) else str(value)


def tick(value: float) -> str:
    """The label of a tick: 0.01, 500, 2K for 2048, 10⁶."""
    if value >= 1024 and value % 1024 == 0 and value < 1e15:
        thousands = int(value) // 1024
        return f"{thousands}K" if thousands < 1024 or thousands % 1024 else f"{thousands // 1024}M"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:g}"
    return _scientific(value, 0)


def shown(value: Any) -> str:
    """The text of a cell: text unchanged, numbers with four digits, a dash for None."""
    if value is None:
        return MISSING
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    size = abs(value)
    if (isinstance(value, float) and size >= 1e7) or 0 < size < 1e-4 or size >= 1e15:
        return _scientific(value, 2)
    return (f"{value:.0f}" if size >= 1000 else f"{value:.4g}").replace("-", "−")


def _scientific(value: float, places: int) -> str:
    mantissa, _, exponent = f"{value:.{places}e}".partition("e")
    power = f"10{str(int(exponent)).translate(SUPERSCRIPTS)}"
    return power if mantissa == "1" else f"{mantissa}·{power}".replace("-", "−")


def with_spread(value: float | None, spread: float | None, places: int | None = None) -> str:
    """`99.9 ± 0.1`, or the value alone. places: after the point; None for two digits of the spread."""
    if value is None:
        return MISSING
    if abs(value) >= 1e7 or (places is None and (not spread or not 1e-4 <= spread < 1e4)):
        return shown(value) if spread is None else f"{shown(value)} ± {shown(spread)}"
    if places is None:
        places = max(0, 1 - math.floor(math.log10(spread or 1)))
    text = f"{value:.{places}f}" if spread is None else f"{value:.{places}f} ± {spread:.{places}f}"
    return text.replace("-", "−")


def _places(figure: Figure) -> int:
    """Places after the point for all numbers of a figure: as in 99.9, 1.25, 0.0123; none for whole numbers."""
    if figure["kind"] == "bars":
        values = [bar.get("value") for group in figure["groups"] for bar in group["bars"]]
    else:
        values = [value for panel in figure["panels"] for row in panel["values"] for value in row]
    sizes = [abs(value) for value in values if value is not None]
    largest = max(sizes, default=0.0)
    if largest >= 1000 or all(float(size).is_integer() for size in sizes):
        return 0
    return min(8, max(1, 2 - math.floor(math.log10(largest))))


def tables_of(figure: Figure, most_rows: int) -> list[dict[str, Any]]:
    """The numbers of a figure: {"title", "note", "columns", "rows"}; large maps have "text" instead of the last two."""
    if figure["kind"] == "lines":
        return [_line_table(figure, most_rows)]
    if figure["kind"] == "bars":
        places, groups = _places(figure), figure["groups"]
        cells = [
            {bar["name"]: with_spread(bar.get("value"), bar.get("spread"), places) for bar in group["bars"]}
            for group in groups
        ]
        names = dict.fromkeys(bar["name"] for group in groups for bar in group["bars"])
        rows: list[list[Any]] = [[name, *(column.get(name) for column in cells)] for name in names]
        for line in figure.get("references") or []:
            rows.append([f"{line['name']} (line)", *([line["value"]] * len(groups))])
        columns = ["", *(group["name"] for group in groups)]
        return [{"title": figure["value"].get("label") or "", "note": "", "columns": columns, "rows": rows}]
    return [_panel_table(figure, panel) for panel in figure["panels"]]


def _line_table(figure: Figure, most_rows: int) -> dict[str, Any]:
    series = figure["series"]
    points = sorted({x for line in series for x in line["x"] if x is not None})
    step = max(1, math.ceil(len(points) / most_rows))
    columns = []
    for line in series:
        cells = zip(line["x"], line["y"], line.get("spread") or [None] * len(line["x"]), strict=True)
        columns.append({x: with_spread(y, by) for x, y, by in cells})
    # Counted from the end, so that the last point is kept.
    rows = [[x, *(column.get(x) for column in columns)] for x in sorted(points[::-1][::step])]
    note = f"One in {step} of {len(points)} points." if step > 1 else ""
    names = [figure["x"].get("label") or "x", *(line["name"] for line in series)]
    return {"title": figure["y"].get("label") or "", "note": note, "columns": names, "rows": rows}


def _panel_table(figure: Figure, panel: Mapping[str, Any]) -> dict[str, Any]:
    title = f"{panel['name']}, {figure['unit']}" if figure.get("unit") else panel["name"]
    if len(panel["rows"]) * len(panel["columns"]) > MOST_CELLS:
        lines = [",".join("" if value is None else f"{value:.3g}" for value in row) for row in panel["values"]]
        note = f"{len(panel['rows'])} rows of {len(panel['columns'])}, comma-separated."
        return {"title": title, "note": note, "text": "\n".join(lines)}
    corner = f"{figure['rows'].get('label', '')} ↓ {figure['columns'].get('label', '')} →"
    rows = [[shown(name), *values] for name, values in zip(panel["rows"], panel["values"], strict=True)]
    return {"title": title, "note": "", "columns": [corner, *map(shown, panel["columns"])], "rows": rows}
