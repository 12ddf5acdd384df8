"""One look for each attention, the same on every figure: a colour, a marker and a width of line.

The colours are those of Okabe and Ito, darkened or lightened where they would fade on white or on black. There are more
attentions than colours that everyone can tell apart, so series also differ in markers, dashes and names.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32


@dataclass(frozen=True)
class Role:
    """Colours on light and on dark, matplotlib's marker, width of lines in points."""

    light: str
    dark: str
    marker: str
    width: float = 1.4


ROLES = {
    "lucid": Role("#0067b1", "#56a8f5", "o", 2.8),
    "softmax": Role("#d55e00", "#f98e3f", "s", 2.0),
    "lucid_path": Role("#2f93c9", "#8fd0f7", "D"),
    "path": Role("#00805d", "#2fc79b", "^"),
    "diff": Role("#b1508a", "#e79ac4", "v"),
    "delta": Role("#8a6d00", "#f0e442", "P"),
    "gated_delta": Role("#b88000", "#e6b340", "X"),
    "gla": Role("#6b4fa0", "#b9a3e8", "<"),
    "gsa": Role("#7a4a2b", "#d2a07c", ">"),
    "sliding": Role("#8b2635", "#f08a96", "h"),
    "control": Role("#5b6470", "#aab4c0", "*"),
}
# Looks for roles that are not in ROLES, such as the name of a new attention.
RESERVE = {
    "reserve-1": Role("#00747f", "#63d2dc", "D"),
    "reserve-2": Role("#a3238e", "#ee8fe0", "^"),
    "reserve-3": Role("#4d7a12", "#a8d66a", "v"),
    "reserve-4": Role("#4a4fd0", "#a5a9ff", "s"),
    "reserve-5": Role("#c2185b", "#ff8bb4", "P"),
    "reserve-6": Role("#8c5a3c", "#dcae8f", "X"),
    "reserve-7": Role("#2f6f4f", "#86cfa8", "h"),
    "reserve-8": Role("#6a737c", "#c3ccd4", "o"),
}
# Markers and dashes of further series of one colour in a figure.
MORE_MARKERS = ("s", "^", "D", "v", "P", "X", "o")
DASHES = ((), (5, 2.2), (1.2, 1.8), (7, 2, 1.5, 2))
DASHED = (5, 2.2)

# Outlines of the markers for legends, about the origin.
OUTLINES = {
    "o": "M-3.4 0a3.4 3.4 0 1 0 6.8 0a3.4 3.4 0 1 0-6.8 0z",
    "s": "M-3-3h6v6h-6z",
    "D": "M0-4.2 4.2 0 0 4.2-4.2 0z",
    "*": "M0-4.8 1.2-1.6 4.6-1.5 1.9.6 2.8 3.9 0 2-2.8 3.9-1.9.6-4.6-1.5-1.2-1.6z",
    "^": "M0-3.8 3.8 3.2-3.8 3.2z",
    "v": "M0 3.8 3.8-3.2-3.8-3.2z",
    "<": "M-3.8 0 3.2-3.8 3.2 3.8z",
    ">": "M3.8 0-3.2-3.8-3.2 3.8z",
    "P": "M-1.3-3.8h2.6v2.5h2.5v2.6h-2.5v2.5h-2.6v-2.5h-2.5v-2.6h2.5z",
    "X": "M-3.8-2-2-3.8 0-1.8 2-3.8 3.8-2 1.8 0 3.8 2 2 3.8 0 1.8-2 3.8-3.8 2-1.8 0z",
    "h": "M0-3.8 3.3-1.9 3.3 1.9 0 3.8-3.3 1.9-3.3-1.9z",
}

# Colours of the page that figures use as well.
SURFACES = {
    "ink": ("#1b232c", "#e8edf3"),
    "muted": ("#5a6673", "#9fabb8"),
    "grid": ("#dfe4ea", "#333d49"),
    "paper": ("#ffffff", "#161c24"),
    "missing": ("#eceff3", "#242d38"),
}
# Every colour of a figure by name: (on light, on dark).
COLOURS = SURFACES | {name: (role.light, role.dark) for name, role in (ROLES | RESERVE).items()}


@dataclass(frozen=True)
class Look:
    """How one series is drawn. `colour` is a name in COLOURS; dashes are lengths on and off in points."""

    colour: str
    marker: str
    width: float
    dashes: tuple[float, ...]


def colour_of(role: str) -> str:
    """The name in COLOURS of a role. An unknown role gets one of RESERVE, always the same one."""
    return role if role in ROLES else list(RESERVE)[crc32(role.encode()) % len(RESERVE)]


def look(role: str, earlier: int = 0, dashed: bool = False) -> Look:
    """The look of a series. earlier: series of the same colour before it in the figure."""
    colour = colour_of(role)
    style = (ROLES | RESERVE)[colour]
    marker = style.marker
    if earlier:
        others = [other for other in MORE_MARKERS if other != style.marker]
        marker = others[(earlier - 1) % len(others)]
    dashes = DASHED if dashed else DASHES[earlier % len(DASHES)]
    return Look(colour, marker, style.width if not earlier else max(1.4, style.width - 0.8), dashes)


def looks(series: Sequence[dict[str, Any]]) -> list[Look]:
    """The looks of all series of a figure, in order."""
    earlier: dict[str, int] = {}
    styles = []
    for line in series:
        colour = colour_of(line["role"])
        styles.append(look(line["role"], earlier.get(colour, 0), bool(line.get("dashed"))))
        earlier[colour] = earlier.get(colour, 0) + 1
    return styles


def style_sheet() -> str:
    """The colours as CSS variables: light by default, dark on a screen whose reader prefers it."""
    light, dark = ("".join(f"--{name}:{pair[which]};" for name, pair in COLOURS.items()) for which in (0, 1))
    return f":root{{color-scheme:light dark;{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"
