"""`lucid eval`: the files that it writes, the samples that it does not repeat, and the commands that it refuses."""

import json
import math
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lucid_lab.evals import harness, runner
from lucid_lab.evals.cells import Cell, Options, arguments
from lucid_lab.evals.checkpoint import Checkpoint
from lucid_lab.evals.families import FAMILIES
from lucid_lab.evals.results import RecordWriter, ResultsFolder, read_records, read_sealed, summarize

from .checkpoints import forked, lucid, write_checkpoint, write_tokenizer

SMALL = (
    "--tasks",
    "mniah",
    "--variants",
    "multikey_1",
    "--lengths",
    "320,400",
    "--haystack",
    "noise",
    "--answer-tokens",
    12,
)
GRID = (*SMALL, "--needles", "2,3", "--samples", 5)


@pytest.fixture(scope="module")
def whole(lucid_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of an evaluation that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole") / "results"
    assert lucid("eval", lucid_folder, *GRID, "--batch-size", 2, "--out", out) == 0
    return out


def contents(out: Path) -> dict[str, str]:
    """The content of every file but the picture, by its path."""
    return {str(file.relative_to(out)): file.read_text() for file in sorted(out.rglob("*.json*"))}


def test_results_hold_checkpoint_cells_and_samples(whole: Path, lucid_folder: Path) -> None:
    results = json.loads((whole / "results.json").read_text())
    assert results["checkpoint"]["sha256"] == Checkpoint(lucid_folder).sha256
    assert results["checkpoint"]["attention"] == "lucid"
    assert [cell["labels"] for cell in results["cells"]] == [
        {"task": "multikey_1", "needles": needles, "length": length} for needles in (2, 3) for length in (320, 400)
    ]
    for cell in results["cells"]:
        assert set(cell["versions"]) == {"lucid-attention", "transformers", "torch", "lm_eval"}
        assert cell["metadata"]["settings"]["seed"] == 0
        assert cell["metadata"]["settings"]["haystack"] == "noise"
        assert cell["samples"] == 5
        records = read_records(whole / "samples" / f"{cell['name']}.jsonl")
        assert [record["id"] for record in records] == list(range(5))
        scores = [record["score"] for record in records]
        assert cell["mean"] == sum(scores) / 5
        assert all(isinstance(record["output"], str) and record["target"] for record in records)
        for record in records:
            assert len(record["needles"]) == cell["labels"]["needles"]
            assert len(record["answer_spans"]) == 1
    assert (whole / "mniah.png").read_bytes().startswith(b"\x89PNG")


def test_the_standard_error_is_that_of_the_mean() -> None:
    cell = Cell({}, "score")
    summary = summarize("x", {}, cell, [{"score": score} for score in (0.0, 1.0, 1.0, 0.0, 1.0)])
    assert summary["mean"] == pytest.approx(0.6)
    assert summary["standard_error"] == pytest.approx(math.sqrt(0.3 / 5))
    assert summarize("x", {}, cell, [{"score": 1.0}])["standard_error"] is None


def test_the_table_has_a_grid_of_needles_and_lengths(
    whole: Path, lucid_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lucid("eval", lucid_folder, *GRID, "--out", whole) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mniah: score, % ± standard error, 5 samples a cell"
    assert lines[2].split()[:3] == ["multikey_1", "2", "320"]
    start = lines.index("mniah, mean over task multikey_1: score, % ± standard error")
    assert lines[start + 1].split() == ["needles", "length", "320", "length", "400"]
    assert [line.split()[0] for line in lines[start + 2 : start + 5]] == ["2", "3", "mean"]
    assert "0.0 ± 0.0" in lines[start + 2]


def test_finished_cells_are_not_evaluated_again(
    whole: Path, lucid_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("the model was loaded")

    before = contents(whole)
    monkeypatch.setattr(Checkpoint, "load", load)
    assert lucid("eval", lucid_folder, *GRID, "--out", whole) == 0
    assert contents(whole) == before


def test_new_cells_join_the_results(whole: Path, lucid_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "results"
    assert lucid("eval", lucid_folder, *SMALL, "--needles", 3, "--samples", 5, "--out", out) == 0
    assert lucid("eval", lucid_folder, *GRID, "--out", out) == 0
    assert contents(out).keys() == contents(whole).keys()
    names = [sorted(cell["name"] for cell in ResultsFolder(folder).results()["cells"]) for folder in (out, whole)]
    assert names[0] == names[1]


def test_a_limit_takes_the_first_samples(whole: Path, lucid_folder: Path, tmp_path: Path) -> None:
    assert lucid("eval", lucid_folder, *GRID, "--limit", 2, "--out", tmp_path) == 0
    limited = [read_records(file) for file in sorted((tmp_path / "samples").iterdir())]
    first = [read_records(file)[:2] for file in sorted((whole / "samples").iterdir())]
    assert limited == first


def dies_after(batches: int) -> Callable[[], None]:
    """A patch that kills the process after some batches, as if the machine went down."""

    def patch() -> None:
        generate = harness.HarnessModel._model_generate
        left = [batches]

        def dying(self: Any, *args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return generate(self, *args, **kwargs)

        harness.HarnessModel._model_generate = dying  # type: ignore[method-assign]

    return patch


def generated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all batches that are answered from now on."""
    sizes: list[int] = []
    generate = harness.HarnessModel._model_generate

    def counted(self: Any, context: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append(len(context))
        return generate(self, context, *args, **kwargs)

    monkeypatch.setattr(harness.HarnessModel, "_model_generate", counted)
    return sizes


def test_after_a_kill_only_missing_samples_are_asked(
    whole: Path, lucid_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "results"
    words = (lucid_folder, *GRID, "--out", out)
    # It is killed after one cell and three samples of the next.
    assert forked(words, before=dies_after(8)) == [-signal.SIGKILL]
    partial = list((out / "samples").glob("*.jsonl.0"))
    assert len(partial) == 1
    assert len(read_records(partial[0])) == 3
    # Tear the last line.
    partial[0].write_bytes(partial[0].read_bytes()[:-7])
    sizes = generated(monkeypatch)
    assert lucid("eval", *words) == 0
    assert sum(sizes) == 20 - 5 - 2
    assert contents(out) == contents(whole)


def test_two_processes_give_what_one_gives(whole: Path, lucid_folder: Path, tmp_path: Path) -> None:
    assert forked((lucid_folder, *GRID, "--batch-size", 2, "--out", tmp_path / "two"), processes=2) == [0, 0]
    assert contents(tmp_path / "two") == contents(whole)


def test_one_process_goes_on_where_two_were_killed(
    whole: Path, lucid_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "results"
    words = (lucid_folder, *GRID, "--out", out)
    assert -signal.SIGKILL in forked(words, processes=2, before=dies_after(2))
    written = sum(len(read_records(file)) for file in (out / "samples").glob("*.jsonl*"))
    assert written >= 2
    sizes = generated(monkeypatch)
    assert lucid("eval", *words) == 0
    assert sum(sizes) == 20 - written
    assert contents(out) == contents(whole)


def test_a_torn_record_is_cut_before_others_follow(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    with RecordWriter(file, "mine") as writer:
        writer.write({"id": 0})
        writer.write({"id": 1})
    file.write_bytes(file.read_bytes()[:-3])
    with RecordWriter(file, "mine") as writer:
        writer.write({"id": 2})
    assert read_sealed(file, "mine") == [{"id": 0}, {"id": 2}]


def test_the_hash_is_of_the_weights_and_the_configuration(lucid_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in lucid_folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert Checkpoint(copy).sha256 == Checkpoint(lucid_folder).sha256
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert Checkpoint(copy).sha256 != Checkpoint(lucid_folder).sha256


def test_a_model_of_a_run_is_named_for_the_run(lucid_folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "tiny_lm-lucid-0" / "model"
    model.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (model / name).write_bytes((lucid_folder / name).read_bytes())
    assert Checkpoint(model).name == "tiny_lm-lucid-0"
    assert Checkpoint(lucid_folder).name == lucid_folder.name


def test_list_has_a_line_for_every_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert lucid("eval", "--tasks", "list") == 0
    out = capsys.readouterr().out
    for name, family in FAMILIES.items():
        assert re.search(rf"^{name} +{re.escape(family.about)}$", out, re.MULTILINE)
        assert "\n" not in family.about


def test_every_option_of_a_family_is_one_of_the_command_line() -> None:
    known = {name for name, *_ in arguments()}
    assert all(set(family.takes) <= known for family in FAMILIES.values())
    assert known <= {name for family in FAMILIES.values() for name in family.takes}


def complaint(capsys: pytest.CaptureFixture[str], *words: object, command: str = "eval") -> str:
    """The error message of a command that is refused: one line on stderr, with exit code 1."""
    assert lucid(command, *words) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith(f"lucid {command}: error: ")
    return captured.err


WRONG: dict[str, tuple[tuple[object, ...], str]] = {
    "an unknown task": (("--tasks", "mnaih"), "no task 'mnaih' (did you mean 'mniah'?)"),
    "no task": ((), "--tasks list shows all"),
    "sizes that cannot fit": (
        ("--tasks", "mniah", "--needles", "99", "--lengths", "512", "--haystack", "noise"),
        "99 needles",
    ),
    "a length that is too long": (
        ("--tasks", "sniah", "--lengths", "999999"),
        "--lengths must be at most 131072, got 999999",
    ),
    "samples without end": (("--tasks", "mniah", "--samples", "1000000000"), "--samples must be at most 100000, got 1"),
    "samples beyond memory": (
        ("--tasks", "mniah", "--samples", "100000", "--lengths", "131072"),
        "must have at most 1073741824 tokens together",
    ),
    "tokens without end": (("--tasks", "recall", "--lengths", "99999999999"), "at most 131072, got 99999999999"),
    "needles without end": (("--tasks", "mniah", "--needles", "99999999999"), "--needles must be at most 131072"),
    "needles beyond the length": (
        ("--tasks", "mniah", "--variants", "multivalue", "--needles", "9999", "--lengths", "512"),
        "9999 needles must fit into --lengths 512",
    ),
    "an option of another task": (("--tasks", "sniah", "--needles", "2"), "and not --needles"),
    "no batch": (("--tasks", "mniah", "--batch-size", "0"), "--batch-size must be at least 1, got 0"),
    "no sample": (("--tasks", "mniah", "--limit", "0"), "--limit must be at least 1, got 0"),
    "a foreign vocabulary": (("--tasks", "recall", "--samples", "2"), "must have the vocabulary of Needles"),
    "a haystack that is none": (("--tasks", "mniah", "--haystack", "nowhere"), "got 'nowhere', which is none"),
}


@pytest.mark.parametrize(("words", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_command_is_one_message(
    words: tuple[object, ...], message: str, lucid_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The vocabulary is checked after a progress bar was drawn: stderr has more than one line.
    if "recall" in words:
        assert lucid("eval", lucid_folder, *words, "--out", tmp_path / "out") == 1
        assert message in capsys.readouterr().err
    else:
        assert message in complaint(capsys, lucid_folder, *words, "--out", tmp_path / "out")


def test_a_checkpoint_that_is_not_there_is_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "hf download" in complaint(capsys, tmp_path / "nowhere", "--tasks", "mniah")
    assert "config.json" in complaint(capsys, tmp_path, "--tasks", "mniah")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert "Did you mean" in complaint(capsys, tmp_path, "--tasks", "mniah")
    assert "weights" in complaint(capsys, tmp_path / "model", "--tasks", "mniah")


def test_a_tokenizer_can_be_given_to_a_checkpoint_without_one(
    lucid_folder: Path, tokenizer_folder: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((lucid_folder / name).read_bytes())
    words = (bare, *GRID, "--out", tmp_path / "out")
    assert "has no tokenizer" in complaint(capsys, *words)
    assert "--tokenizer" in complaint(capsys, *words, "--tokenizer", tmp_path)
    assert lucid("eval", *words, "--tokenizer", tokenizer_folder) == 0
    # The same tokenizer in another folder makes the same samples with the same names.
    there, elsewhere = (
        {file.name: file.read_text() for file in (out / "samples").iterdir()} for out in (tmp_path / "out", whole)
    )
    assert there == elsewhere


def test_results_of_another_checkpoint_are_not_mixed_in(
    whole: Path, llama_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "another checkpoint" in complaint(capsys, llama_folder, *GRID, "--out", whole)


def test_another_tokenizer_makes_other_cells(lucid_folder: Path, tmp_path: Path, whole: Path) -> None:
    other = write_tokenizer(tmp_path / "tokenizer", [], 300)
    checkpoint = write_checkpoint(tmp_path / "model", other)
    names = {cell["name"] for cell in ResultsFolder(whole).results()["cells"]}
    cells = runner.plan(Checkpoint(checkpoint), ["mniah"], Options(haystack="noise"), None, "auto")
    same = runner.plan(Checkpoint(lucid_folder), ["mniah"], Options(haystack="noise"), None, "auto")
    assert not {cell.name for cell in cells} & {cell.name for cell in same}
    assert not {cell.name for cell in cells} & names
