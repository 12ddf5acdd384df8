"""The guide's table of what works is the one that the marks of the tests give."""

from pathlib import Path

import pytest

from tools import feature_table


def test_the_table_in_the_guide_is_current() -> None:
    text = feature_table.GUIDE.read_text(encoding="utf-8")
    table = feature_table.render(feature_table.read_marks())
    assert feature_table.replace_table(text, table) == text, "run python tools/feature_table.py"


def write(folder: Path, *marks: str) -> Path:
    tests = "\n".join(f"@pytest.mark.shows({mark})\ndef test_{index}(): ...\n" for index, mark in enumerate(marks))
    (folder / "test_marked.py").write_text(tests, encoding="utf-8")
    return folder


def test_what_works_comes_before_what_is_refused(tmp_path: Path) -> None:
    marks = ['"a", model="drop-in", refused=True', '"b", model="decoder"', '"b", model="drop-in", refused=True']
    rows = feature_table.render(feature_table.read_marks(write(tmp_path, *marks))).splitlines()
    assert rows[2:] == ["| b | refused | yes |", "| a | refused |  |"]


@pytest.mark.parametrize("mark", ['"a"', '"a", model="other"', '"a", model="decoder", works=True'])
def test_a_mark_that_is_not_understood_is_an_error(mark: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected shows"):
        feature_table.read_marks(write(tmp_path, mark))


def test_a_feature_does_not_work_and_get_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shown to work and to be refused"):
        feature_table.read_marks(write(tmp_path, '"a", model="decoder"', '"a", model="decoder", refused=True'))
