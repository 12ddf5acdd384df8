"""One look for each attention, the same on the whole page: a colour, a marker and a weight of line.

The colours are those of Okabe and Ito, darkened or lightened where they would fade on white or on black. There are more
roles than colours that stay apart for everyone: markers, dashes and names tell what colours do not.
"""

from dataclasses import dataclass


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
# Several series of one role: the first looks as above, the others take these markers and dashes.
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

# Colours of the page that pictures use as well.
SURFACES = {
    "ink": ("#1b232c", "#e8edf3"),
    "muted": ("#5a6673", "#9fabb8"),
    "grid": ("#dfe4ea", "#333d49"),
    "paper": ("#ffffff", "#161c24"),
    "missing": ("#eceff3", "#242d38"),
}


@dataclass(frozen=True)
class Look:
    """How one series is drawn. `colour` is a role; dashes are lengths on and off in points."""

    colour: str
    marker: str
    width: float
    dashes: tuple[float, ...]


def look(role: str, earlier: int = 0, dashed: bool = False) -> Look:
    """Of a series of a role, after so many `earlier` ones of the same role in the figure."""
    style = ROLES[role]
    marker = style.marker
    if earlier:
        others = [each for each in MORE_MARKERS if each != style.marker]
        marker = others[(earlier - 1) % len(others)]
    dashes = DASHED if dashed else DASHES[earlier % len(DASHES)]
    return Look(role, marker, style.width if not earlier else max(1.4, style.width - 0.8), dashes)


def looks(series: list[dict[str, object]]) -> list[Look]:
    """Of all series of a figure, in order."""
    seen: dict[str, int] = {}
    found = []
    for each in series:
        role = str(each["role"])
        found.append(look(role, seen.get(role, 0), bool(each.get("dashed"))))
        seen[role] = seen.get(role, 0) + 1
    return found


def colour_names() -> list[str]:
    """Everything that a picture may be coloured with, in a fixed order."""
    return [*SURFACES, *ROLES]


def style_sheet() -> str:
    """The colours as CSS variables: light first, dark where the reader prefers it and does not print."""
    pairs = {**SURFACES, **{name: (role.light, role.dark) for name, role in ROLES.items()}}
    light, dark = ("".join(f"--{name}:{pair[which]};" for name, pair in pairs.items()) for which in (0, 1))
    return f":root{{color-scheme:light dark;{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"
