"""The rehearsal: the commands of the full recipes, made small by one function, and run in the same order."""

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from lucid_lab.data.sources import DOLMA, open_source
from lucid_lab.training.recipe import Recipe

from lucid_lab import cli
from lucid_lab.claims.engine import full_recipe, rehearsal, stand_ins
from lucid_lab.claims.engine.rehearsal import rehearsed, shorter
from lucid_lab.claims.engine.scale import PAPER, REHEARSAL
from lucid_lab.claims.engine.steps import Step, check_steps, evaluate, tokenized, train, tune, unique
from lucid_lab.claims.engine.study import EXPERIMENTS, load

from .probing import Probes, probing


def recipe_of(step: Step) -> Recipe:
    recipe = step.recipe()
    assert recipe is not None
    return recipe


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_rehearsal_has_every_command_of_the_full_recipe_and_no_other(name: str) -> None:
    full, small = full_recipe.steps_of(name, PAPER), full_recipe.steps_of(name, REHEARSAL)
    assert full == load(name).paper() == unique(full)
    assert small == [rehearsed(step) for step in full]
    for step, twin in zip(full, small, strict=True):
        assert (twin.words[0], twin.writes(), twin.reads()) == (step.words[0], step.writes(), step.reads())
        assert twin.processes == min(2, step.processes)
        assert set(vars(step.arguments())) == set(vars(twin.arguments()))
    check_steps(full)
    check_steps(small)


def test_all_experiments_together_are_a_recipe() -> None:
    steps = unique(step for name in EXPERIMENTS for step in load(name).paper())
    check_steps(steps)
    assert len({step.writes() for step in steps if step.words[0] != "experiment"}) == len(
        [step for step in steps if step.words[0] != "experiment"]
    )


def test_nothing_of_a_rehearsal_comes_from_the_network() -> None:
    steps = [step for name in EXPERIMENTS for step in full_recipe.steps_of(name, REHEARSAL)]
    words = [word for step in steps for word in step.words]
    assert not [word for word in words if "://" in word or "hf:" in word or "RMT-team" in word or word == "essays"]
    for step in steps:
        if step.words[0] == "make-data":
            arguments = step.arguments()
            assert arguments.kind == "needles" or arguments.data_dir or arguments.babilong_hub
        if step.words[0] == "eval" and {"longbench", "scrolls"} & set(step.arguments().tasks):
            assert step.arguments().data_dir == stand_ins.LONGQA


def test_lengths_stay_different_and_in_order() -> None:
    lengths = [0, 64, 1024, *(1024 * thousands for thousands in (2, 4, 6, 8, 16, 32, 64, 128))]
    small = [shorter(length) for length in lengths]
    assert small == sorted(set(small))
    assert small[:3] == lengths[:3]
    assert small[-1] < 4096
    assert [rehearsal.SIZES[length] for length in small[3:]] == lengths[3:]


def test_a_training_is_shrunk_and_keeps_its_kind() -> None:
    step = train("pretrain_2k", "lucid_path", "--set", "attention_options={}")
    full, small = recipe_of(step), recipe_of(rehearsed(step))
    assert (small.steps, small.batch_size, small.sequence_length) == (2, 2, shorter(2048))
    kept = ("preset", "attention", "attention_options", "data", "separate_documents", "gradient_checkpointing", "beta2")
    assert all(getattr(small, name) == getattr(full, name) for name in kept)
    assert small.model["head_dim"] == 68
    tuned = recipe_of(rehearsed(tune("finetune_64k", "runs/paper/pretrain_2k-lucid/model", "runs/x")))
    assert (tuned.model, tuned.rope_theta, tuned.sequence_length) == ({}, 64_000.0, shorter(65_536))
    gemma = recipe_of(rehearsed(train("pretrain_2k", "lucid", "--set", "preset=gemma3_1b")))
    assert gemma.model["num_hidden_layers"] == 6


def test_options_are_read_in_both_spellings() -> None:
    for words in (("--lengths=2048,65536", "--samples=500"), ("--lengths", "2048,65536", "--samples", "500")):
        small = rehearsed(evaluate("runs/x/model", "mniah", "results/x", *words)).arguments()
        assert (small.lengths, small.samples, small.answer_tokens) == ((1040, 2032), 1, 4)
    analyzed = rehearsed(Step(("analyze", "runs/x/model", "--samples", "data/x.jsonl", "--limit", "50")))
    assert (analyzed.arguments().samples, analyzed.arguments().limit) == ("data/x.jsonl", 1)
    assert rehearsed(tokenized()).words[1] == f"@{stand_ins.DOLMA_LIST}"
    assert tokenized().words[1] == DOLMA


