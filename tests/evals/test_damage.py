"""Records of `lucid eval` that were damaged, altered or exchanged; a folder that another evaluation writes."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lucid_lab.evals.results import RecordWriter, read_sealed
from lucid_lab.locks import locked

from .checkpoints import lucid
from .test_runner import GRID, complaint, contents, generated, whole  # noqa: F401


def test_an_unfinished_record_that_was_altered_or_is_of_another_checkpoint_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    with RecordWriter(file, "mine") as writer:
        for index in range(3):
            writer.write({"id": index, "score": 0.5})
    lines = file.read_text().splitlines(keepends=True)
    lines[1] = lines[1].replace("0.5", "1.0")
    file.write_text("[]\n{}\n" + "".join(lines))
    assert [record["id"] for record in read_sealed(file, "mine")] == [0, 2]
    assert read_sealed(file, "another checkpoint") == []


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


def _alter(file: Path) -> None:
    file.write_text(file.read_text().replace('"score": 0.0', '"score": 1.0', 1))


def _drop_the_last_line(file: Path) -> None:
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))


def _exchange(file: Path) -> None:
    other = next(other for other in file.parent.iterdir() if other != file)
    file.write_bytes(other.read_bytes())


DAMAGE = {"cut": _cut, "altered": _alter, "shorter": _drop_the_last_line, "of another cell": _exchange}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_of_samples_is_named_and_its_samples_are_asked_again(
    damage: Callable[[Path], None],
    whole: Path,  # noqa: F811
    lucid_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    # Not the last cell: the one that is asked again keeps its place.
    file = sorted((out / "samples").iterdir())[0]
    damage(file)
    sizes = generated(monkeypatch)
    assert lucid("eval", lucid_folder, *GRID, "--out", out) == 0
    captured = capsys.readouterr()
    assert f"{file} is not the file that results.json describes: expected 5 samples in " in captured.err
    assert "5 samples a cell" in captured.out
    assert sum(sizes) == 5
    names = [path for path in contents(whole) if path.startswith("samples") or path == "results.json"]
    assert {path: contents(out)[path] for path in names} == {path: contents(whole)[path] for path in names}


def test_an_altered_mean_is_named(
    whole: Path,  # noqa: F811
    lucid_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    file = out / "results.json"
    file.write_text(file.read_text().replace('"mean": 0.0', '"mean": 0.75'))
    message = f"{file}: was altered"
    assert message in complaint(capsys, lucid_folder, *GRID, "--out", out)
    assert message in complaint(capsys, out, whole, command="compare")


BAD_RESULTS = {
    "half": ('{"checkp', "results.json: not JSON"),
    "a list": ("[]", "results.json: expected an object, got a list"),
    "no cells": ('{"checkpoint": {"name": "a"}}', "results.json: cells must be of type list, got None"),
    "a cell that is none": ('{"checkpoint": {"name": "a"}, "cells": [3]}', "cells[0]: name must be of type str"),
}


@pytest.mark.parametrize(("text", "message"), BAD_RESULTS.values(), ids=BAD_RESULTS)
def test_results_that_cannot_be_read_are_named(
    text: str, message: str, lucid_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results.json").write_text(text)
    assert message in complaint(capsys, lucid_folder, *GRID, "--out", tmp_path)
    assert message in complaint(capsys, tmp_path, tmp_path, command="compare")


def test_a_folder_that_another_evaluation_writes_is_refused(
    lucid_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with locked(tmp_path, "lucid eval"):
        assert lucid("eval", lucid_folder, *GRID, "--out", tmp_path) == 1
    assert "is being written by another `lucid eval`" in capsys.readouterr().err
    assert not (tmp_path / "samples").exists()
