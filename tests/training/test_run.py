"""Runs finish, resume to the same losses, survive signals and damage, and refuse what is not theirs."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from lucid_attention.models.checkpoint import load_model
from lucid_lab import cli
from lucid_lab.data.tokenize import tokenize
from lucid_lab.data.tokenize import train as train_tokenizer
from lucid_lab.training import run as runs
from lucid_lab.training.recipes import Recipe, find_recipe
from lucid_lab.training.run import METRICS, load_inputs, train

SMALL: dict[str, Any] = {
    "steps": 8,
    "sequence_length": 33,
    "batch_size": 4,
    "micro_batch_size": 2,
    "model": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "initializer_range": 0.02,
    },
    "log_every": 1,
    "save_every": 2,
    "evaluate_every": 0,
    "evaluation_sequences": 4,
}


def small(**changes: Any) -> Recipe:
    return replace(find_recipe("latest_value"), **{**SMALL, **changes})


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / METRICS).read_text().splitlines()]


def losses(run: Path) -> list[float]:
    return [entry["loss"] for entry in metrics(run) if "loss" in entry]


def weights(run: Path) -> dict[str, Tensor]:
    return safetensors.torch.load_file(run / "model" / "model.safetensors")


def signal_at(step: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send this process a signal in the middle of a step."""
    plain = runs.Record.on_pre_optimizer_step

    def send(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        plain(self, args, state, control, **kwargs)
        if state.global_step == step - 1:
            signal.raise_signal(number)

    monkeypatch.setattr(runs.Record, "on_pre_optimizer_step", send)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was not stopped."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train(small(), run)
    return run


def test_a_run_leaves_a_model_metrics_and_a_summary(whole: Path) -> None:
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["steps"] == 8
    assert summary["tokens"] == 8 * 4 * 33
    assert len(losses(whole)) == 8
    assert (whole / "loss.png").stat().st_size > 1000
    assert list((whole / "tensorboard").rglob("events*"))
    assert {path.name for path in whole.glob("checkpoint-*")} == {"checkpoint-6", "checkpoint-8"}
    assert not list((whole / "model").glob("*.bin"))
    model = load_model(whole / "model")
    assert sum(parameter.numel() for parameter in model.parameters()) == summary["parameters"]
    # The validation loss is the mean over all labels.
    validation = load_inputs(small()).validation
    total = count = 0.0
    for item in validation:  # type: ignore[attr-defined]
        labels = item["labels"][1:]
        with torch.no_grad():
            logits = model(item["input_ids"][None]).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum").item()
        count += int((labels != -100).sum())
    assert summary["validation_loss"] == pytest.approx(total / count, abs=1e-4)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_a_checkpoint_and_the_run_resumes_to_the_same_losses(
    number: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Trainer would save only at the end.
    recipe = small(save_every=0)
    words = ["train", "latest_value", "--out", str(tmp_path / "run")]
    monkeypatch.setattr(runs, "chosen_recipe", lambda *_, **__: recipe)
    with monkeypatch.context() as patch:
        signal_at(5, number, patch)
        before = signal.getsignal(signal.SIGTERM)
        try:
            assert cli.main(words) == 128 + number
        finally:
            signal.signal(signal.SIGTERM, before)
    checkpoint = tmp_path / "run" / "checkpoint-5"
    assert f"{checkpoint} is saved: the same command resumes from it" in capsys.readouterr().err
    assert cli.main(words) == 0
    assert f"resuming from {checkpoint}" in capsys.readouterr().out
    assert losses(tmp_path / "run") == losses(whole)
    for name, tensor in weights(whole).items():
        assert torch.equal(weights(tmp_path / "run")[name], tensor), name


def test_a_run_that_is_stopped_before_its_first_step_says_that_there_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "make_model", lambda *_: signal.raise_signal(signal.SIGINT))
    assert cli.main(["train", "latest_value", "--out", str(tmp_path / "run")]) == 130
    assert "no checkpoint was saved yet: the same command starts from the beginning" in capsys.readouterr().err


def test_a_checkpoint_that_was_not_written_to_the_end_is_not_used(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    (run / "summary.json").unlink()
    (run / "checkpoint-8" / "trainer_state.json").unlink()
    train(small(), run)
    assert f"resuming from {run / 'checkpoint-6'}" in capsys.readouterr().out
    assert losses(run) == losses(whole)


def test_a_finished_run_is_not_trained_again_and_another_recipe_is_refused(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    summary = train(small(keep=1, log_every=3), run)
    assert "finished already" in capsys.readouterr().out
    assert summary == json.loads((run / "summary.json").read_text())
    with pytest.raises(ValueError, match=r"a run of another recipe: learning_rate was 0.003, is 0.1\. Choose another"):
        train(small(learning_rate=0.1), run)
    train(small(learning_rate=0.1, steps=2), run, restart=True)
    assert len(losses(run)) == 2
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("years of work")
    for restart in (False, True):
        with pytest.raises(ValueError, match="must be new, empty or the folder of a run"):
            train(small(), tmp_path / "other", restart=restart)


def test_a_damaged_checkpoint_is_refused_by_name(whole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    (run / "summary.json").unlink()
    optimizer, state = run / "checkpoint-8" / "optimizer.pt", run / "checkpoint-8" / "trainer_state.json"
    content = state.read_text()
    state.write_text(content[:-9])
    with pytest.raises(ValueError, match=f"{state}: not JSON"):
        train(small(), run)
    state.write_text(content)
    optimizer.unlink()
    with pytest.raises(ValueError, match="checkpoint-8 must hold the state of the optimizer"):
        train(small(), run)


def test_a_loss_that_is_not_finite_stops_before_the_weights_change(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the gradient became (nan|inf) in step \d+, before the weights"):
        train(small(learning_rate=1e30, clip=0.0, schedule="constant", warmup=0.0), tmp_path / "run")


def test_text_is_packed_and_a_model_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for i in range(30):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"Document {i}. " + "The latest value wins. " * (5 + i))
    tokens = tmp_path / "tokens"
    tokenize(str(tmp_path / "texts"), tokens, tokenizer="train:300", validation=0.2)
    changes: dict[str, Any] = {"data": str(tokens), "data_options": {}, "steps": 3}
    first = train(small(**changes, precision="bfloat16", gradient_checkpointing=True), tmp_path / "run")
    assert first["vocab_size"] == 300
    (tmp_path / "answers.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i} reads ", "answer": f"value {i}"}) + "\n" for i in range(200))
    )
    start = {"start": first["model"], "model": {}, "rope_theta": 5000.0, "sequence_length": 48}
    second = train(small(**{**changes, **start, "data": str(tmp_path / "answers.jsonl")}), tmp_path / "tuned")
    assert load_model(second["model"]).config.rope_theta == 5000.0
    train_tokenizer(["other words"], 280).save_pretrained(tokens)
    with pytest.raises(ValueError, match="another tokenizer"):
        train(small(**{**changes, **start}), tmp_path / "third")


def test_prompts_need_a_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="prompts with answers are for a trained model: give one with --from"):
        train(small(data="answers.jsonl", data_options={}), tmp_path / "run")


