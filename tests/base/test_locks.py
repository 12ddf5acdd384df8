"""Locks of folders: one run at a time, released when its process ends."""

import subprocess
import sys
from pathlib import Path

import pytest

from lucid_lab.locks import FolderInUse, locked

HOLD = """
import sys, time
from pathlib import Path
from lucid_lab.locks import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


def test_a_second_run_is_refused_until_the_first_one_ends_or_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(FolderInUse, match=rf"{folder} is being written by another process"), locked(folder):
            pass
        holder.kill()
    with pytest.raises(ZeroDivisionError), locked(folder):
        1 / 0  # noqa: B018
    (folder / "kept").touch()
    with locked(folder):
        pass
    assert [path.name for path in folder.iterdir()] == ["kept"]


def test_folders_that_stay_empty_are_removed_again(tmp_path: Path) -> None:
    with locked(tmp_path / "new" / "run"):
        pass
    assert not list(tmp_path.iterdir())
