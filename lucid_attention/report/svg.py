"""Drawings as SVG inside a page: coloured by the page's CSS, with ids of their own, the same bytes every time."""

import io
import re
import textwrap
from collections.abc import Callable
from html import escape
from typing import Any

from .palette import colour_names

# Matplotlib wants colours, the page wants variables: each stands for one, and no colour map has them.
SENTINELS = {name: f"#fe01{number:02x}" for number, name in enumerate(colour_names())}
FONT_SIZE = 10.5
SETTINGS: Any = {
    # A dollar sign is a dollar sign.
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "lucid",
    "font.family": "DejaVu Sans",
    "font.size": FONT_SIZE,
    "axes.unicode_minus": True,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": SENTINELS["muted"],
    "axes.labelcolor": SENTINELS["ink"],
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "grid.color": SENTINELS["grid"],
    "grid.linewidth": 0.8,
    "xtick.color": SENTINELS["muted"],
    "ytick.color": SENTINELS["muted"],
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "figure.facecolor": "none",
    "text.color": SENTINELS["ink"],
    "path.simplify_threshold": 0.3,
}


def draw(width: float, height: float, plot: Callable[[Any], None], label: str, prefix: str) -> str:
    """An SVG of `plot(axes)`.

    width, height: in inches. label: for those who cannot see it. prefix: of its ids, unlike any other on the page.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context():
        # Whatever the reader's own settings are.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03))
        FigureCanvasSVG(figure)
        plot(figure.subplots())
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return inlined(text.getvalue(), label, prefix)


def fitted(text: Any, width: int, lines: int = 1) -> str:
    """A label of at most so many characters in so many lines; what is longer ends with dots."""
    plain = " ".join(str(text).split())
    kept = textwrap.wrap(plain, width, max_lines=lines, placeholder=" …")
    # A word that is longer than a line is cut, not dropped.
    return "\n".join(kept) if kept != ["…"] else plain[: width - 1] + "…"


def inlined(svg: str, label: str, prefix: str) -> str:
    """What matplotlib wrote, fit to stand in a page."""
    view = re.search(r'viewBox="([^"]+)"', svg)
    body = svg[svg.index(">", svg.index("<svg")) + 1 : svg.rindex("</svg>")]
    body = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->|<defs>\s*</defs>", "", body, flags=re.S)
    used = set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', body))
    kept = {name for pair in used for name in pair if name}
    body = re.sub(r' id="([^"]+)"', lambda m: f' id="{prefix}-{m[1]}"' if m[1] in kept else "", body)
    body = re.sub(r"url\(#|href=\"#", lambda m: f"{m[0]}{prefix}-", body)
    body = body.replace("xlink:href", "href")
    for name, sentinel in SENTINELS.items():
        body = body.replace(sentinel, f"var(--{name})")
    # Sizes and weights stay, the family is the page's.
    body = re.sub(r"(font: [^;\"']*|font-family: )'DejaVu Sans'[^;\"]*", r"\1var(--sans)", body)
    body = re.sub(r"\s*\n\s*", "\n", body).strip()
    title = escape(label)
    box = view[1] if view else "0 0 100 100"
    return f'<svg class="plot" viewBox="{box}" role="img" aria-label="{title}"><title>{title}</title>\n{body}\n</svg>'
