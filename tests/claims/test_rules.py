"""Versions of the rules: every experiment has one, and reports name it."""

from pathlib import Path

import pytest

from lucid_lab.claims import learnability
from lucid_lab.claims.engine.result import Conclusion
from lucid_lab.claims.engine.rules import RULES, Change, Rule
from lucid_lab.claims.engine.scale import SMALL
from lucid_lab.claims.engine.study import EXPERIMENTS, load, save_result
from lucid_lab.report.page import markdown, page_html
from lucid_lab.report.records import VERDICTS


def test_every_experiment_has_a_rule_with_a_version_and_a_date() -> None:
    assert tuple(RULES) == EXPERIMENTS
    for rule in RULES.values():
        dates = [rule.first, *(change.date for change in rule.changes)]
        assert dates == sorted(dates)
        assert rule.version == len(dates)
        assert rule.date == dates[-1]
        for change in rule.changes:
            assert change.before.startswith((*VERDICTS, "not recorded"))
            assert change.after.startswith((*VERDICTS, "the published one"))


@pytest.mark.parametrize("name", ["needle_grid", "learnability"])
def test_a_report_names_the_version_and_what_was_changed_after_a_result_was_seen(name: str, tmp_path: Path) -> None:
    conclusion = Conclusion("1", "partly", "of this", 3)
    result = save_result(load(name).CLAIM, conclusion, name, SMALL, tmp_path, "lucid experiment", 1.0)
    for text in (markdown([result]), page_html([result])):
        assert f"version {RULES[name].version} of {RULES[name].date}" in text
        assert ("verdict before: does not hold (97.0" in text) == (name == "needle_grid")


def test_a_result_of_before_there_were_versions_is_shown_without_one(tmp_path: Path) -> None:
    conclusion = Conclusion("1", "partly", "of this", 3)
    result = save_result(learnability.CLAIM, conclusion, "probe", SMALL, tmp_path, "lucid experiment", 1.0)
    del result["rule"]
    assert "Rule" not in markdown([result])
    assert "Rule of the verdict" not in page_html([result])


def test_each_change_is_a_version() -> None:
    change = Change("2026-02-01", "less is asked", "does not hold", "holds")
    assert str(Rule("2026-01-01")) == "version 1 of 2026-01-01, the first"
    assert str(Rule("2026-01-01", (change,))) == (
        "version 2 of 2026-02-01. Changed after a result was seen: 2026-02-01: less is asked (verdict before: does not "
        "hold; after: holds)"
    )