def torchrun(program: list[str], words: list[str]) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *program]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run([*launcher, *words], env=environment, capture_output=True, text=True, timeout=150)


@pytest.mark.slow
def test_two_processes_train_as_one_and_resume(whole: Path, tmp_path: Path) -> None:
    run, program = tmp_path / "run", ["-m", "lucid_lab.cli"]
    settings = {**SMALL, "micro_batch_size": 1}
    model = settings.pop("model")
    changes = [f"{key}={value}" for key, value in {**settings, **{f"model.{k}": v for k, v in model.items()}}.items()]
    words = ["train", "latest_value", "--out", str(run), *(f"--set={c}" for c in changes)]
    done = torchrun(program, words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("validation loss") == 1
    assert losses(run) == pytest.approx(losses(whole), abs=1e-5)
    shutil.rmtree(run / "checkpoint-8")
    (run / "summary.json").unlink()
    done = torchrun(program, words)
    assert done.returncode == 0, done.stderr
    assert f"resuming from {run / 'checkpoint-6'}" in done.stdout
    assert losses(run) == pytest.approx(losses(whole), abs=1e-5)
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(run)[name], tensor, rtol=0, atol=1e-4)


# accelerate divides models on GPUs only, so the model is divided by torch itself.
DIVIDED = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from lucid_lab.training.loss import use_chunked_loss
from tests.models.decoder.cases import decoder

dist.init_process_group("gloo")
ids = torch.arange(24).view(2, 12) % 40
losses, norms = [], []
for divided in (False, True):
    torch.manual_seed(0)
    model = decoder()
    use_chunked_loss(model, 5)
    if divided:
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        norms.append(float(norm.full_tensor() if divided else norm))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
torch.testing.assert_close(losses[3:], losses[:3], rtol=1e-5, atol=1e-6)
torch.testing.assert_close(norms[3:], norms[:3], rtol=1e-4, atol=1e-6)
assert losses[2] < losses[0]
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_model_that_is_divided_between_processes_trains_as_a_whole_one(tmp_path: Path) -> None:
    (tmp_path / "divided.py").write_text(DIVIDED)
    done = torchrun([str(tmp_path / "divided.py")], [])
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_fsdp_is_refused_where_the_model_would_be_copied(tmp_path: Path) -> None:
    words = ["train", "latest_value", "--out", str(tmp_path / "run"), "--parallel", "fsdp", "--set=micro_batch_size=8"]
    assert "--parallel fsdp needs GPUs" in torchrun(["-m", "lucid_lab.cli"], words).stderr
    with pytest.raises(ValueError, match="--parallel fsdp needs several processes"):
        train(small(), tmp_path / "run", parallel="fsdp")
