"""Progress: how far the jobs are, and how long they will still take."""

import io
import sys

import pytest

from lucid_lab.claims.engine import pool
from lucid_lab.claims.engine.jobs import Job
from lucid_lab.claims.engine.pool import Progress, clock


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock_of_tests(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(pool, "time", made)
    return made


def job(name: str, seconds: float) -> Job:
    return Job("probe:touch", {"name": name}, name, seconds)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.2, "0:00"), (59.6, "1:00"), (65, "1:05"), (3599.7, "1:00:00"), (7265, "2:01:05"), (36000, "10:00:00")],
)
def test_times_are_shown_as_on_a_clock(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown


def test_the_time_left_follows_from_how_long_finished_jobs_took(clock_of_tests: Clock) -> None:
    a, b, c = (job(name, 10.0) for name in "abc")
    state = Progress(quiet=True)
    assert state.seconds_left() is None
    state.add([a, b, c])
    state.started(a)
    assert state.seconds_left() is None
    clock_of_tests.now += 40  # four times as long as was thought
    state.finished(a)
    assert state.seconds_left() == pytest.approx(80)
    state.started(b)
    clock_of_tests.now += 40
    state.finished(b)
    assert state.seconds_left() == pytest.approx(40)


def test_two_jobs_at_a_time_take_half_the_time(clock_of_tests: Clock) -> None:
    jobs = [job(name, 10.0) for name in "abcd"]
    state = Progress(quiet=True)
    state.add(jobs)
    for started in jobs[:2]:
        state.started(started)
    clock_of_tests.now += 10
    for finished in jobs[:2]:
        state.finished(finished)
    assert state.seconds_left() == pytest.approx(10)


def test_a_running_job_counts_by_its_time_but_never_as_finished(clock_of_tests: Clock) -> None:
    a, b = job("a", 10.0), job("b", 10.0)
    state = Progress(quiet=True)
    state.add([a, b])
    state.started(a)
    clock_of_tests.now += 5
    assert state.seconds_left() == pytest.approx(15)
    clock_of_tests.now += 85
    left = state.seconds_left()
    assert left is not None
    assert left == pytest.approx(90 * 11 / 9)


def test_work_that_becomes_known_later_is_added(clock_of_tests: Clock) -> None:
    a, b = job("a", 10.0), job("b", 30.0)
    state = Progress(quiet=True)
    state.add([a])
    state.started(a)
    clock_of_tests.now += 10
    state.finished(a)
    assert state.seconds_left() == 1.0
    state.add([b])
    assert state.seconds_left() == pytest.approx(30)


def test_without_a_terminal_there_is_a_line_every_half_minute(
    clock_of_tests: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = job("the first", 60.0), job("the second", 60.0)
    state = Progress()
    state.add([a, b])
    state.started(a)
    outputs = []
    for _ in range(61):
        clock_of_tests.now += 1
        state.show()
        outputs.append(capsys.readouterr().err)
    lines = [text for text in outputs if text]
    assert 2 <= len(lines) <= 3
    assert lines[0].startswith("  0/2 jobs, ")
    assert all("left: the first" in line for line in lines)
    state.close()
    assert capsys.readouterr().err == ""


def test_a_terminal_has_one_bar_that_stays_at_the_end(clock_of_tests: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    a, b = job("the first", 60.0), job("the second", 60.0)
    state = Progress()
    state.add([a])
    state.add([b])
    state.started(a)
    clock_of_tests.now += 30
    state.finished(a)
    state.started(b)
    state.show()
    assert "1/2 jobs, 0:30 left" in screen.getvalue()
    assert "the second" in screen.getvalue().rpartition("\r")[2]
    state.close()
    assert state.bar is None


def test_quiet_says_nothing(clock_of_tests: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    state = Progress(quiet=True)
    state.add([job("a", 60.0)])
    state.started(job("a", 60.0))
    clock_of_tests.now += 100
    state.show()
    state.close()
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""
