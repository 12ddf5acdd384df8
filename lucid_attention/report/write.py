"""Results to files: the page, and the same numbers as JSON beside it."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .page import TITLE, page_html
from .records import ReportError, checked


def write_report(results: Sequence[dict[str, Any]], out: Path, title: str = TITLE) -> Path:
    """Write the report of `results` (as in result.json) to `out`, and all of them to `out` with the suffix .json.

    A result that cannot be shown is a ReportError, a kind of ValueError, which names it.
    """
    kept = checked_all(results)
    beside = out.with_suffix(".json")
    if beside == out:
        raise ReportError(f"{out}: that is where the numbers go; choose a name that ends with .html")
    page = page_html(kept, title)
    write_text(
        beside, json.dumps({"title": title, "results": kept}, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    )
    return write_text(out, page)


def checked_all(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every result, checked; at least one."""
    if not results:
        raise ReportError("no results to report")
    return [checked(result, f"results[{number}]") for number, result in enumerate(results)]


def write_text(path: Path, text: str) -> Path:
    """Write beside, then rename: a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return path
