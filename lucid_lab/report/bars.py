"""Bars: a panel for each group, a bar for each attention with its name before and its number behind it."""

from typing import Any

from .drawing import Colours, draw_svg, fitted
from .numbers import bar_places, with_spread
from .palette import colour_of

WIDTH = 4.4
# Height in inches of a bar's row with a name of one line, and of two lines.
ROW, DOUBLE_ROW = 0.25, 0.37
# Groups of at most this many bars share a panel.
FEW = 3
LONGEST_NAME = 24
# Width of a letter and height of a line of text, in inches.
LETTER, LINE = 0.082, 0.18


def draw_bars(figure: dict[str, Any], prefix: str) -> list[tuple[str, str]]:
    """A `bars` figure as (heading, SVG) of its panels, all on one scale."""
    low, high = _limits(figure)
    groups = figure["groups"]
    if len(groups) > 1 and max(len(group["bars"]) for group in groups) <= FEW:
        return [("", _panel(figure, groups, (low, high), figure["title"], prefix))]
    panels = []
    for number, group in enumerate(groups):
        label = f"{figure['title']}: {group['name']}" if group.get("name") else figure["title"]
        panels.append((str(group.get("name", "")), _panel(figure, [group], (low, high), label, f"{prefix}p{number}")))
    return panels


def _limits(figure: dict[str, Any]) -> tuple[float, float]:
    if figure["value"].get("range"):
        low, high = figure["value"]["range"]
        return float(low), float(high)
    ends = [0.0]
    for bar in (bar for group in figure["groups"] for bar in group["bars"]):
        if bar.get("value") is not None:
            ends += [bar["value"] - (bar.get("spread") or 0.0), bar["value"] + (bar.get("spread") or 0.0)]
    ends += [line["value"] for line in figure.get("references") or [] if line.get("value") is not None]
    low, high = min(ends), max(ends)
    return (low * 1.05, high * 1.05) if high > low else (0.0, 1.0)


def _panel(
    figure: dict[str, Any], groups: list[dict[str, Any]], limits: tuple[float, float], label: str, prefix: str
) -> str:
    rows: list[tuple[str, dict[str, Any] | None]] = []
    for group in groups:
        if len(groups) > 1:
            rows.append((str(group.get("name", "")), None))
        rows += [(bar["name"], bar) for bar in group["bars"]]
    references = [line for line in figure.get("references") or [] if line.get("value") is not None]
    names = {place: fitted(name, LONGEST_NAME, 2) for place, (name, bar) in enumerate(rows) if bar is not None}
    row = DOUBLE_ROW if any("\n" in name for name in names.values()) else ROW
    height = 0.75 + row * len(rows) + LINE * len(references)
    letters = max((len(line) for name in names.values() for line in name.split("\n")), default=0)
    places = bar_places(figure)

    def plot(axes: Any, colours: Colours) -> None:
        axes.grid(visible=False, axis="y")
        for place, (name, bar) in enumerate(rows):
            if bar is None:
                axes.text(
                    0, place + 0.1, fitted(name, 40), transform=axes.get_yaxis_transform(), va="center", weight="bold"
                )
            else:
                _bar(axes, place, bar, limits, places, colours)
        axes.set_yticks(list(names), list(names.values()), color=colours["ink"], linespacing=0.95)
        for name_drawn, place in zip(axes.get_yticklabels(), names, strict=True):
            name_drawn.set_weight("bold" if (rows[place][1] or {})["role"] == "lucid" else "normal")
        axes.set_ylim(len(rows) - 0.4, -0.6)
        low, high = limits
        room = _room_for_numbers(rows, places, WIDTH - LETTER * letters - 0.2)
        axes.set_xlim(low, high + room * (high - low))
        axes.spines["bottom"].set_bounds(low, high)
        axes.spines["left"].set_visible(low >= 0)
        if low < 0:
            axes.axvline(0, color=colours["muted"], linewidth=0.8)
        axes.set_xticks([at for at in axes.get_xticks() if low - 1e-9 <= at <= high + 1e-9])
        axes.set_xlabel(fitted(figure["value"].get("label", ""), 40, 2), x=0.5 / (1 + room))
        for level, reference in enumerate(references):
            _reference(axes, reference, limits, level, colours["muted"])

    return draw_svg(WIDTH, height, plot, label, prefix)


def _room_for_numbers(rows: list[tuple[str, dict[str, Any] | None]], places: int, width: float) -> float:
    """Room for the numbers behind the longest bar, as a share of its length. width: of bar and number, in inches."""
    bars = [bar for _, bar in rows if bar is not None]
    numbers = [with_spread(bar.get("value"), bar.get("spread"), places) for bar in bars]
    needed = LETTER * max(map(len, numbers), default=0) + 0.1
    return needed / max(width - needed, 0.8)


def _bar(
    axes: Any, place: int, bar: dict[str, Any], limits: tuple[float, float], places: int, colours: Colours
) -> None:
    value, spread = bar.get("value"), bar.get("spread")
    low, high = limits
    lucid = bar["role"] == "lucid"
    end = max(0.0, low)
    if value is not None:
        start, reach = max(0.0, low), min(max(value, low), high)
        axes.barh(place, reach - start, left=start, height=0.66, color=colours[colour_of(bar["role"])], linewidth=0)
        if spread:
            whisker = {"ecolor": colours["ink"], "elinewidth": 1.1, "capsize": 2.2, "fmt": "none"}
            axes.errorbar(reach, place, xerr=spread, **whisker)
        end = max(end, reach + (spread or 0.0))
    number = axes.annotate(
        with_spread(value, spread, places),
        (end, place),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        weight="bold" if lucid else "normal",
        fontsize=10,
        annotation_clip=False,
    )
    # Its room is reserved above, so that all panels of a figure are equally wide.
    number.set_in_layout(False)


def _reference(axes: Any, reference: dict[str, Any], limits: tuple[float, float], level: int, colour: str) -> None:
    axes.axvline(reference["value"], color=colour, linewidth=1.1, linestyle=(0, (3, 2)), zorder=4)
    late = reference["value"] > (limits[0] + limits[1]) / 2
    axes.annotate(
        fitted(reference.get("name", ""), 40),
        (reference["value"], 1),
        xycoords=axes.get_xaxis_transform(),
        xytext=(0, 2 + 12 * level),
        textcoords="offset points",
        ha="right" if late else "left",
        va="bottom",
        fontsize=10,
        color=colour,
    )
