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
with locked(Path(sys.argv[1]), "lucid train"):
    print("locked", flush=True)
    time.sleep(60)
"""


def test_a_second_run_is_refused_with_the_first_one_named_and_a_kill_releases_the_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        named = pytest.raises(FolderInUse, match=rf"`lucid train` \(process {holder.pid} on ")
        with named as refused, locked(tmp_path / "run", "lucid train"):
            pass
        assert str(tmp_path / "run") in str(refused.value)
        for content in ("", "[]", "[" * 100_000):
            (tmp_path / "run" / ".lock.json").write_text(content)
            with pytest.raises(FolderInUse, match="another process"), locked(tmp_path / "run", "lucid train"):
                pass
        holder.kill()
    with locked(tmp_path / "run", "lucid train"):
        pass


def test_a_lock_leaves_nothing_that_blocks_the_next_run(tmp_path: Path) -> None:
    for _ in range(2):
        with locked(tmp_path, "lucid eval"):
            pass
    with pytest.raises(ZeroDivisionError), locked(tmp_path, "lucid eval"):
        1 / 0  # noqa: B018
    with locked(tmp_path, "lucid eval"):
        pass
