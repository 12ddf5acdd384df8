"""`lucid eval` and `lucid compare`: scores, kept answers, files, refusals."""

import json
import multiprocessing
import os
import re
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM

from lucid_attention import enable_lucid
from lucid_lab.evals import evaluate as evaluation
from lucid_lab.evals.evaluate import FAMILIES, TASK_FOLDER, EvaluatedModel, identity, make_tasks, paired_difference
from lucid_lab.evals.needles import MULTIPLE
from lucid_lab.evals.tokens import load_tokenizer

from .checkpoints import lucid, write_checkpoint
from .stub_models import Mute, PromptReader, ask, leaves

NEEDLES = ("--tasks", "mniah", "--variants", "multikey_1", "--haystack", "noise", "--answer-tokens", 4)
SMALL = (*NEEDLES, "--needles", 2, "--lengths", 300, "--samples", 3)


@pytest.fixture(scope="module")
def ruler_tasks(tokenizer_folder: Path) -> list[Any]:
    return [
        *leaves("sniah", tokenizer_folder, samples=3, lengths=(1024,)),
        *leaves("mniah", tokenizer_folder, samples=3, lengths=(2048,), needles=(1, 4), variants=tuple(MULTIPLE)),
    ]


def test_a_perfect_model_scores_1_and_a_mute_one_0(ruler_tasks: list[Any]) -> None:
    for task in ruler_tasks:
        assert [sample["score"] for sample in ask(task, PromptReader())] == [1.0] * 3, task.task_name
        assert [sample["score"] for sample in ask(task, Mute())] == [0.0] * 3, task.task_name


