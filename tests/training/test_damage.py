"""A damaged checkpoint is named and not used."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lucid_lab.training.checkpoints import (
    checkpoints,
    find_damage,
    finish_checkpoint,
    newest_whole,
    remove_old,
)

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
    "no list": (Path.unlink, "complete.json", r"complete\.json is missing, the checkpoint was not written to the end"),
    "half a list": (truncate, "complete.json", r"complete\.json: cannot be read"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_run_resumes_before_a_damaged_checkpoint_to_the_same_result(
    kind: str, stopped: Path, whole: Path, tmp_path: Path
) -> None:
    damage, name, message = DAMAGE[kind]
    run = shutil.copytree(stopped, tmp_path / "run")
    damage(run / "checkpoint-6" / name)
    ended = lucid(words("tiny_needle", run))
    assert ended.code == 0, ended
    line = next(line for line in ended.out.splitlines() if line.startswith("damaged checkpoint: "))
    assert str(run / "checkpoint-6") in line
    assert re.search(message, line)
    assert f"resuming from {run / 'checkpoint-4'}\n" in ended.out
    assert_same(run, whole)


def test_a_run_without_a_whole_checkpoint_starts_again_and_keeps_new_ones(
    stopped: Path, whole: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(stopped, tmp_path / "run")
    for checkpoint in checkpoints(run):
        (checkpoint / "optimizer.pt").unlink()
    # Kill the new run as well, before it reaches the damaged checkpoints.
    killed(words("tiny_needle", run), 4)
    assert newest_whole(run)[0] == run / "checkpoint-2"
    truncate(run / "checkpoint-2" / "optimizer.pt")
    ended = lucid(words("tiny_needle", run))
    assert f"damaged checkpoint: {run / 'checkpoint-2' / 'optimizer.pt'}" in ended.out
    assert "no whole checkpoint is left: starting again" in ended.out
    assert_same(run, whole)


def test_the_only_kept_checkpoint_is_a_whole_one(stopped: Path, whole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(stopped, tmp_path / "run")
    flip(run / "checkpoint-6" / "optimizer.pt")
    killed(words("tiny_needle", run, keep=1, save_every=5), 2)
    assert newest_whole(run)[0] == run / "checkpoint-5"
    assert lucid(words("tiny_needle", run)).code == 0
    assert_same(run, whole)


def write_checkpoint(folder: Path, step: int, text: str = "weights") -> Path:
    """A finished checkpoint of one file."""
    (folder / "unfinished" / "sub").mkdir(parents=True)
    (folder / "unfinished" / "sub" / "file").write_text(text)
    finish_checkpoint(folder / "unfinished", folder / f"checkpoint-{step}")
    return folder / f"checkpoint-{step}"


def test_every_changed_byte_of_the_list_is_found(tmp_path: Path) -> None:
    listed = write_checkpoint(tmp_path, 1) / "complete.json"
    content = listed.read_bytes()
    assert find_damage(listed.parent) is None
    for place in range(len(content)):
        for bit in (1, 2, 128):
            changed = bytearray(content)
            changed[place] ^= bit
            listed.write_bytes(changed)
            if find_damage(listed.parent) is None:
                # Only white space differs.
                assert json.loads(changed) == json.loads(content)


@pytest.mark.parametrize(
    "content",
    ["", "null", "[]", "{}", '{"files": []}', '{"files": 3}', '{"files": {"a": 1}}', "[" * 100_000],
    ids=lambda content: content[:20],
)
def test_a_list_of_another_form_is_damage(content: str, tmp_path: Path) -> None:
    listed = write_checkpoint(tmp_path, 1) / "complete.json"
    listed.write_text(content)
    damage = find_damage(listed.parent)
    assert damage is not None
    assert str(listed) in damage or "is missing" in damage


def test_checkpoints_are_ordered_by_step_and_other_names_are_ignored(tmp_path: Path) -> None:
    for step in (2, 10, 9):
        write_checkpoint(tmp_path, step)
    for name in ("checkpoint-11.partial", "checkpoint-", "checkpoint-x"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-12").write_text("a file")
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-10", "checkpoint-9", "checkpoint-2"]


def test_a_finished_checkpoint_replaces_a_damaged_one_of_the_same_step(tmp_path: Path) -> None:
    old = write_checkpoint(tmp_path, 3, "old")
    (old / "complete.json").unlink()
    new = write_checkpoint(tmp_path, 3, "new")
    assert find_damage(new) is None
    assert (new / "sub" / "file").read_text() == "new"


def test_removing_old_checkpoints_keeps_the_newest_up_to_the_step(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        write_checkpoint(tmp_path, step)
    remove_old(tmp_path, 2, 6)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-6", "checkpoint-4"]
