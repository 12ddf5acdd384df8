"""After kill -9 at any moment, the same command writes the same bytes as a run that was not killed."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from lucid_lab.data.shards import VERIFIED, ShardWriter
from lucid_lab.data.tokenize import tokenize

from .folders import contents, write_texts

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {"tokenizer": "train:270", "workers": 1, "validation": 0.3, "shard_tokens": 700, "limit": 6}


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync: a kill does not lose what was written, only a loss of power does."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def run_and_die(source: str, out: str, moment: int, options: dict[str, Any]) -> None:
    """Tokenize, and die at step `moment`: steps are before and after each rename, and after each document."""
    steps_left = moment
    replace, add = os.replace, ShardWriter.add

    def step() -> None:
        nonlocal steps_left
        steps_left -= 1
        if steps_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def dying_replace(*names: Any) -> None:
        step()
        replace(*names)
        step()

    def dying_add(self: ShardWriter, ids: list[int]) -> None:
        add(self, ids)
        self._file.flush()
        step()

    os.replace, ShardWriter.add = dying_replace, dying_add  # type: ignore[assignment,method-assign]
    tokenize(source, out, **options)


@pytest.mark.parametrize("more", [{}, {"limit": None, "limit_tokens": 1500, "seed": 3, "min_document_tokens": 5}])
def test_a_run_killed_at_any_step_is_finished_by_the_next_run(more: dict[str, Any], tmp_path: Path) -> None:
    names = [f"a{number:03d}.txt" for number in range(8)]
    write_texts(tmp_path / "in", 8, words=120)
    (tmp_path / "list").write_text("".join(f"in/{name}\n" for name in names))
    source, options = f"@{tmp_path}/list" if more else str(tmp_path / "in"), SMALL | more
    first, _ = tokenize(source, tmp_path / "whole", **options)
    documents = sum(counts["documents"] for counts in first["splits"].values())
    whole = contents(tmp_path / "whole")
    # Fork: a new process would spend two seconds on imports.
    context = multiprocessing.get_context("fork")
    killed = 0
    for moment in range(1, 1000):
        out = tmp_path / f"out{moment}"
        child = context.Process(target=run_and_die, args=(source, str(out), moment, options))
        child.start()
        child.join()
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
        killed += 1
        if (out / "manifest.json").exists():
            assert contents(out)["manifest.json"] == whole["manifest.json"]
        manifest, _ = tokenize(source, out, **options)
        assert manifest["splits"]["train"]["documents"] + manifest["splits"]["validation"]["documents"] == documents
        # A run that finds the folder finished checks its shards, and notes that for later ones.
        found = {name: content for name, content in contents(out).items() if name != VERIFIED}
        assert found == whole, f"killed at step {moment}"
    assert documents == 6 or more
    assert documents < 8
    assert killed > 20


def test_finished_parts_are_not_encoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_texts(tmp_path / "in", 14, words=120)
    options = SMALL | {"limit": None}
    tokenize(str(tmp_path / "in"), tmp_path / "whole", **options)
    added: list[int] = []
    add = ShardWriter.add

    def counted(self: ShardWriter, ids: list[int]) -> None:
        added.append(1)
        if len(added) == 8:
            raise KeyboardInterrupt
        add(self, ids)

    monkeypatch.setattr(ShardWriter, "add", counted)
    with pytest.raises(KeyboardInterrupt):
        tokenize(str(tmp_path / "in"), tmp_path / "out", **options)
    assert not list((tmp_path / "out").glob("*.partial"))
    first = len(added) - 1
    tokenize(str(tmp_path / "in"), tmp_path / "out", **options)
    # Only the part without a record, of at most 4 documents, is encoded again.
    assert 14 <= first + len(added) - 8 <= 14 + 4
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("suffix", ["bin", "ends.npy"])
def test_a_finished_part_that_lost_a_file_is_encoded_again(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts(tmp_path / "in", 8, words=120)
    options = SMALL | {"limit": None}
    tokenize(str(tmp_path / "in"), tmp_path / "whole", **options)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("lucid_lab.data.tokenize._finish", stop)
        with pytest.raises(KeyboardInterrupt):
            tokenize(str(tmp_path / "in"), tmp_path / "out", **options)
    next((tmp_path / "out").glob(f"train-*.{suffix}")).unlink()
    tokenize(str(tmp_path / "in"), tmp_path / "out", **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_leftovers_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    write_texts(tmp_path / "in", 8, words=120)
    tokenize(str(tmp_path / "in"), tmp_path / "whole", **SMALL)
    (tmp_path / "out/unfinished").mkdir(parents=True)
    # Earlier releases ended the names of unfinished files in .tmp.
    for name in ("train-000009-000.bin", "train-000009-000.ends.npy.partial", "train-000009-000.bin.tmp"):
        (tmp_path / "out" / name).write_bytes(b"half")
    tokenize(str(tmp_path / "in"), tmp_path / "out", **SMALL)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


COMMAND = """
import sys
from lucid_lab.data.tokenize import tokenize
if __name__ == "__main__":
    tokenize(sys.argv[1], sys.argv[2], tokenizer="train:400", workers=2, shard_tokens=4000)
"""


def test_a_kill_ends_the_workers_and_loses_no_finished_part(tmp_path: Path) -> None:
    write_texts(tmp_path / "in", 60, words=3000)
    source, out = str(tmp_path / "in"), tmp_path / "out"
    script = tmp_path / "command.py"
    script.write_text(COMMAND)
    process = subprocess.Popen([sys.executable, script, source, out], env={**os.environ, "PYTHONPATH": os.getcwd()})
    try:
        started = time.monotonic()
        while not (records := list(out.glob("unfinished/part-*.json"))):
            assert process.poll() is None
            assert time.monotonic() - started < 100
            time.sleep(0.005)
        workers = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.wait()
    assert workers
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive
    assert not (out / "manifest.json").exists()
    times = {record: record.stat().st_mtime_ns for record in records}
    ids = {file: file.stat().st_mtime_ns for r in records for file in out.glob(f"*-{r.stem[5:]}-*.bin")}
    assert ids
    options: dict[str, Any] = {"tokenizer": "train:400", "workers": 1, "shard_tokens": 4000}
    tokenize(source, out, **options)
    assert {file: file.stat().st_mtime_ns for file in ids} == ids
    assert times
    tokenize(source, tmp_path / "whole", **options)
    assert contents(out) == contents(tmp_path / "whole")
