"""A damaged checkpoint is found, named and not used."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lucid_attention.training.checkpoints import checkpoints, newest, problem, rotate, seal

from .running import assert_same, killed, lucid, words


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in step 7 and has the checkpoints 4 and 6."""
    run = killed(words("tiny_needle", tmp_path_factory.mktemp("stopped") / "run"), 7)
    assert [path.name for path in checkpoints(run)] == ["checkpoint-6", "checkpoint-4"]
    return run


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "cut off": (truncate, "model.safetensors", r"model\.safetensors: expected \d+ bytes, got \d+"),
    "a bit": (flip, "optimizer.pt", r"optimizer\.pt: its content has changed"),
    "a bit of the schedule": (flip, "scheduler.pt", r"scheduler\.pt: its content has changed"),
    "missing": (Path.unlink, "rng_state.pth", r"rng_state\.pth: is missing"),
    "no list": (Path.unlink, "complete.json", r"complete\.json is missing, it was not written to the end"),
    "half a list": (truncate, "complete.json", r"complete\.json: cannot be read"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_the_checkpoint_before_a_damaged_one_is_used_and_the_end_is_the_same(
    kind: str, stopped: Path, whole: Path, tmp_path: Path
) -> None:
    harm, name, said = DAMAGE[kind]
    run = shutil.copytree(stopped, tmp_path / "run")
    harm(run / "checkpoint-6" / name)
    ended = lucid(words("tiny_needle", run))
    assert ended.code == 0, ended
    line = next(line for line in ended.out.splitlines() if line.startswith("damaged checkpoint: "))
    assert str(run / "checkpoint-6") in line
    assert re.search(said, line)
    assert f"going on from {run / 'checkpoint-4'}\n" in ended.out
    assert_same(run, whole)


def test_a_run_without_a_whole_checkpoint_starts_again_and_keeps_new_ones(
    stopped: Path, whole: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(stopped, tmp_path / "run")
    for checkpoint in checkpoints(run):
        (checkpoint / "optimizer.pt").unlink()
    # As a new run may be killed too, before it comes to the damaged ones.
    killed(words("tiny_needle", run), 4)
    found = newest(run)
    assert found.folder == run / "checkpoint-2"
    truncate(run / "checkpoint-2" / "optimizer.pt")
    ended = lucid(words("tiny_needle", run))
    assert f"damaged checkpoint: {run / 'checkpoint-2' / 'optimizer.pt'}" in ended.out
    assert "no whole checkpoint is left: starting again" in ended.out
    assert_same(run, whole)


def test_one_checkpoint_to_keep_is_one_that_is_whole(stopped: Path, whole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(stopped, tmp_path / "run")
    flip(run / "checkpoint-6" / "optimizer.pt")
    killed(words("tiny_needle", run, keep=1, save_every=5), 2)
    assert newest(run).folder == run / "checkpoint-5"
    assert lucid(words("tiny_needle", run)).code == 0
    assert_same(run, whole)


def written(folder: Path, step: int, text: str = "weights") -> Path:
    """A sealed checkpoint of one file."""
    (folder / "unfinished" / "sub").mkdir(parents=True)
    (folder / "unfinished" / "sub" / "file").write_text(text)
    seal(folder / "unfinished", folder / f"checkpoint-{step}")
    return folder / f"checkpoint-{step}"


def test_no_byte_of_a_list_can_change_unseen_or_end_in_a_traceback(tmp_path: Path) -> None:
    listed = written(tmp_path, 1) / "complete.json"
    content = listed.read_bytes()
    assert problem(listed.parent) is None
    for place in range(len(content)):
        for bit in (1, 2, 128):
            changed = bytearray(content)
            changed[place] ^= bit
            listed.write_bytes(changed)
            if problem(listed.parent) is None:
                # White space, which says nothing.
                assert json.loads(changed) == json.loads(content)


@pytest.mark.parametrize("content", ["", "null", "[]", "{}", '{"files": []}', '{"files": 3}', '{"files": {"a": 1}}'])
def test_a_list_of_another_form_cannot_be_read(content: str, tmp_path: Path) -> None:
    listed = written(tmp_path, 1) / "complete.json"
    listed.write_text(content)
    said = problem(listed.parent)
    assert said is not None
    assert str(listed) in said or "is missing" in said


def test_checkpoints_are_ordered_by_number_and_nothing_else_is_one(tmp_path: Path) -> None:
    for step in (2, 10, 9):
        written(tmp_path, step)
    for name in ("checkpoint-11.partial", "checkpoint-", "checkpoint-x"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-12").write_text("a file")
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-10", "checkpoint-9", "checkpoint-2"]


def test_sealing_replaces_a_damaged_one_of_the_same_step(tmp_path: Path) -> None:
    old = written(tmp_path, 3, "old")
    (old / "complete.json").unlink()
    new = written(tmp_path, 3, "new")
    assert problem(new) is None
    assert (new / "sub" / "file").read_text() == "new"


def test_rotation_keeps_the_newest_of_this_run_and_nothing_from_after_it(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        written(tmp_path, step)
    rotate(tmp_path, 2, 6)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-6", "checkpoint-4"]
