"""The benchmark of serving times nothing before both sides gave the right tokens."""

import copy
from pathlib import Path

import pytest

from lucid_lab.bench.cases import serving
from lucid_lab.bench.gate import WrongAnswer
from lucid_lab.cli import main


def test_the_check_passes_for_the_right_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    serving.check()
    names = (serving.SDPA, serving.RAGGED, serving.LUCID)
    monkeypatch.setattr(serving, "_contestants", lambda model: {name: copy.deepcopy(model) for name in names})
    with pytest.raises(WrongAnswer, match="not told apart by their tokens"):
        serving.check()


def test_tokens_that_are_not_those_of_generate_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = serving._answers
    monkeypatch.setattr(serving, "_answers", lambda *args: [[token + 1 for token in one] for one in answers(*args)])
    with pytest.raises(WrongAnswer, match=r"'sdpa' does not give the tokens of generate\(\)"):
        serving.check()


@pytest.mark.slow
def test_a_quick_run_leaves_a_table(tmp_path: Path) -> None:
    assert main(["bench", "serving", "--quick", "--out", str(tmp_path)]) == 0
    assert "| 4 | 8–40 | 4 |" in (tmp_path / "results.md").read_text()
