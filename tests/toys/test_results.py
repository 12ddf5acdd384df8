"""Figures, tables and numbers in the form that `lucid report` reads."""

import json
import math

import pytest

from lucid_lab.report.records import checked
from lucid_lab.toys.results import (
    VERDICTS,
    Conclusion,
    Spread,
    bar,
    bars,
    explain_against,
    finite,
    heatmaps,
    lines,
    mean_of,
    outcome,
    series,
    spread,
    table,
)


def test_a_spread_is_mean_and_standard_deviation_over_seeds() -> None:
    found = spread([90.0, 100.0, 95.0])
    assert (found.mean, found.std) == pytest.approx((95, 5))  # of a sample: n − 1
    assert str(found) == "95.0 ± 5.0"
    assert str(spread([1.23456, 1.23456], 3)) == "1.235 ± 0.000"
    assert str(spread([99.96])) == "100.0"
    assert bar("LUCID", "lucid", spread([1.0]))["spread"] is None
    with pytest.raises(ValueError, match="at least one value"):
        spread([])


def test_a_lead_must_be_larger_than_both_deviations() -> None:
    assert outcome(Spread(60, 3, 3), Spread(53, 3, 3)) == "ahead"
    assert outcome(Spread(60, 3, 3), Spread(54, 3, 3)) == "level"
    assert outcome(Spread(53, 3, 3), Spread(60, 3, 3)) == "behind"
    # Both read 100.0 ± 0.0: level, even if one is ahead by less than a digit that is shown.
    assert outcome(Spread(99.99, 0.001, 3), Spread(99.97, 0.001, 3)) == "level"
    baselines = {"a": Spread(60, 0, 3), "b": Spread(1, 0, 3), "c": Spread(2, 0, 3)}
    text = "LUCID has 60.0 ± 3.0 %: ahead of b (1.0 ± 0.0 %), c (2.0 ± 0.0 %); within noise of a (60.0 ± 0.0 %)."
    assert explain_against("LUCID", Spread(60, 3, 3), baselines) == text
    assert str(mean_of([Spread(1, 0.1, 3, 2), Spread(2, 0.3, 3, 2)])) == "1.50 ± 0.20"


def test_a_verdict_is_one_of_those_that_the_report_knows() -> None:
    for verdict in VERDICTS:
        Conclusion("1", verdict, "because", 3)
    with pytest.raises(ValueError, match=r"verdict must be one of holds, .*, got 'true'"):
        Conclusion("1", "true", "because", 3)


def test_figures_are_read_by_the_report_and_show_what_diverged_as_nothing() -> None:
    curve = series("LUCID", "lucid", (1, 2), [Spread(0.5, 0.1, 3), Spread(math.nan, 0.2, 3)], dashed=True)
    figures = [
        lines("L", "steps", "loss", [curve], log="y", range=(0, 1), marks=[(2, "switch")], note="N"),
        heatmaps("H", "needles", "length", {"LUCID": ((2, 4), (64,), [[99.0], [math.inf]])}, range=(0, 100), unit="%"),
        bars("B", "%", {"n = 2": [bar("LUCID", "lucid", spread([99.0, 100.0]))]}, references={"chance": 1.6}),
    ]
    drawn, maps, grouped = figures
    assert (drawn["x"], drawn["y"]) == (
        {"label": "steps", "log": False},
        {"label": "loss", "log": True, "range": [0, 1]},
    )
    assert drawn["marks"] == [{"x": 2, "name": "switch"}]
    assert (drawn["series"][0]["y"], drawn["series"][0]["spread"]) == ([0.5, None], [0.1, 0.2])
    assert series("a", "b", [1], [2.0])["spread"] is None
    assert maps["panels"] == [{"name": "LUCID", "rows": [2, 4], "columns": [64], "values": [[99.0], [None]]}]
    assert grouped["groups"][0]["bars"][0]["spread"] == pytest.approx(0.7071, abs=1e-4)
    assert grouped["references"] == [{"name": "chance", "value": 1.6}]
    json.dumps(figures, allow_nan=False)
    texts = ("name", "scale", "title", "section", "claim", "paper", "ours", "because", "command", "machine", "finished")
    result = dict.fromkeys(texts, "x") | {"format": 1, "verdict": "holds", "seconds": 1.0, "seeds": 3, "tables": []}
    checked(result | {"figures": figures}, "result")


def test_tables_show_spreads_as_text_and_what_json_cannot_write_becomes_nothing() -> None:
    found = table("T", ["a", "b"], [[spread([1.0, 2.0]), 3.5], [None, "x"]], note="N")
    assert found == {"title": "T", "note": "N", "columns": ["a", "b"], "rows": [["1.5 ± 0.7", 3.5], [None, "x"]]}
    assert finite([1, math.nan, -math.inf, None, 2.5]) == [1.0, None, None, None, 2.5]
    diverged = bar("LUCID", "lucid", spread([1.0, math.nan]))
    assert (diverged["value"], diverged["spread"]) == (None, None)
