"""A result that tries to break the page: long words, markup in every text, missing numbers, empty figures."""

from typing import Any

from .samples import result, sound_results

NASTY = "</title><script>alert('x')</script> & \"quotes\" <img src=http://example.invalid/x.png onerror=alert(1)>"


def nasty() -> dict[str, Any]:
    empty_lines = {
        "kind": "lines",
        "title": NASTY,
        "note": NASTY,
        "x": {"label": NASTY, "log": True},
        "y": {"label": "y", "log": True, "range": None},
        "series": [{"name": NASTY, "role": "gsa", "x": [1, 2], "y": [None, 0.0], "spread": None}],
        "marks": [{"x": 1.5, "name": NASTY}],
    }
    empty_bars = {
        "kind": "bars",
        "title": "Nothing measured",
        "value": {"label": "ΔL, nats", "range": None},
        "groups": [{"name": "", "bars": [{"name": NASTY, "role": "lucid", "value": None, "spread": None}]}],
    }
    differences = {
        "kind": "bars",
        "title": "Difference of losses",
        "value": {"label": "ΔL, nats", "range": None},
        "groups": [
            {
                "name": "",
                "bars": [
                    {"name": "equal steps", "role": "lucid", "value": -0.012, "spread": 0.006},
                    {"name": "equal time", "role": "lucid", "value": 0.017, "spread": 0.007},
                ],
            }
        ],
        "references": [{"name": "no gain", "value": 0.0}],
    }
    return result(
        "no<t> & a/name",
        title=NASTY,
        section="A.5",
        claim=NASTY + " Überlänge κ ≤ ∞ 日本語 " + "unbroken" * 30,
        paper="−0.03 nats",
        ours="too few steps: " + NASTY,
        verdict="too small to judge",
        because=NASTY,
        command="lucid experiment language_model --scale small --only '<a> & b' " + "--very-long-option value " * 6,
        machine=NASTY,
        seconds=None,
        seeds=None,
        scale="smoke",
        figures=[empty_lines, empty_bars, differences],
        tables=[{"title": NASTY, "note": NASTY, "columns": [NASTY, "b"], "rows": [[None, 65536], [1e-9, -2.5]]}],
    )


def all_results() -> list[dict[str, Any]]:
    return [*sound_results(), nasty()]
