"""Workers are deaf to Ctrl-C from their first moment; their parent answers it when they have started."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lucid_lab.processes import stops_wait

ROOT = Path(__file__).parents[2]
# A worker imports this file before it runs anything else, and interrupts itself there: before it ignores Ctrl-C.
SCRIPT = """
import os, signal, sys
from lucid_lab.processes import WorkerPool

if __name__ == "__mp_main__":
    os.kill(os.getpid(), signal.SIGINT)

def begin(text):
    print(text, flush=True)

def answer(number):
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert not mask & {signal.SIGINT, signal.SIGTERM}, mask
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    return number

if __name__ == "__main__":
    with WorkerPool(2, begin, ("begun",)) as pool:
        print(sum(future.result() for future in [pool.submit(answer, number) for number in (1, 2, 3)]))
"""


def test_a_worker_that_is_interrupted_before_it_can_ignore_it_goes_on(tmp_path: Path) -> None:
    (tmp_path / "workers.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "workers.py")]
    # A command in the background of a shell ignores SIGINT, and its children inherit that.
    ran = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert ran.stderr == ""
    assert ran.returncode == 0
    assert ran.stdout.splitlines().count("begun") in (1, 2)
    assert "6" in ran.stdout.splitlines()


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("times", [1, 3])
def test_a_stop_waits_for_the_end_of_the_block(stop: signal.Signals, times: int) -> None:
    steps = []

    def handler(number: int, _: object) -> None:
        steps.append("stopped")
        raise KeyboardInterrupt

    def start() -> None:
        with stops_wait():
            for _ in range(times):
                # To this thread: another one could take it at any later time.
                signal.pthread_kill(threading.get_ident(), stop)
            steps.append("started")

    before = signal.signal(stop, handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            start()
        assert steps == ["started", "stopped"]
        assert signal.getsignal(stop) is handler
        assert stop not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        signal.signal(stop, before)


def test_a_stop_that_another_thread_takes_waits_too() -> None:
    steps = []

    def handler(number: int, _: object) -> None:
        steps.append("stopped")

    before = signal.signal(signal.SIGINT, handler)
    try:
        with stops_wait():
            # The signal is let through for a moment, as it is by a thread with a mask of its own.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            steps.append("started")
        assert steps == ["started", "stopped"]
    finally:
        signal.signal(signal.SIGINT, before)


def test_workers_start_in_one_place() -> None:
    files = [path for path in (ROOT / "lucid_lab").rglob("*.py") if "ProcessPoolExecutor" in path.read_text()]
    assert [path.relative_to(ROOT).as_posix() for path in files] == ["lucid_lab/processes.py"]
