# ruff: noqa: F811
"""What identifies a kept result: everything that changes samples, answers or scores makes another cell."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lucid_lab.evals import harness, results, runner
from lucid_lab.evals.benchmarks import haystacks
from lucid_lab.evals.cells import Options
from lucid_lab.evals.checkpoint import Checkpoint
from lucid_lab.evals.families import FAMILIES
from lucid_lab.evals.results import RecordWriter, ResultsFolder
from lucid_lab.evals.tokens import load_tokenizer

from .checkpoints import lucid
from .test_longqa import data as long_data  # noqa: F401
from .test_runner import complaint, generated

SMALL = Options(haystack="noise", lengths=(4096,), needles=(3,), samples=2)
# Another value of every option.
OTHER: dict[str, Any] = {
    "lengths": (4000,),
    "needles": (4,),
    "samples": 3,
    "seed": 1,
    "variants": ("single_2", "multiquery"),
    "haystack": "prose",
    "answer_tokens": 13,
    "qa": ("qa2",),
    "scoring": "lax",
    "babilong_hub": "RMT-team/babilong",
    "part": "all",
    "max_length": 3000,
    "questions": 7,
}
# A text file has no order that a seed could change; another text is tested below.
EXCEPT = {("perplexity", "seed"), ("context_loss", "seed")}
# Some cells of the family do not depend on the option.
PARTLY = {
    ("sniah", "haystack"),
    ("mniah", "haystack"),
    ("sniah", "variants"),
    ("mniah", "variants"),
    ("babilong", "qa"),
    ("longbench", "part"),
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Every test is a new process: nothing that was read before is remembered.

    But for the prose, which is made of the standard library and takes seconds to read: files of a test have new names.
    """
    caches = (harness.task_version, load_tokenizer, results.versions)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("The grass is green. The sky is blue. " * 4000)
    return file


def cells(folder: Path, family: str, options: Options, limit: int | None = None, dtype: str = "auto") -> set[str]:
    return {planned.name for planned in runner.plan(Checkpoint(folder), [family], options, limit, dtype)}


@pytest.mark.parametrize(
    ("family", "option"),
    [
        (name, option)
        for name, family in FAMILIES.items()
        for option in family.takes
        if option in OTHER and (name, option) not in EXCEPT
    ],
)
def test_another_value_of_an_option_makes_other_cells(
    family: str, option: str, lucid_folder: Path, text: Path, long_data: str
) -> None:
    base = replace(SMALL, text=str(text), data_dir=long_data)
    before, after = (cells(lucid_folder, family, replace(base, **other)) for other in ({}, {option: OTHER[option]}))
    assert before != after
    assert not before & after or (family, option) in PARTLY


