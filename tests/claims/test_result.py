"""Figures, tables and numbers in the form that `lucid report` reads."""

import json
import math

import pytest

from lucid_lab.claims.engine.result import (
    VERDICTS,
    Conclusion,
    bar,
    bars,
    finite,
    heatmaps,
    lines,
    series,
    spread,
    table,
)


def test_a_spread_is_mean_and_standard_deviation_over_seeds() -> None:
    found = spread([90.0, 100.0, 95.0])
    assert found.mean == pytest.approx(95)
    assert found.std == pytest.approx(5)  # of a sample: n − 1
    assert str(found) == "95.0 ± 5.0"
    assert str(spread([1.23456, 1.23456], 3)) == "1.235 ± 0.000"


def test_one_seed_has_no_spread() -> None:
    assert str(spread([99.96])) == "100.0"
    assert spread([1.0]).std == 0.0
    assert bar("LUCID", "lucid", spread([1.0]))["spread"] is None
    with pytest.raises(ValueError, match="at least one value"):
        spread([])


def test_a_verdict_is_one_of_those_that_the_report_knows() -> None:
    for verdict in VERDICTS:
        Conclusion("1", verdict, "because", 3)
    with pytest.raises(ValueError, match=r"verdict must be one of holds, .*, got 'true'"):
        Conclusion("1", "true", "because", 3)


def test_lines_have_the_form_of_the_report() -> None:
    curve = series("LUCID", "lucid", (1, 2), [0.5, math.nan], spread=[0.1, 0.2], dashed=True)
    assert lines("T", "steps", "loss", [curve], log="y", range=(0, 1), marks=[(2, "switch")], note="N") == {
        "kind": "lines",
        "title": "T",
        "note": "N",
        "x": {"label": "steps", "log": False},
        "y": {"label": "loss", "log": True, "range": [0, 1]},
        "series": [
            {"name": "LUCID", "role": "lucid", "dashed": True, "x": [1, 2], "y": [0.5, None], "spread": [0.1, 0.2]}
        ],
        "marks": [{"x": 2, "name": "switch"}],
    }
    both = lines("T", "x", "y", [], log="xy")
    assert both["x"]["log"]
    assert both["y"]["log"]
    assert both["y"]["range"] is None


def test_heatmaps_have_the_form_of_the_report() -> None:
    panels = {"LUCID": ((2, 4), (64,), [[99.0], [math.inf]])}
    assert heatmaps("T", "needles", "length", panels, range=(0, 100), unit="%") == {
        "kind": "heatmaps",
        "title": "T",
        "note": "",
        "rows": {"label": "needles"},
        "columns": {"label": "length"},
        "range": [0, 100],
        "unit": "%",
        "signed": False,
        "numbers": True,
        "panels": [{"name": "LUCID", "rows": [2, 4], "columns": [64], "values": [[99.0], [None]]}],
    }


def test_bars_have_the_form_of_the_report() -> None:
    groups = {"n = 2": [bar("LUCID", "lucid", spread([99.0, 100.0])), bar("chance", "control", 1.6)]}
    figure = bars("T", "%", groups, references={"chance": 1.6}, range=(0, 100))
    assert figure == {
        "kind": "bars",
        "title": "T",
        "note": "",
        "value": {"label": "%", "range": [0, 100]},
        "groups": [
            {
                "name": "n = 2",
                "bars": [
                    {"name": "LUCID", "role": "lucid", "value": 99.5, "spread": pytest.approx(0.7071, abs=1e-4)},
                    {"name": "chance", "role": "control", "value": 1.6, "spread": None},
                ],
            }
        ],
        "references": [{"name": "chance", "value": 1.6}],
    }


def test_tables_show_spreads_as_text_and_leave_numbers() -> None:
    found = table("T", ["a", "b"], [[spread([1.0, 2.0]), 3.5], [None, "x"]], note="N")
    assert found == {"title": "T", "note": "N", "columns": ["a", "b"], "rows": [["1.5 ± 0.7", 3.5], [None, "x"]]}
    json.dumps(found, allow_nan=False)


def test_a_diverged_seed_can_be_drawn() -> None:
    found = bar("LUCID", "lucid", spread([1.0, math.nan]))
    assert (found["value"], found["spread"]) == (None, None)
    assert bar("LUCID", "lucid", math.inf)["value"] is None


def test_what_json_cannot_write_becomes_nothing() -> None:
    assert finite([1, math.nan, -math.inf, None, 2.5]) == [1.0, None, None, None, 2.5]
