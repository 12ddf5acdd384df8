"""Numbers as people read them."""

import math
import re
from collections.abc import Iterable
from typing import Any

SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
MISSING = "–"


def typeset(text: str) -> str:
    """Minus signs for hyphens before numbers; a number stays with its spread and its percent sign when lines break."""
    text = re.sub(r"(?<![^\s(\[,;:/→])-(?=\d)", "−", text)
    return text.replace(" ± ", "\u00a0±\u00a0").replace(" %", "\u00a0%")


def shown(value: Any) -> str:
    """A cell: text as it is, numbers with four digits, a dash for nothing."""
    if value is None:
        return MISSING
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return str(value).replace("-", "−")
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-4:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        text = f"{mantissa}·10{str(int(exponent)).translate(SUPERSCRIPTS)}"
    elif size >= 1000:
        text = f"{value:.0f}"
    else:
        text = f"{value:.4g}"
    return text.replace("-", "−")


def with_spread(value: Any, spread: Any, places: int | None = None) -> str:
    """`99.9 ± 0.1`; without a spread, the value. places: after the point; if None, two digits of the spread."""
    if value is None:
        return MISSING
    if places is None:
        if not spread or not 1e-4 <= spread < 1e4:
            return shown(value) if spread is None else f"{shown(value)} ± {shown(spread)}"
        places = max(0, 1 - math.floor(math.log10(spread)))
    text = f"{value:.{places}f}" if spread is None else f"{value:.{places}f} ± {spread:.{places}f}"
    return text.replace("-", "−")


def places_of(values: Iterable[Any]) -> int:
    """Places after the point for numbers that stand together: 99.9, 1.25, 0.0123, and none for whole numbers."""
    sizes = [abs(value) for value in values if value is not None]
    largest = max(sizes, default=0.0)
    if largest >= 1000 or all(float(size).is_integer() for size in sizes):
        return 0
    return max(1, 2 - math.floor(math.log10(largest)))


def tick(value: float) -> str:
    """A tick of a logarithmic axis: 0.01, 500, 2K for 2048, 10⁶."""
    if value >= 1024 and value == int(value) and int(value) % 1024 == 0:
        thousands = int(value) // 1024
        return f"{thousands}K" if thousands < 1024 or thousands % 1024 else f"{thousands // 1024}M"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:g}"
    mantissa, _, exponent = f"{value:.0e}".partition("e")
    power = f"10{str(int(exponent)).translate(SUPERSCRIPTS)}"
    return power if mantissa == "1" else f"{mantissa}·{power}"


def duration(seconds: Any) -> str:
    """`43 s`, `5 min 12 s`, `2 h 3 min`."""
    if not isinstance(seconds, (int, float)):
        return MISSING
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