def test_prompts_and_answers_have_the_length_of_their_task(ruler_tasks: list[Any], tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(str(tokenizer_folder))
    for task in ruler_tasks:
        for sample in ask(task, Mute()):
            ((prompt, settings),) = sample["arguments"]
            ids = tokenizer(prompt)["input_ids"]
            assert len(ids) == sample["doc"]["tokens"]
            assert len(ids) + settings["max_gen_toks"] <= int(task.task_name.rsplit("-", 1)[1]), task.task_name
            for needle in sample["doc"].get("needles", []):
                assert tokenizer.decode(ids[slice(*needle["span"])]).strip() == needle["text"]


@pytest.mark.parametrize("kind", ["lucid", "llama", "dropin"])
def test_batches_and_padding_do_not_change_an_answer(
    kind: str, lucid_folder: Path, llama_folder: Path, tokenizer_folder: Path
) -> None:
    enable_lucid()
    model = AutoModelForCausalLM.from_pretrained(lucid_folder if kind == "lucid" else llama_folder)
    if kind == "dropin":
        enable_lucid(model)
    how: dict[str, Any] = {"samples": 5, "lengths": (320,), "needles": (2,), "answer_tokens": 12}
    (task,) = leaves("mniah", tokenizer_folder, variants=("multikey_2",), **how)
    tokenizer, outputs = load_tokenizer(str(tokenizer_folder)), []
    for batch_size, side in ((1, "left"), (3, "left"), (5, "right")):
        tokenizer.padding_side = side
        outputs.append([sample["resps"] for sample in ask(task, EvaluatedModel(model, tokenizer, batch_size))])
    assert outputs[0] == outputs[1] == outputs[2]
    assert len({str(output) for output in outputs[0]}) == 5
    # Without prompts of several lengths, nothing would have been padded.
    assert len({doc["tokens"] for doc in task.eval_docs}) > 1


def test_settings_of_generation_in_a_checkpoint_do_not_change_its_answers(
    llama_folder: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(llama_folder, tmp_path / "copy")
    settings = {"max_new_tokens": 2, "repetition_penalty": 9.0, "num_beams": 3, "no_repeat_ngram_size": 1}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    (task,) = leaves("sniah", tokenizer_folder, samples=2, lengths=(400,), variants=("single_1",))
    tokenizer = load_tokenizer(str(tokenizer_folder))
    plain, changed = (
        [
            sample["resps"]
            for sample in ask(task, EvaluatedModel(AutoModelForCausalLM.from_pretrained(path), tokenizer, 1))
        ]
        for path in (llama_folder, folder)
    )
    assert changed == plain


def test_users_of_lm_eval_get_the_same_samples_and_scores(llama_folder: Path) -> None:
    metadata = {"pretrained": str(llama_folder), "length": 600, "needles": 2, "samples": 2, "haystack": "noise"}
    manager = TaskManager(include_path=TASK_FOLDER, include_defaults=False, metadata=metadata)
    bases = {family.task.format(name=name) for family in FAMILIES.values() for name in family.axes.get("name", ("",))}
    assert set(manager.all_tasks) == bases
    stock = manager.load(["lucid_mniah"])["tasks"]["lucid_mniah"]
    options = {"lengths": (600,), "needles": (2,), "samples": 2, "haystack": "noise", "variants": ("multikey_1",)}
    (ours,) = leaves("mniah", llama_folder, **options)
    model = HFLM(pretrained=str(llama_folder), device="cpu")
    assert ours.eval_docs.to_list() == stock.eval_docs.to_list()
    for scored in (ask(stock, model), ask(ours, model)):
        assert [sample["score"] for sample in scored] == [0, 0]


def test_means_are_over_variants_and_over_all(llama_folder: Path) -> None:
    (group,) = make_tasks(
        ["mniah"],
        {"lengths": (600,), "needles": (1, 2), "samples": 1, "haystack": "noise", "variants": tuple(MULTIPLE)},
        str(llama_folder),
    )
    assert group.child_names == ["mniah-needles_1-600", "mniah-needles_2-600"]
    assert [len(child) for child in group] == [5, 5]
    (flat,) = make_tasks(["babilong"], {"lengths": (0,), "samples": 1}, str(llama_folder))
    assert len(flat.child_names) == 5
    assert evaluation._cell_name("../x", {"a": "../../etc"}) == "_x-_etc"


def generated(monkeypatch: pytest.MonkeyPatch, stop_after: int | None = None) -> list[str]:
    """The prompts that a model is asked from now on. stop_after: Ctrl-C comes after so many answers."""
    asked: list[str] = []
    plain = EvaluatedModel._model_generate

    def generate(self: Any, context: Any, **how: Any) -> Any:
        if len(asked) == stop_after:
            raise KeyboardInterrupt
        asked.extend(self.tokenizer.batch_decode(context))
        return plain(self, context, **how)

    monkeypatch.setattr(EvaluatedModel, "_model_generate", generate)
    return asked


def test_an_interrupted_evaluation_resumes_and_a_finished_one_asks_nothing(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        generated(patch, stop_after=2)
        assert lucid("eval", llama_folder, *SMALL, "--out", out) == 130
    assert not (out / "results.json").exists()
    assert "the same command continues" in capsys.readouterr().err
    asked = generated(monkeypatch)
    assert lucid("eval", llama_folder, *SMALL, "--out", out) == 0
    assert len(asked) == 1
    table = capsys.readouterr().out
    assert re.search(r"\|\s*Tasks\s*\|Version\|Filter\|n-shot\|Metric\|", table)
    assert "|mniah-multikey_1-needles_2-300|" in table
    first = (out / "results.json").read_text()
    assert lucid("eval", llama_folder, *SMALL, "--out", out) == 0
    assert len(asked) == 1
    assert lucid("eval", llama_folder, *NEEDLES, "--needles", 1, "--lengths", 300, "--samples", 2, "--out", out) == 0
    assert len(asked) == 3
    results = json.loads((out / "results.json").read_text())
    # Results of both commands are in the folder.
    assert set(results["results"]) == {"mniah-multikey_1-needles_2-300", "mniah-multikey_1-needles_1-300"}
    assert json.loads(first)["results"].items() <= results["results"].items()
    assert results["checkpoint"]["attention"] == "sdpa"
    samples = [json.loads(line) for line in (out / "samples_mniah-multikey_1-needles_2-300.jsonl").open()]
    assert [sample["doc_id"] for sample in samples] == [0, 1, 2]
    assert all(len(sample["doc"]["answer_spans"]) == 1 for sample in samples)


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json", "tokenizer.json", "model.safetensors", "base"])
def test_any_change_of_a_checkpoint_makes_other_answers(name: str, llama_folder: Path, tmp_path: Path) -> None:
    folder, base = (shutil.copytree(llama_folder, tmp_path / part) for part in ("folder", "base"))
    (folder / "adapter_config.json").write_text(json.dumps({"lora_alpha": 8, "base_model_name_or_path": str(base)}))
    before = identity(folder)
    assert identity(folder) == before
    file = base / "config.json" if name == "base" else folder / name
    if name == "model.safetensors":
        os.utime(file, ns=(1, 1))
    else:
        file.write_text(file.read_text().replace("{", '{"lora_alpha_": 16,', 1))
    assert identity(folder) != before


def test_results_of_a_changed_checkpoint_are_not_mixed_with_earlier_ones(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = shutil.copytree(llama_folder, tmp_path / "model"), tmp_path / "out"
    monkeypatch.chdir(tmp_path)
    words = (*SMALL[:-1], 1)
    assert lucid("eval", folder, *words, "--out", out) == 0
    (folder / "adapter_notes.json").write_text("{}")
    assert lucid("eval", folder, *words, "--out", out) == 1
    assert "holds results of another checkpoint, or of this one before it changed" in capsys.readouterr().err
    asked = generated(monkeypatch)
    assert lucid("eval", folder, *words) == 0
    assert len(asked) == 1
    assert [path.name.rsplit("-", 1)[0] for path in (tmp_path / "results").iterdir()] == [tmp_path.name]


WRONG: dict[str, tuple[tuple[object, ...], str]] = {
    "no task": ((), "expected a CHECKPOINT and --tasks NAMES"),
    "unknown task": (("--tasks", "nniah"), "got 'nniah' (did you mean 'sniah'?)"),
    "option of another task": (("--tasks", "mniah", "--qa", "qa1"), "--variants, and not --qa"),
    "variant of another task": (("--tasks", "sniah", "--variants", "multikey_1"), "single_3 for sniah"),
    "no samples": ((*SMALL, "--samples", 0), "--samples must be 1 to"),
    "too many needles": ((*SMALL, "--needles", "2,200"), "200 needles with their question take"),
    "seed of training": ((*SMALL, "--seed", 1_000_003), "--seed must be 0 to 1000002"),
}


@pytest.mark.parametrize(("words", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_command_is_refused_before_the_model_is_loaded(
    words: tuple[object, ...],
    message: str,
    llama_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(evaluation, "load_model", lambda *_: pytest.fail("the model was loaded"))
    assert lucid("eval", llama_folder, *words, "--out", tmp_path / "out") == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_checkpoint_as_out_and_another_tokenizer_are_refused(
    llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lucid("eval", llama_folder, *SMALL, "--out", llama_folder) == 1
    assert "--out must be another folder than the checkpoint" in capsys.readouterr().err
    small = write_checkpoint(tmp_path / "small", llama_folder, "llama")
    model = AutoModelForCausalLM.from_pretrained(small)
    model.resize_token_embeddings(300)
    model.save_pretrained(small)
    assert lucid("eval", small, *SMALL, "--out", tmp_path / "out") == 1
    assert "the model knows 300 tokens, and the tokenizer has 900" in capsys.readouterr().err


def test_the_tasks_and_their_folder_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert lucid("eval", "--tasks", "list") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(FAMILIES)
    assert lucid("eval", "--task-path") == 0
    assert Path(capsys.readouterr().out.strip()) == TASK_FOLDER


def _worker(rank: int, port: int, words: tuple[object, ...]) -> None:
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}
    PartialState._reset_state()
    AcceleratorState._reset_state(True)
    os._exit(lucid("eval", *words))


@pytest.mark.slow
def test_two_processes_share_the_samples_and_give_the_scores_of_one(lucid_folder: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = (lucid_folder, *SMALL, "--out", tmp_path / "two")
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_worker, args=(rank, port, words)) for rank in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(100)
    assert [child.exitcode for child in children] == [0, 0]
    assert lucid("eval", lucid_folder, *SMALL, "--out", tmp_path / "one") == 0
    one, two = (
        sorted(
            (line["doc_id"], line["filtered_resps"], line["score"])
            for line in map(json.loads, (tmp_path / name / "samples_mniah-multikey_1-needles_2-300.jsonl").open())
        )
        for name in ("one", "two")
    )
    assert one == two
    assert len(list((tmp_path / "two").glob("answers-*.db"))) == 2


def test_a_comparison_is_paired(
    lucid_folder: Path, llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert paired_difference([1, 2, 3], [2, 4, 6]) == (2, pytest.approx(1 / 3**0.5))
    assert paired_difference([1], [2]) == (1, float("inf"))
    text = tmp_path / "text.txt"
    text.write_text("The grass is green. The sky is blue. " * 100)
    words = ("--tasks", "perplexity", "--text", text, "--lengths", 64, "--samples", 4, "--out", tmp_path / "results")
    assert lucid("compare", lucid_folder, llama_folder, *words) == 0
    table = capsys.readouterr().out
    folders = sorted((tmp_path / "results").iterdir(), key=lambda path: not path.name.startswith(lucid_folder.name))
    losses = []
    for folder in folders:
        samples = [json.loads(line) for line in (folder / "samples_perplexity-64.jsonl").open()]
        losses.append([sample["loss"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])])
    mean, error = paired_difference(*losses)
    assert f"{mean:+.4f} ± {error:.4f}" in table
    assert "perplexity-64  loss" in table
    # The results are compared without another evaluation, and only with the same samples.
    assert lucid("compare", *folders) == 0
    assert capsys.readouterr().out == table
    other = (*words[:-4], "--samples", 3, "--out", tmp_path / "other")
    assert lucid("eval", llama_folder, *other) == 0
    capsys.readouterr()
    assert lucid("compare", folders[0], tmp_path / "other") == 1
    assert "perplexity-64: the samples differ" in capsys.readouterr().err
    for wrong, message in {
        (lucid_folder, llama_folder): "to evaluate checkpoints, give --tasks",
        (*folders, "--lengths", 2): "are for checkpoints, and these folders hold results",
        (folders[0], tmp_path): "CHECKPOINT must hold a config.json",
    }.items():
        assert lucid("compare", *wrong) == 1
        assert message in capsys.readouterr().err