def test_the_stand_in_has_the_layout_of_dolma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_ins, "FILE_CHARACTERS", 40_000)
    stand_ins.make_stand_ins(tmp_path)
    listing = tmp_path / stand_ins.DOLMA_LIST
    names = listing.read_text().split()
    assert len(names) == 2 * stand_ins.FILES
    for name in names:
        rows = [json.loads(line) for line in gzip.decompress((listing.parent / name).read_bytes()).splitlines()]
        assert all({"id", "text", "source"} <= set(row) for row in rows)
    source = open_source(f"@{listing}")
    texts = [document.text for part in source.parts(1 << 20) for document in source.documents(part)]
    assert max(map(len, texts)) > 20_000
    before = listing.stat().st_mtime_ns
    stand_ins.make_stand_ins(tmp_path)
    assert listing.stat().st_mtime_ns == before


@pytest.fixture
def probes(tmp_path: Path) -> Iterator[Probes]:
    with probing(tmp_path / "probes") as found:
        yield found


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Steps write an empty file instead of running. The names of what they write."""
    names: list[str] = []

    def write(step: Step, folder: Path) -> int:
        names.append(step.writes())
        (folder / step.writes()).parent.mkdir(parents=True, exist_ok=True)
        (folder / step.writes()).touch()
        return 5 if step.writes().endswith("fails") else 0

    monkeypatch.setattr(full_recipe, "run_warm", write)
    monkeypatch.setattr(Step, "run", lambda step: write(step, Path()))
    monkeypatch.setattr(full_recipe, "make_stand_ins", lambda root: None)
    return names


def rehearse(out: Path, *more: str) -> int:
    return cli.main(["experiment", "probe", "--scale", "rehearsal", "--out", str(out), *more])


def test_a_rehearsal_goes_on_where_it_stopped(
    probes: Probes, ran: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [tokenized(), train("pretrain_2k", "lucid", out="runs/fails"), tokenized("data/more")]
    monkeypatch.setattr(probes.module, "paper", lambda: steps)
    assert rehearse(tmp_path) == 5
    assert ran == ["data/dolma", "runs/fails"]
    captured = capsys.readouterr()
    assert "step 2 of 3 ended with 5: torchrun" in captured.err
    assert "2/3, 0:0" in captured.out
    ran.clear()
    steps[1] = replace(steps[1], words=tuple("runs/works" if word == "runs/fails" else word for word in steps[1].words))
    assert rehearse(tmp_path) == 0
    assert ran == ["runs/works", "data/more"]
    ran.clear()
    assert rehearse(tmp_path) == 0
    assert ran == []
    assert rehearse(tmp_path, "--restart") == 0
    assert ran == ["data/dolma", "runs/works", "data/more"]
    result = json.loads((tmp_path / "probe-rehearsal" / "result.json").read_text())
    assert (result["scale"], result["verdict"]) == ("rehearsal", "incomplete")


def test_an_edit_of_the_code_or_a_lost_result_runs_again(
    probes: Probes, ran: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes.module, "paper", lambda: [tokenized(), tokenized("data/more")])
    assert rehearse(tmp_path) == 0
    ran.clear()
    (tmp_path / full_recipe.WORK / "data" / "more").unlink()
    assert rehearse(tmp_path) == 0
    assert ran == ["data/more"]
    ran.clear()
    monkeypatch.setattr(full_recipe, "_code", lambda: "edited")
    assert rehearse(tmp_path) == 0
    assert ran == ["data/dolma", "data/more"]


def test_the_full_recipe_keeps_data_that_is_there(
    probes: Probes, ran: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [tokenized(), Step(("make-data", "qasper", "data/qasper.jsonl"))]
    monkeypatch.setattr(probes.module, "paper", lambda: steps)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["experiment", "probe", "--scale", "paper"]) == 0
    assert ran == ["data/dolma", "data/qasper.jsonl"]
    ran.clear()
    assert cli.main(["experiment", "probe", "--scale", "paper"]) == 0
    # `lucid tokenize` knows itself that it is finished.
    assert ran == ["data/dolma"]


def test_a_rehearsal_takes_no_processes(probes: Probes, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["experiment", "probe", "--scale", "rehearsal", "--processes", "2"]) == 1
    assert "--scale rehearsal takes no --processes" in capsys.readouterr().err


@pytest.mark.slow
def test_one_experiment_from_tokens_to_its_verdict(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["experiment", "condition_number", "--scale", "rehearsal", "--out", str(tmp_path)]
    assert cli.main(words) == 0
    shown = capfd.readouterr().out
    assert "5/5, " in shown
    assert "TOO SMALL TO JUDGE" in shown
    result = json.loads((tmp_path / "condition_number-rehearsal" / "result.json").read_text())
    numbers = next(table for table in result["tables"] if table["title"] == "The paper's numbers and ours")
    assert len(numbers["rows"]) == 6
    assert all(row[3] for row in numbers["rows"])
    run = json.loads((tmp_path / "rehearsal/runs/paper/finetune_64k-lucid/summary.json").read_text())
    assert run["steps"] == 2
    assert cli.main(words) == 0
    assert "5/5, " not in capfd.readouterr().out
