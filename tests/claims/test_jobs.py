"""Jobs are known by what they compute; their records are there as a whole or not at all."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lucid_lab import fingerprint
from lucid_lab.claims.engine import jobs
from lucid_lab.claims.engine.jobs import Job, Store, Work

ONE = Job("engine.timing:operator_cost", {"a": 1, "b": [2, 3], "c": {"x": 1, "y": 2}})
SAME = {
    "order of arguments": Job("engine.timing:operator_cost", {"c": {"y": 2, "x": 1}, "b": [2, 3], "a": 1}),
    "tuple for a list": Job("engine.timing:operator_cost", {"a": 1, "b": (2, 3), "c": {"x": 1, "y": 2}}),
    "label, time, alone": Job("engine.timing:operator_cost", ONE.arguments, "a name", 99.0, alone=True),
}
OTHERS = {
    "value": Job("engine.timing:operator_cost", {"a": 2, "b": [2, 3], "c": {"x": 1, "y": 2}}),
    "inner value": Job("engine.timing:operator_cost", {"a": 1, "b": [2, 3], "c": {"x": 1, "y": 3}}),
    "order of a list": Job("engine.timing:operator_cost", {"a": 1, "b": [3, 2], "c": {"x": 1, "y": 2}}),
    "one argument more": Job("engine.timing:operator_cost", {**ONE.arguments, "d": None}),
    "function": Job("engine.timing:run_case", ONE.arguments),
    "module": Job("engine.timings:operator_cost", ONE.arguments),
}


@pytest.mark.parametrize("same", SAME)
def test_equal_work_is_the_same_job(same: str) -> None:
    assert SAME[same].key == ONE.key
    assert SAME[same] == ONE
    assert len({SAME[same], ONE}) == 1


@pytest.mark.parametrize("other", OTHERS)
def test_other_work_is_another_job(other: str) -> None:
    assert OTHERS[other].key != ONE.key
    assert OTHERS[other] != ONE


@pytest.mark.parametrize(("edited", "again"), [("ops.lucid.blockwise", True), ("report.page", False)])
def test_edited_code_does_again_the_work_that_depends_on_it(
    edited: str, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store(tmp_path).write(ONE, {"value": 1}, 0.0)
    assert list(Store(tmp_path)) == [ONE]
    source = fingerprint._source

    def after_the_edit(module: str) -> fingerprint.Source:
        same = source(module)
        return same._replace(digest=b"edited") if module == f"lucid_attention.{edited}" else same

    monkeypatch.setattr(fingerprint, "_source", after_the_edit)
    fingerprint.fingerprint.cache_clear()
    try:
        job, store = Job(ONE.function, ONE.arguments), Store(tmp_path)
        assert (job not in store) == again
        assert (job.key != ONE.key) == again
        assert len(store) == (0 if again else 1)
    finally:
        fingerprint.fingerprint.cache_clear()


def test_a_record_says_which_code_made_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write(ONE, {"value": 1}, 0.0)
    entry = store.entry(ONE)
    assert entry is not None
    assert entry["code"] == fingerprint.fingerprint("lucid_lab.claims.engine.timing")


def test_an_unknown_function_is_found_before_anything_runs() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        Job("no_such_module:f", {}).resolve()
    with pytest.raises(AttributeError, match="no_such_function"):
        Job("engine.timing:no_such_function", {}).resolve()


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs")
    assert ONE not in store
    assert len(store) == 0
    store.write(ONE, {"accuracy": 99.9, "curve": [1, None]}, 12.3456)
    for reader in (store, Store(tmp_path / "jobs")):
        assert ONE in reader
        assert reader[ONE] == {"accuracy": 99.9, "curve": [1, None]}
        assert reader[SAME["label, time, alone"]] == reader[ONE]
        assert list(reader) == [ONE]
        assert len(reader) == 1
        entry = reader.entry(ONE)
        assert entry is not None
        assert entry["seconds"] == 12.346
    assert OTHERS["value"] not in store


def test_a_record_that_another_process_writes_later_is_seen(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert ONE not in store
    Store(tmp_path).write(ONE, {"value": 1}, 0.0)
    assert store[ONE] == {"value": 1}


@pytest.mark.parametrize("cut", [0, 1, -1])
def test_a_half_written_record_is_no_record(cut: int, tmp_path: Path) -> None:
    Store(tmp_path).write(ONE, {"value": 1}, 0.0)
    path = Store(tmp_path).folder_of(ONE) / jobs.RECORD
    path.write_text(path.read_text()[:cut])
    store = Store(tmp_path)
    assert ONE not in store
    assert list(store) == []
    assert len(store) == 0
    with pytest.raises(KeyError, match="not finished"):
        store[ONE]
    store.write(ONE, {"value": 2}, 0.0)
    assert store[ONE] == {"value": 2}


def _without(entry: dict[str, Any], key: str) -> str:
    return json.dumps({name: value for name, value in entry.items() if name != key})


SHAPELESS: dict[str, Any] = {"job": [], "files": []}
DAMAGES: dict[str, Callable[[dict[str, Any]], str | bytes]] = {
    "list": lambda entry: "[]",
    "number": lambda entry: "1",
    "null": lambda entry: "null",
    "empty object": lambda entry: "{}",
    "deep": lambda entry: "[" * 100_000,
    "bytes": lambda entry: b"\xff\xfe\x00",
    "another value": lambda entry: json.dumps(entry | {"record": {"value": 2}}),
    "another time": lambda entry: json.dumps(entry | {"seconds": 99}),
    "no record": lambda entry: _without(entry, "record"),
    "another shape": lambda entry: json.dumps(SHAPELESS | {"sha256": jobs._hash(SHAPELESS)}),
    "no hash": lambda entry: _without(entry, "sha256"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_no_record_and_is_named(damage: str, tmp_path: Path) -> None:
    Store(tmp_path).write(ONE, {"value": 1}, 0.0)
    path = Store(tmp_path).folder_of(ONE) / jobs.RECORD
    content = DAMAGES[damage](json.loads(path.read_text()))
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    store = Store(tmp_path)
    assert ONE not in store
    assert list(store) == []
    assert store.damaged[ONE].startswith(f"{path} cannot be used: ")
    store.write(ONE, {"value": 1}, 0.0)
    assert ONE in store
    assert store.damaged == {}


def test_the_record_of_another_job_is_no_record(tmp_path: Path) -> None:
    store, other = Store(tmp_path), OTHERS["value"]
    store.write(ONE, {"value": 1}, 0.0)
    store.folder_of(ONE).rename(store.folder_of(other))
    assert other not in store
    assert "of another job" in store.damaged[other]


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_job_whose_files_are_damaged_is_not_finished(damage: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    weights = Work(store, ONE).folder / "model" / "weights.bin"
    weights.parent.mkdir()
    weights.write_bytes(b"12345")
    store.write(ONE, {"value": 1}, 0.0)
    assert ONE in Store(tmp_path)
    if damage == "changed":
        weights.write_bytes(b"12346")
    else:
        weights.unlink()
    store = Store(tmp_path)
    assert ONE not in store
    assert "model/weights.bin beside it" in store.damaged[ONE]
    assert damage in store.damaged[ONE]


def test_what_killed_jobs_were_writing_is_swept_and_nothing_else(tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs")
    folder = Work(store, ONE).folder
    left = [folder / ".tmpAbC123", folder / "model" / ".tmpX", folder / "record.json.partial", folder / "run.partial"]
    kept = [folder / "weights.safetensors", folder / "run" / "checkpoint-5" / "model.bin", tmp_path / "mine.partial"]
    left[3].mkdir()
    for path in [*left[:3], left[3] / "model.bin", *kept]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    store.sweep()
    assert not [path for path in left if path.exists()]
    assert all(path.exists() for path in kept)
    Store(tmp_path / "nothing").sweep()


def test_what_was_being_written_when_the_power_went_is_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    store = Store(tmp_path)
    monkeypatch.setattr(Path, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        store.write(ONE, {"value": 1}, 0.0)
    assert ONE not in store
    assert len(store) == 0


def test_a_record_that_json_cannot_write_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(ValueError, match="not JSON compliant"):
        store.write(ONE, {"loss": float("nan")}, 0.0)
    assert ONE not in store


def test_a_forgotten_job_is_not_finished(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write(ONE, {"value": 1}, 0.0)
    assert ONE in store
    store.forget(ONE)
    assert ONE not in store
    assert ONE not in Store(tmp_path)
    store.forget(ONE)


def test_a_job_reads_what_earlier_ones_left_and_only_that(tmp_path: Path) -> None:
    store, earlier = Store(tmp_path), OTHERS["value"]
    work = Work(store, ONE)
    assert work.folder.is_dir()
    assert work.folder.parent == tmp_path
    for ask in (work.record_of, work.folder_of):
        with pytest.raises(KeyError, match=r"the earlier one is not finished in .*"):
            ask(Job(earlier.function, earlier.arguments, "the earlier one"))
    store.write(earlier, {"value": 7}, 0.0)
    assert work.record_of(earlier) == {"value": 7}
    assert json.loads((work.folder_of(earlier) / jobs.RECORD).read_text())["record"] == {"value": 7}
    assert work.folder_of(earlier) != work.folder
