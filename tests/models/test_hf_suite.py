"""The judgement of `make test-suite-hf`: every difference has a reason, every reason a difference."""

from pathlib import Path
from typing import Any

import pytest
import transformers

from tools import hf_suite
from tools.hf_suite import Column

COLUMNS = [Column("a sdpa", "a sdpa"), Column("a lucid", "a sdpa")]
REASON = {"tests": ["test_on*"], "columns": ["* lucid"], "outcome": "failed", "reason": "so it is"}


def results(one: str, two: str) -> dict[str, Any]:
    def column(**outcomes: str) -> dict[str, Any]:
        return {name: {"outcome": each, "message": "said why", "seconds": 1} for name, each in outcomes.items()}

    return {
        "a sdpa": column(test_one="passed", test_two="passed", test_stock="failed"),
        "a lucid": column(test_one=one, test_two=two, test_own="failed"),
    }


def test_a_difference_without_a_reason_is_wrong() -> None:
    for outcomes in (results("failed", "failed"), results("failed", "skipped")):
        said, (wrong,) = hf_suite.judge(COLUMNS, outcomes, [REASON])
        assert said == ["a lucid: test_one failed, passed with sdpa: so it is"]
        assert "test_two" in wrong
        assert wrong.endswith("without a reason: said why")
    (_, wrong_outcome) = hf_suite.judge(COLUMNS, results("skipped", "passed"), [REASON])
    assert len(wrong_outcome) == 2


def test_a_reason_without_a_difference_is_wrong_if_its_columns_ran() -> None:
    assert hf_suite.judge(COLUMNS, results("passed", "passed"), [REASON])[1] == [
        "a reason that no longer applies: ['test_on*'] in ['* lucid']: so it is"
    ]
    assert hf_suite.judge(COLUMNS, results("passed", "passed"), [REASON | {"columns": ["b lucid"]}]) == ([], [])


def test_the_reasons_are_well_formed_and_name_columns() -> None:
    names = [column.name for column in hf_suite.COLUMNS]
    for reason in hf_suite.read_reasons():
        assert any(hf_suite.fnmatch.fnmatch(name, pattern) for name in names for pattern in reason["columns"]), reason


def test_only_a_clone_of_the_installed_version_is_taken(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=rf"must be a clone.*--branch v{transformers.__version__} https"):
        hf_suite.check_clone(tmp_path, any_version=False)
    for file, text in (("src/transformers/__init__.py", '__version__ = "5.0.0"\n'), ("tests/causal_lm_tester.py", "")):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit, match=r"got 5\.0\.0"):
        hf_suite.check_clone(tmp_path, any_version=False)
    hf_suite.check_clone(tmp_path, any_version=True)
