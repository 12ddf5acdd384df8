"""`lab.map`: what is kept, what runs again, and what survives a kill."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lucid_lab.toys import lab as lab_module
from lucid_lab.toys.lab import KEPT, RECORD, SMOKE, Lab, fingerprint, key

RUNS: list[Any] = []


def square(folder: Path, item: Any) -> dict[str, Any]:
    """Squares a number, and leaves a file."""
    RUNS.append(item)
    sum(range(300_000))  # a few milliseconds
    (folder / "number.txt").write_text(str(item))
    return {"square": item**2, "process": os.getpid()}


def read(folder: Path, item: Any) -> dict[str, Any]:
    """Reads the file of an earlier call."""
    return {"text": (folder.parent / item["of"] / "number.txt").read_text()}


def fail(folder: Path, item: Any) -> dict[str, Any]:
    raise ValueError(f"no {item} here\nsecond line")


def endless(folder: Path, item: Any) -> dict[str, Any]:
    return {"value": float("nan")}


@pytest.fixture(autouse=True)
def no_runs() -> None:
    RUNS.clear()


def lab(folder: Path, **options: Any) -> Lab:
    return Lab(SMOKE, folder, quiet=True, **{"processes": 1, **options})


def squares(records: list[dict[str, Any]]) -> list[int]:
    return [record["square"] for record in records]


def test_results_come_in_order_and_are_computed_once_until_a_restart(tmp_path: Path) -> None:
    first = lab(tmp_path)
    assert squares(first.map(square, [3, 1, 2, 1])) == [9, 1, 4, 1]
    assert RUNS == [3, 1, 2]
    again = lab(tmp_path)
    assert squares(again.map(square, [1, 2, 5])) == [1, 4, 25]
    assert RUNS == [3, 1, 2, 5]
    restarted = lab(tmp_path, restart=True)
    restarted.map(square, [1])
    restarted.map(square, [1, 2])
    assert RUNS[4:] == [1, 2]
    assert again.seconds > 0
    assert again.finished == time.strftime("%Y-%m-%d", time.gmtime())


def test_changed_code_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab(tmp_path).map(square, [2])
    monkeypatch.setattr(lab_module, "fingerprint", lambda module: "of the edited file")
    lab(tmp_path).map(square, [2])
    assert RUNS == [2, 2]
    assert key(square, 2) != key(read, 2)


def test_the_fingerprint_follows_imports_at_any_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "made_up_package"
    files = {
        "__init__.py": "",
        "top.py": "import torch\nfrom .room import deep\n",
        "room/__init__.py": "",
        "room/deep.py": "def f():\n    from ..bottom import g\n    return g\n",
        "bottom.py": "def g():\n    return 1\n",
        "unused.py": "",
    }
    for name, content in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(lab_module, "PACKAGES", ("made_up_package",))

    def now() -> str:
        for function in (lab_module.fingerprint, lab_module._source, lab_module._file):
            function.cache_clear()
        return fingerprint("made_up_package.top")

    before = now()
    assert now() == before
    (package / "unused.py").write_text("x = 1")
    assert now() == before
    found = {before}
    for name in ("top.py", "room/__init__.py", "room/deep.py", "bottom.py"):
        (package / name).write_text(files[name] + "x = 1\n")
        found.add(now())
    assert len(found) == 5
    # The next test must not find the entries of the made-up package.
    lab_module.fingerprint.cache_clear()


def test_a_damaged_record_is_reported_and_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab(tmp_path).map(square, [4])
    record = tmp_path / KEPT / key(square, 4) / RECORD
    record.write_text(record.read_text()[:-9])
    assert squares(lab(tmp_path).map(square, [4])) == [16]
    assert RUNS == [4, 4]
    assert f"{record}: not JSON" in capsys.readouterr().err


def test_a_later_function_finds_the_files_of_an_earlier_one(tmp_path: Path) -> None:
    (made,) = lab(tmp_path).map(square, [7])
    assert lab(tmp_path).map(read, [{"of": made["folder"]}])[0]["text"] == "7"


def test_an_error_names_the_function_and_keeps_what_is_finished(tmp_path: Path) -> None:
    bench = lab(tmp_path)
    bench.map(square, [1])
    with pytest.raises(RuntimeError, match=r"^fail failed with ValueError: no thing here\. .*failed\.txt has"):
        bench.map(fail, ["thing"])
    assert "second line" in (tmp_path / KEPT / key(fail, "thing") / "failed.txt").read_text()
    with pytest.raises(RuntimeError, match="not JSON compliant"):
        bench.map(endless, [1])
    assert squares(lab(tmp_path).map(square, [1])) == [1]
    assert RUNS == [1]


def test_processes_share_the_work_and_measurements_of_time_run_here(tmp_path: Path) -> None:
    records = lab(tmp_path, processes=2).map(square, [1, 2, 3, 4])
    assert squares(records) == [1, 4, 9, 16]
    assert os.getpid() not in {record["process"] for record in records}
    alone = lab(tmp_path, processes=2).map(square, [5, 6], alone=True)
    assert {record["process"] for record in alone} == {os.getpid()}


# Two calls that finish at once and two that never do.
SCRIPT = """
    import sys, time
    from pathlib import Path
    from lucid_lab.toys.lab import SMALL, Lab
    from tests.toys.test_lab import wait_for

    if __name__ == "__main__":
        out = Path(sys.argv[1])
        Lab(SMALL, out, processes=2, quiet=True).map(wait_for, [0.0, 0.1, 600.0, 601.0])
"""


def wait_for(folder: Path, seconds: float) -> dict[str, Any]:
    (folder / "process.txt").write_text(str(os.getpid()))
    time.sleep(0 if (folder.parents[1] / "go").exists() else seconds)
    return {"seconds": seconds}


@contextmanager
def started(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """The script with two calls finished, and the processes of the two that run."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    root = str(Path(__file__).parents[2])
    command = [sys.executable, str(script), str(tmp_path / "out")]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": root}, stderr=subprocess.DEVNULL)
    kept = tmp_path / "out" / KEPT

    def numbers() -> list[Path]:
        return list(kept.glob("*/process.txt"))

    try:
        deadline = time.monotonic() + 60
        while len(list(kept.glob(f"*/{RECORD}"))) < 2 or sum(file.stat().st_size > 0 for file in numbers()) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        waiting = [folder for folder in kept.iterdir() if not (folder / RECORD).exists()]
        yield process, [int((folder / "process.txt").read_text()) for folder in waiting]
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_finished_results_survive_a_kill_workers_end_and_the_next_command_resumes(
    number: signal.Signals, tmp_path: Path
) -> None:
    with started(tmp_path) as (process, workers):
        process.send_signal(number)
        assert process.wait(20) != 0
        deadline = time.monotonic() + 10
        while any(_runs(worker) for worker in workers):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    (tmp_path / "out" / "go").touch()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / KEPT).glob(f"*/{RECORD}")}
    records = lab(tmp_path / "out").map(wait_for, [0.0, 0.1, 600.0, 601.0])
    assert [record["seconds"] for record in records] == [0.0, 0.1, 600.0, 601.0]
    assert len(before) == 2
    assert all(path.stat().st_mtime_ns == when for path, when in before.items())


def _runs(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
