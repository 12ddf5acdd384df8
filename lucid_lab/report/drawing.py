"""The canvas of every figure: the same plot becomes SVG in a page, coloured by the page's CSS, or a PNG file."""

import io
import re
import textwrap
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from lucid_attention.files import write_whole

from .palette import COLOURS

Colours = Mapping[str, str]
# Placeholders that become CSS variables in SVG. No colour map contains them.
SENTINELS: Colours = {name: f"#fe01{number:02x}" for number, name in enumerate(COLOURS)}
# The colours of PNG files.
LIGHT: Colours = {name: light for name, (light, _) in COLOURS.items()}
FONT_SIZE = 10.5


def _settings(colours: Colours) -> Any:
    return {
        # Do not read dollar signs as math.
        "text.parse_math": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "lucid",
        "font.family": "DejaVu Sans",
        "font.size": FONT_SIZE,
        "axes.unicode_minus": True,
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": colours["muted"],
        "axes.labelcolor": colours["ink"],
        "axes.titlesize": FONT_SIZE,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.facecolor": "none",
        "grid.color": colours["grid"],
        "grid.linewidth": 0.8,
        "xtick.color": colours["muted"],
        "ytick.color": colours["muted"],
        "xtick.major.size": 3,
        "ytick.major.size": 0,
        "xtick.minor.size": 0,
        "ytick.minor.size": 0,
        "figure.facecolor": "none",
        "text.color": colours["ink"],
        "path.simplify_threshold": 0.3,
    }


def _saved(width: float, height: float, plot: Callable[[Any], None], colours: Colours, **options: Any) -> bytes:
    """The bytes of a figure of this size in inches, independent of the user's matplotlib settings."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_settings(colours))
        figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03))
        plot(figure)
        file = io.BytesIO()
        figure.savefig(file, **options)
    return file.getvalue()


def draw_svg(width: float, height: float, plot: Callable[[Any, Colours], None], label: str, prefix: str) -> str:
    """`plot(axes, colours)` as SVG for a page.

    width, height: in inches. label: for readers who cannot see the figure. prefix: of the ids, unique on the page.
    """
    options = {"format": "svg", "metadata": {"Date": None, "Creator": None}}
    svg = _saved(width, height, lambda figure: plot(figure.subplots(), SENTINELS), SENTINELS, **options)
    return inlined(svg.decode(), label, prefix)


def write_png(path: Path, width: float, height: float, plot: Callable[[Any, Colours], None], dpi: int = 120) -> Path:
    """`plot(figure, colours)` as a PNG file. width, height: in inches."""
    options = {"format": "png", "dpi": dpi, "facecolor": LIGHT["paper"]}
    return write_whole(path, _saved(width, height, lambda figure: plot(figure, LIGHT), LIGHT, **options))


def fitted(text: Any, width: int, lines: int = 1) -> str:
    """A label of at most `width` characters in at most `lines` lines; a longer text ends with dots."""
    plain = " ".join(str(text).split())
    wrapped = textwrap.wrap(plain, width, max_lines=lines, placeholder=" …")
    # Cut a word that is longer than a line, instead of dropping it.
    return "\n".join(wrapped) if wrapped != ["…"] else plain[: width - 1] + "…"


def inlined(svg: str, label: str, prefix: str) -> str:
    """matplotlib's SVG, made to fit into a page: ids with a prefix, CSS variables for colours, the page's font."""
    view = re.search(r'viewBox="([^"]+)"', svg)
    body = svg[svg.index(">", svg.index("<svg")) + 1 : svg.rindex("</svg>")]
    body = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->|<defs>\s*</defs>", "", body, flags=re.S)
    references = set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', body))
    referenced_ids = {name for pair in references for name in pair if name}
    body = re.sub(r' id="([^"]+)"', lambda m: f' id="{prefix}-{m[1]}"' if m[1] in referenced_ids else "", body)
    body = re.sub(r"url\(#|href=\"#", lambda m: f"{m[0]}{prefix}-", body)
    body = body.replace("xlink:href", "href")
    for name, sentinel in SENTINELS.items():
        body = body.replace(sentinel, f"var(--{name})")
    # Keep sizes and weights, replace the family by the page's.
    body = re.sub(r"(font: [^;\"']*|font-family: )'DejaVu Sans'[^;\"]*", r"\1var(--sans)", body)
    body = re.sub(r"\s*\n\s*", "\n", body).strip()
    title = escape(label)
    box = view[1] if view else "0 0 100 100"
    return f'<svg class="plot" viewBox="{box}" role="img" aria-label="{title}"><title>{title}</title>\n{body}\n</svg>'
