"""docs/paper_map.md tells the truth: files and names exist, settings are those of the code, the count is right."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lucid_lab.claims import CLAIMS
from lucid_lab.training import presets
from lucid_lab.training.recipes import RECIPES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "paper_map.md"
NOTES = ROOT / "docs" / "paper_notes.md"
WORDS = ("exact", "reading", "departs")
CODE = re.compile(r"`((?:[\w.]+/)+\w+\.py)(?:::(\w+))?`")
SETTING = re.compile(r"`(\w+)\.([\w.]+)`")


class Row(NamedTuple):
    """value: of a setting, None in other tables. status: the last column."""

    line: int
    what: str
    value: str | None
    where: str
    status: str


def rows() -> Iterator[Row]:
    for number, line in enumerate(PAGE.read_text(encoding="utf-8").splitlines(), 1):
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")] if line.startswith("| ") else []
        if cells and cells[0] not in ("in the paper", "setting"):
            assert len(cells) in (3, 4), f"line {number} has {len(cells)} cells"
            yield Row(number, cells[0], cells[1] if len(cells) == 4 else None, *cells[-2:])


ROWS = list(rows())
SETTINGS = [row for row in ROWS if row.value is not None]


def parsed(text: str) -> Any:
    """A value of the page: 11 000 is a number, "cosine" a text, 2, 4, 6 a tuple."""
    return ast.literal_eval(re.sub(r"(?<=\d) (?=\d{3})", "", text))


def in_the_code(name: str, path: str) -> Any:
    if name in RECIPES:
        value: Any = RECIPES[name]
    else:
        value = getattr(presets, name)()
    for part in path.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


@cache
def names_in(file: Path) -> set[str]:
    """The names that a file defines at its top level, and the keys of its table RECIPES."""
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
            if "RECIPES" in names and isinstance(node.value, ast.Dict):
                names |= {str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)}
    return names


def missing(text: str) -> list[str]:
    """The files and names in a cell that do not exist."""
    found = []
    for path, name in CODE.findall(text):
        houses = ("",) if path.startswith("tests/") else ("lucid_attention", "lucid_lab")
        file = next((ROOT / house / path for house in houses if (ROOT / house / path).is_file()), ROOT / path)
        if not file.is_file() or (name and name not in names_in(file)):
            found.append(f"{path}::{name}" if name else path)
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"line {row.line}")
def test_every_file_and_name_exists(row: Row) -> None:
    assert missing(row.where) == []
    assert CODE.search(row.where) or SETTING.fullmatch(row.where) or "](" in row.where, "the row names no place"


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row.where)
def test_settings_of_the_code_are_those_of_the_page(row: Row) -> None:
    match = SETTING.fullmatch(row.where)
    assert match is not None
    assert row.value is not None
    assert in_the_code(*match.groups()) == parsed(row.value)


def test_every_row_says_how_it_compares_and_the_count_is_right() -> None:
    counts = {word: sum(row.status.startswith(word) for row in ROWS) for word in WORDS}
    assert [row for row in ROWS if not row.status.startswith(WORDS)] == []
    assert [row for row in ROWS if not row.status.startswith("exact") and ":" not in row.status] == []
    told = f"{len(ROWS)} rows: {counts['exact']} exact, {counts['reading']} readings, {counts['departs']} departures."
    assert told in PAGE.read_text(encoding="utf-8")
    assert len(ROWS) >= 110


def test_every_note_that_a_row_names_exists() -> None:
    notes = set(re.findall(r"^\| (\d+) \|", NOTES.read_text(encoding="utf-8"), re.MULTILINE))
    for row in ROWS:
        for numbers in re.findall(r"notes? (\d+(?:, \d+)*)", row.status):
            assert set(numbers.split(", ")) <= notes, f"line {row.line}"


def test_every_table_figure_and_algorithm_of_the_paper_has_a_row() -> None:
    text = " ".join(row.what for row in ROWS)
    for kind, count in (("Table", 7), ("Figure", 7), ("equation", 5), ("Algorithm", 9)):
        for number in range(1, count + 1):
            assert re.search(rf"\b{kind} \(?{number}\b", text), f"{kind} {number}"


def test_the_numbers_of_the_paper_are_those_of_its_tables() -> None:
    sections = tomllib.loads((ROOT / "paper" / "numbers.toml").read_text(encoding="utf-8"))
    assert set(sections) - {"longqa"} <= set(CLAIMS)
    numbers = [number for section in sections.values() for number in section["numbers"]]
    assert len({(number["where"], number["name"]) for number in numbers}) == len(numbers)
    assert all(isinstance(number["value"], float) for number in numbers)
    cells = {"Table 3": 5 * 3, "Table 4": 8 * 6, "Table 5": 4 * 5, "Table 6": 4 * 7, "Table 7": 3 * 6}
    assert {name: sum(number["where"] == name for number in numbers) for name in cells} == cells


def test_the_checks_see_what_is_wrong() -> None:
    assert missing("`ops/keys.py::rms_normalize`, `ops/keys.py::rms_normalise`") == ["ops/keys.py::rms_normalise"]
    assert missing("`ops/locks.py`") == ["ops/locks.py"]
    assert parsed("11 000") == 11_000
    assert parsed("2, 4, 6") == (2, 4, 6)
    assert in_the_code("pretrain_2k", "steps") == 11_000