def test_every_option_has_another_value_here() -> None:
    taken = {option for family in FAMILIES.values() for option in family.takes}
    assert taken - set(OTHER) == {"text", "data_dir"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_dtype_and_a_limit_make_other_cells(family: str, lucid_folder: Path, text: Path, long_data: str) -> None:
    base = replace(SMALL, text=str(text), data_dir=long_data)
    plain = cells(lucid_folder, family, base)
    assert plain == cells(lucid_folder, family, base)
    assert not plain & cells(lucid_folder, family, base, dtype="bfloat16")
    assert not plain & cells(lucid_folder, family, base, limit=1)


@pytest.mark.parametrize(
    ("family", "option"), [("mniah", "haystack"), ("babilong", "haystack"), ("perplexity", "text")]
)
def test_a_file_with_another_content_makes_other_cells(
    family: str, option: str, lucid_folder: Path, text: Path
) -> None:
    # Other variants have hay of their own.
    options = replace(SMALL, variants=("multikey_1",), **{option: str(text)})
    before = cells(lucid_folder, family, options)
    text.write_text("The sun is yellow. " + text.read_text())
    haystacks.read_prose.cache_clear()
    haystacks.prose_sha256.cache_clear()
    assert not before & cells(lucid_folder, family, options)


@pytest.mark.parametrize("family", ["longbench", "scrolls"])
def test_data_with_another_content_makes_other_cells(
    family: str, lucid_folder: Path, long_data: str, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(long_data, tmp_path / "data"))
    options = replace(SMALL, data_dir=str(copy))
    before = cells(lucid_folder, family, options)
    for file in copy.rglob("*.jsonl"):
        file.write_text(file.read_text() + "\n")
    assert not before & cells(lucid_folder, family, options)


@pytest.mark.parametrize(
    "change",
    [{"eos_token": "."}, {"padding_side": "left"}, {"clean_up_tokenization_spaces": True}],
    ids=lambda change: next(iter(change)),
)
def test_another_setting_of_the_tokenizer_makes_other_cells(
    change: dict[str, Any], lucid_folder: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(lucid_folder, tmp_path / "copy"))
    assert cells(copy, "mniah", SMALL) == cells(lucid_folder, "mniah", SMALL)
    file = copy / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    old = {name: settings.get(name) for name in change}
    assert old != change
    file.write_text(json.dumps(settings | change))
    load_tokenizer.cache_clear()
    assert not cells(copy, "mniah", SMALL) & cells(lucid_folder, "mniah", SMALL)


def test_another_harness_or_definition_of_a_task_makes_other_cells(
    lucid_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = cells(lucid_folder, "mniah", SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(harness, "version", lambda package: "99.0")
        harness.task_version.cache_clear()
        assert not plain & cells(lucid_folder, "mniah", SMALL)
    shutil.copytree(harness.TASK_FOLDER, tmp_path / "tasks")
    monkeypatch.setattr(harness, "TASK_FOLDER", tmp_path / "tasks")
    harness.task_version.cache_clear()
    assert cells(lucid_folder, "mniah", SMALL) == plain
    file = tmp_path / "tasks" / "needles" / "sniah.yaml"
    file.write_text(file.read_text() + "# edited\n")
    harness.task_version.cache_clear()
    assert not plain & cells(lucid_folder, "mniah", SMALL)


def test_unfinished_samples_of_another_release_are_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ResultsFolder(tmp_path, {"sha256": "0"})
    with RecordWriter(tmp_path / "samples" / "x.jsonl.0", folder.owner("x")) as writer:
        writer.write({"id": 0})
    assert folder.unfinished("x", 1) == {0: {"id": 0}}
    monkeypatch.setattr(results, "version", lambda package: "99.0")
    results.versions.cache_clear()
    assert folder.unfinished("x", 1) == {}


WORDS = (
    "--tasks",
    "mniah",
    "--variants",
    "multikey_1",
    "--lengths",
    320,
    "--haystack",
    "noise",
    "--answer-tokens",
    12,
    "--needles",
    2,
)


def test_another_dtype_in_the_same_folder_asks_again_and_keeps_both(
    lucid_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (lucid_folder, *WORDS, "--samples", 1, "--out", tmp_path / "out")
    sizes = generated(monkeypatch)
    assert lucid("eval", *words) == 0
    assert lucid("eval", *words, "--dtype", "bfloat16") == 0
    assert sizes == [1, 1]
    assert [cell["dtype"] for cell in ResultsFolder(tmp_path / "out").results()["cells"]] == ["auto", "bfloat16"]


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
def test_a_checkpoint_that_changed_in_its_place_is_refused(
    name: str, lucid_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy, out = Path(shutil.copytree(lucid_folder, tmp_path / "copy")), tmp_path / "out"
    folder = ResultsFolder(out, Checkpoint(copy).describe())
    folder.put({"name": "x", "family": "mniah", "labels": {}, "metric": "score", "mean": 0.0, "samples": 1})
    if name == "model.safetensors":
        content = bytearray((copy / name).read_bytes())
        content[-1] ^= 1
        (copy / name).write_bytes(content)
    else:
        settings = json.loads((copy / name).read_text())
        (copy / name).write_text(json.dumps(settings | {"temperature": 0.5}))
    assert "another checkpoint" in complaint(capsys, copy, *WORDS, "--out", out)
