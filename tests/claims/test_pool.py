"""Jobs run in parallel, once; finished jobs stay when others fail or the command is stopped."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from lucid_lab.claims.engine import pool
from lucid_lab.claims.engine.jobs import Job, Store
from lucid_lab.claims.engine.pool import JobsFailed, do, run_jobs
from lucid_lab.claims.engine.scale import SMOKE
from lucid_lab.claims.small.training import SmallRun

from .probing import Command, Probes, probing, silent, until

RUN = SmallRun(n=(2,), length=12, width=16, heads=1, steps=3, batch=2, test_n=(2,), test_lengths=(12,), test_batch=4)
TRAINING = [RUN.but(seed=seed).job(f"seed {seed}") for seed in range(2)]


@pytest.fixture
def probes(tmp_path: Path) -> Iterator[Probes]:
    with probing(tmp_path / "probes") as made:
        yield made


class Ran(NamedTuple):
    """A run of many jobs with two processes, one of which fails."""

    store: Store
    probes: Probes
    jobs: dict[str, Job]
    message: str
    runs: list[str]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    folder = tmp_path_factory.mktemp("pool")
    store = Store(folder / "jobs")
    with probing(folder / "probes") as found:
        probe = found.module.probe
        jobs = {
            "short": probe("short", expected=1),
            "fragile": Job("probe:fragile", {"name": "fragile"}, "the fragile one", 50),
            "alone 1": probe("alone 1", seconds=0.2, expected=1000, alone=True),
            "alone 2": probe("alone 2", seconds=0.2, expected=999, alone=True),
            "long 1": probe("long 1", seconds=0.4, expected=100),
            "long 2": probe("long 2", seconds=0.4, expected=99),
            "NaN": Job("probe:endless", {"number": 1e999}, "the endless one"),
        }
        done = probe("done before", value=3.0)
        assert do(done, store.folder) is None
        (found.folder / "broken").touch()
        twice = [*jobs.values(), *TRAINING, jobs["short"], done]
        with pytest.raises(JobsFailed) as failed:
            run_jobs(twice, store, silent(), processes=2)
        yield Ran(store, found, jobs, str(failed.value), found.runs())


def test_every_job_runs_once_and_a_finished_one_does_not(ran: Ran) -> None:
    assert sorted(ran.runs) == sorted(
        ["done before", "short", "fragile", "alone 1", "alone 2", "long 1", "long 2"],
    )


def test_a_failing_job_does_not_lose_the_others(ran: Ran) -> None:
    lost = {name for name, job in ran.jobs.items() if job not in ran.store}
    assert lost == {"fragile", "NaN"}


def test_the_message_names_the_file_that_says_why(ran: Ran) -> None:
    assert ran.message.startswith("2 of 9 jobs failed")
    log = ran.store.folder_of(ran.jobs["fragile"]) / pool.LOG
    assert str(log) in ran.message
    assert log.read_text().startswith("the fragile one\nprobe:fragile {'name': 'fragile'}\n")
    assert "Traceback (most recent call last)" in log.read_text()
    assert log.read_text().rstrip().endswith("RuntimeError: fragile has broken")
    assert "JSON" in (ran.store.folder_of(ran.jobs["NaN"]) / pool.LOG).read_text()


def test_jobs_run_in_parallel_with_one_thread_each_and_the_longest_first(ran: Ran) -> None:
    (a, b), (c, d) = ran.probes.span("long 1"), ran.probes.span("long 2")
    assert a < d
    assert c < b
    assert len({entry["pid"] for entry in ran.probes.entries() if entry.get("begin", "").startswith("long")}) == 2
    assert set(ran.runs[1:3]) == {"long 1", "long 2"}
    assert ran.runs.index("fragile") < ran.runs.index("short")
    assert ran.store[ran.jobs["long 1"]]["threads"] == 1
    assert ran.store[ran.jobs["long 1"]]["deaf"]  # only the parent answers Ctrl-C


def test_jobs_that_measure_time_run_with_nothing_beside_them(ran: Ran) -> None:
    spans = {name: ran.probes.span(name) for name in ran.runs if name != "done before"}
    for name in ("alone 1", "alone 2"):
        begin, end = spans.pop(name)
        assert all(b <= begin or a >= end for a, b in spans.values()), name


def test_jobs_in_parallel_give_what_they_give_one_after_the_other(ran: Ran, tmp_path: Path) -> None:
    for job in TRAINING:
        assert do(job, tmp_path) is None
        alone, parallel = Store(tmp_path)[job], dict(ran.store[job])
        for record in (alone, parallel):
            record["curve"] = {name: values for name, values in record["curve"].items() if name != "seconds"}
        assert alone == parallel
    assert ran.store[TRAINING[0]]["tests"] != ran.store[TRAINING[1]]["tests"]


def test_a_job_that_failed_is_done_again_and_only_that(ran: Ran) -> None:
    (ran.probes.folder / "broken").unlink()
    jobs = [job for name, job in ran.jobs.items() if name != "NaN"]
    run_jobs([*jobs, *TRAINING], ran.store, silent(), processes=2)
    assert ran.probes.runs() == [*ran.runs, "fragile"]
    assert ran.store[ran.jobs["fragile"]] == {"value": 1.0}
    assert not (ran.store.folder_of(ran.jobs["fragile"]) / pool.LOG).exists()


def test_nothing_to_do_starts_no_process(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "WorkerPool", None)
    run_jobs([ran.jobs["short"], *TRAINING], ran.store, silent())


def test_an_unknown_function_stops_before_anything_runs(probes: Probes, tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="no_such_function"):
        run_jobs([probes.module.probe("a"), Job("probe:no_such_function", {})], Store(tmp_path), silent())
    assert probes.runs() == []


def test_the_message_says_that_a_process_was_killed(probes: Probes, tmp_path: Path) -> None:
    victim = Job("probe:killed", {"name": "victim"}, "the large one", 1)
    first = probes.module.probe("first", expected=100)
    with pytest.raises(JobsFailed, match=r"killed, .* memory .* the large one") as failed:
        run_jobs([victim, first], Store(tmp_path), silent(), processes=1)
    assert "first" not in str(failed.value)
    assert first in Store(tmp_path)
    assert victim not in Store(tmp_path)


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_finished_and_the_same_command_goes_on(
    probes: Probes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["experiment", "probe", "--scale", "smoke", "--out", str(tmp_path / "runs")]
    monkeypatch.setenv("LUCID_PROBE_SLOW", "1")
    stopped = Command([*argv, "--processes", "2"], tmp_path)
    try:
        store, a = Store(tmp_path / "runs" / "jobs"), probes.module.plan(SMOKE, {})[0]
        assert until(lambda: "b" in probes.runs() and a in store), stopped.output()
        workers = stopped.others()
        os.killpg(stopped.process.pid, signal.SIGINT)  # type: ignore[arg-type]
        assert stopped.wait(20) == 130, stopped.output()
        assert until(lambda: not stopped.others(), 10)
    finally:
        stopped.end()
    assert workers
    assert "finished jobs stay, the same command continues from there" in stopped.output()
    assert "Traceback" not in stopped.output()
    assert sorted(probes.runs()) == ["a", "b"]
    assert not (tmp_path / "runs" / "probe-smoke").exists()

    # Without the delay in its arguments the stopped job is another job.
    monkeypatch.delenv("LUCID_PROBE_SLOW")
    again = Command([*argv, "--processes", "1"], tmp_path)
    try:
        assert again.wait() == 0, again.output()
    finally:
        again.end()
    assert sorted(probes.runs()) == ["a", "b", "b", "c", "d"]
    assert (tmp_path / "runs" / "probe-smoke" / "result.json").exists()
    assert "here:  14" in again.output()


@pytest.mark.slow
def test_workers_end_when_the_first_process_is_killed(
    probes: Probes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LUCID_PROBE_SLOW", "1")
    argv = ["experiment", "probe", "--scale", "smoke", "--out", str(tmp_path / "runs"), "--processes", "1"]
    killed = Command(argv, tmp_path)
    try:
        store, a = Store(tmp_path / "runs" / "jobs"), probes.module.plan(SMOKE, {})[0]
        assert until(lambda: "b" in probes.runs()), killed.output()
        assert killed.others()
        os.kill(killed.process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        assert until(lambda: not killed.others(), 10), "workers go on for ever"
    finally:
        killed.end()
    assert a in store
