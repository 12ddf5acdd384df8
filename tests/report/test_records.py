"""Results are found and checked; one that cannot be shown is refused by name."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lucid_lab.report.command import find_results
from lucid_lab.report.records import ReportError, checked

from .samples import attention_maps, learnability, memory_update, needle_grid, result


def put(folder: Path, made: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "result.json"
    file.write_text(made if isinstance(made, str) else json.dumps(made))
    return file


def test_files_and_folders_in_the_order_given_and_none_twice(tmp_path: Path) -> None:
    put(tmp_path / "runs" / "b", result("b"))
    put(tmp_path / "runs" / "a" / "deep", result("a"))
    (tmp_path / "runs" / "a" / "other.json").write_text("[]")
    alone = tmp_path / "x.json"
    alone.write_text(json.dumps(result("x")))
    found = find_results([alone, tmp_path / "runs", tmp_path / "runs" / "b" / "result.json", tmp_path / "runs"])
    assert [each["name"] for each in found] == ["x", "a", "b"]


def test_rehearsals_are_left_out_of_a_folder_unless_they_are_asked_for(tmp_path: Path) -> None:
    put(tmp_path / "a", result("a"))
    put(tmp_path / "rehearsal" / "b", result("b"))
    assert [each["name"] for each in find_results([tmp_path])] == ["a"]
    assert [each["name"] for each in find_results([tmp_path / "rehearsal"])] == ["b"]


def test_of_a_folder_what_holds_comes_first(tmp_path: Path) -> None:
    for name, verdict in (("a", "too small to judge"), ("b", "does not hold"), ("c", "holds"), ("d", "holds")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(json.dumps({**memory_update(), "name": name, "verdict": verdict}))
    assert [each["name"] for each in find_results([tmp_path])] == ["c", "d", "b", "a"]


def test_a_missing_path_and_an_empty_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="nowhere: no such"):
        find_results([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ReportError, match=r"empty: no result\.json, recipe\.json or results\.json in it"):
        find_results([tmp_path / "empty"])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{broken", "not JSON"),
        ("", "not JSON"),
        ("[1]", "expected an object, got a list"),
        (json.dumps(result("a", format=2)), "format must be 1, got 2"),
        (json.dumps({"name": "a"}), "format must be 1, got None"),
    ],
)
def test_a_broken_file_is_named(text: str, complaint: str, tmp_path: Path) -> None:
    put(tmp_path / "good", result("good"))
    file = put(tmp_path / "wrong", text)
    with pytest.raises(ReportError) as raised:
        find_results([tmp_path])
    assert str(file) in str(raised.value)
    assert complaint in str(raised.value)


Change = Callable[[Any], object]
WRONG: dict[str, tuple[Callable[[], dict[str, Any]], Change, str]] = {
    "no title": (memory_update, lambda r: r.pop("title"), "title must be of type str, got None"),
    "a number as text": (memory_update, lambda r: r.update(ours=3), "ours must be of type str, got 3"),
    "a new verdict": (memory_update, lambda r: r.update(verdict="true"), "verdict must be one of holds"),
    "figures missing": (memory_update, lambda r: r.pop("figures"), "figures must be of type list"),
    "a new kind": (
        memory_update,
        lambda r: r["figures"][0].update(kind="pie"),
        "figures[0]: kind must be one of lines",
    ),
    "a figure that is none": (memory_update, lambda r: r["figures"].append(3), "figures[3]: kind"),
    "a role that is no name": (
        memory_update,
        lambda r: r["figures"][0]["groups"][1]["bars"][2].update(role=3),
        "figures[0]: groups[1]: bars[2]: role must be of type str, got 3",
    ),
    "an empty role": (
        memory_update,
        lambda r: r["figures"][0]["groups"][1]["bars"][2].update(role=""),
        "bars[2]: role must be the name of an attention or 'control', got ''",
    ),
    "a new kind of result": (memory_update, lambda r: r.update(kind="poll"), "kind must be one of experiment"),
    "unequal lengths": (
        learnability,
        lambda r: r["figures"][0]["series"][1]["y"].pop(),
        "figures[0]: series[1]: y must be as long as x, 200, got 199",
    ),
    "unequal spreads": (
        learnability,
        lambda r: r["figures"][0]["series"][0].update(spread=[1]),
        "spread must be as long",
    ),
    "a missing row": (
        attention_maps,
        lambda r: r["figures"][0]["panels"][1]["values"].pop(),
        "panels[1]: values must be 64",
    ),
    "a short row": (
        needle_grid,
        lambda r: r["figures"][0]["panels"][0]["values"][2].pop(),
        "values must be 4 rows of 4",
    ),
    "no range": (needle_grid, lambda r: r["figures"][0].update(range=None), "range must be of type list"),
    "half a range": (needle_grid, lambda r: r["figures"][0].update(range=[0, None]), "range must be [low, high]"),
    "an object as a value": (
        learnability,
        lambda r: r["figures"][0]["series"][0]["y"].__setitem__(3, {}),
        "series[0]: y: expected numbers, got {}",
    ),
    "a text on an axis": (
        learnability,
        lambda r: r["figures"][0]["series"][0]["x"].__setitem__(3, "x"),
        "series[0]: x: expected numbers, got 'x'",
    ),
    "a list in a map": (
        needle_grid,
        lambda r: r["figures"][0]["panels"][0]["values"][0].__setitem__(0, [1]),
        "panels[0]: values: expected numbers, got [1]",
    ),
    "a bar of text": (
        memory_update,
        lambda r: r["figures"][0]["groups"][1]["bars"][2].update(value="x"),
        "bars[2]: expected numbers, got 'x'",
    ),
    "a note that is a number": (needle_grid, lambda r: r["figures"][0].update(note=3), "note must be of type str"),
    "a mark that is none": (learnability, lambda r: r["figures"][0].update(marks=[3]), "marks[0]: name must be"),
    "half an axis": (
        learnability,
        lambda r: r["figures"][0]["y"].update(range=[1]),
        "figures[0]: y: range must be [low, high], got [1]",
    ),
    "a short line in a table": (
        needle_grid,
        lambda r: r["tables"][0]["rows"][1].pop(),
        "tables[0]: every row must have 4",
    ),
}


@pytest.mark.parametrize(("make", "change", "complaint"), WRONG.values(), ids=WRONG)
def test_a_wrong_result_is_refused(make: Callable[[], dict[str, Any]], change: Change, complaint: str) -> None:
    wrong = make()
    assert checked(wrong, "the file")["name"] == wrong["name"]
    change(wrong)
    with pytest.raises(ReportError) as raised:
        checked(wrong, "the file")
    assert str(raised.value).startswith("the file: ")
    assert complaint in str(raised.value)


def test_numbers_that_json_lacks_become_nothing_and_the_given_result_stays(tmp_path: Path) -> None:
    given = needle_grid()
    before = copy.deepcopy(given)
    assert checked(given, "here")["tables"][0]["rows"][3][1] is None
    assert repr(given) == repr(before)
    given["tables"][0]["rows"][3][1] = 10**400
    assert checked(given, "here")["tables"][0]["rows"][3][1] is None
    # Python writes NaN to JSON files and reads it back.
    given = needle_grid()
    put(tmp_path, given)
    assert find_results([tmp_path])[0]["tables"][0]["rows"][3][1] is None
