"""What a run reports: progress bar, metrics, TensorBoard, loss curve, summary."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lucid_lab.training.metrics import METRICS, MetricsFile, read_metrics
from lucid_lab.training.trainer import mean_loss

from .running import Ended, finished, killed, losses, lucid, summary, weights, words


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """A run with validation every 4 steps, and its output."""
    argv = words("tiny_needle", tmp_path_factory.mktemp("watched") / "run", evaluate_every=4)
    ended = lucid(argv, draw=True)
    assert ended.code == 0, ended
    return Path(argv[argv.index("--out") + 1]), ended


def test_every_metrics_entry_is_complete(watched: tuple[Path, Ended]) -> None:
    entries = [entry for entry in read_metrics(watched[0] / METRICS) if "loss" in entry]
    assert [entry["step"] for entry in entries] == list(range(1, 9))
    for entry in entries:
        assert {"step", "loss", "learning_rate", "grad_norm", "memory_gb", "epoch"} <= entry.keys()
        assert 0.05 < entry["memory_gb"] < 100
        assert entry["grad_norm"] > 0
    # The first entry has no earlier time to measure from.
    assert "tokens_per_second" not in entries[0]
    assert all(entry["tokens_per_second"] > 0 for entry in entries[1:])


def test_the_validation_loss_is_measured_when_the_recipe_says_and_at_the_end(watched: tuple[Path, Ended]) -> None:
    measured = {
        entry["step"]: entry["eval_loss"] for entry in read_metrics(watched[0] / METRICS) if "eval_loss" in entry
    }
    assert list(measured) == [4, 8]
    assert measured[8] == summary(watched[0])["validation_loss"]
    assert measured[4] != measured[8]


def test_the_summary_counts_steps_tokens_and_parameters(watched: tuple[Path, Ended]) -> None:
    content = summary(watched[0])
    assert (content["steps"], content["tokens"], content["vocab_size"]) == (8, 8 * 4 * 33, 161)
    assert content["model"] == str(watched[0] / "model")
    assert content["median_tokens_per_second"] > 0
    assert content["parameters"] == sum(tensor.numel() for tensor in weights(watched[0]).values())


def test_a_finished_run_prints_two_lines(watched: tuple[Path, Ended]) -> None:
    run, ended = watched
    lines = ended.out.splitlines()
    assert lines[-2].startswith(f"{run}: validation loss {summary(run)['validation_loss']:.4f} after 8 steps, ")
    assert lines[-2].endswith(" tokens/s")
    assert lines[-1] == f"  model {run / 'model'}, curve {run / 'loss.png'}, metrics {run / METRICS}"


def test_the_bar_shows_loss_speed_and_memory(watched: tuple[Path, Ended]) -> None:
    last = [part for part in watched[1].err.replace("\n", "\r").split("\r") if part.startswith("train: ")][-1]
    assert "8/8" in last
    assert f"loss={losses(watched[0])[8]:.4f}" in last
    assert "tok/s=" in last
    assert "GB=" in last
    assert f"step 4: validation loss {validation_loss_at(watched[0], 4):.4f}" in watched[1].out + watched[1].err
    assert "{'loss'" not in watched[1].out + watched[1].err


def validation_loss_at(run: Path, step: int) -> float:
    entries = (entry for entry in read_metrics(run / METRICS) if "eval_loss" in entry and entry["step"] == step)
    return float(next(entries)["eval_loss"])


def test_the_loss_curve_is_a_picture(watched: tuple[Path, Ended]) -> None:
    content = (watched[0] / "loss.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(content) > 10_000


def scalars(run: Path, tag: str) -> dict[int, float]:
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


def test_tensorboard_has_the_losses(watched: tuple[Path, Ended]) -> None:
    assert scalars(watched[0], "train/loss") == pytest.approx(losses(watched[0]))
    assert set(scalars(watched[0], "eval/loss")) == {4, 8}
    assert set(scalars(watched[0], "train/tokens_per_second")) == set(range(2, 9))


def test_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    argv = words("tiny_needle", tmp_path / "run", evaluate_every=2)
    killed(argv, 6)
    run = finished(argv)
    entries = read_metrics(run / METRICS)
    assert [entry["step"] for entry in entries if "loss" in entry] == list(range(1, 9))
    assert [entry["step"] for entry in entries if "eval_loss" in entry] == [2, 4, 6, 8]
    # Of all steps, not of those since the kill.
    assert [entry["train_loss"] for entry in entries if "train_loss" in entry] == [pytest.approx(mean_loss(entries))]
    assert scalars(run, "train/loss") == pytest.approx(losses(run))


def state(step: int, first: bool = True) -> Any:
    return SimpleNamespace(is_world_process_zero=first, global_step=step, log_history=[{}] * step)


def test_numbers_that_json_does_not_have_are_written_as_strings(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path)
    metrics.on_log(None, state(1), None, logs={"loss": float("nan"), "grad_norm": float("inf"), "words": "no number"})
    metrics.on_log(None, state(2, first=False), None, logs={"loss": 1.0})
    metrics.on_log(None, state(3), None, logs={})
    assert json.loads((tmp_path / METRICS).read_text()) == {"step": 1, "loss": "nan", "grad_norm": "inf"}


@pytest.mark.parametrize("content", ["", '{"step": 1, "loss": 4}\n', '{"step": 3, "loss": 1}\n{"ste'])
def test_a_resumed_run_has_the_metrics_of_its_checkpoint_whatever_the_file_holds(content: str, tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text(content)
    resumed = state(2)
    resumed.log_history = [{"loss": 3.0, "step": 1}, {"eval_loss": 2.5, "step": 1}]
    MetricsFile(tmp_path).on_train_begin(None, resumed, None)
    lines = ['{"step": 1, "loss": 3.0}', '{"step": 1, "eval_loss": 2.5}', ""]
    assert (tmp_path / METRICS).read_text() == "\n".join(lines)
    MetricsFile(tmp_path).on_log(None, resumed, None, logs={"loss": 2.0, "epoch": 0.5})
    written = (tmp_path / METRICS).read_text()
    assert written.endswith('{"step": 2, "epoch": 0.5, "loss": 2.0}\n')
    # A checkpoint has its keys in another order than the log.
    resumed.log_history.append({"epoch": 0.5, "loss": 2.0, "step": 2})
    MetricsFile(tmp_path).on_train_begin(None, resumed, None)
    assert (tmp_path / METRICS).read_text() == written
    assert read_metrics(tmp_path / "nowhere") == []


def test_lines_that_are_no_entries_are_left_out(tmp_path: Path) -> None:
    others = [b"[]", b"{}", b"3", b'{"step": "x"}', b"[" * 100_000, b'{"step": 2, "about": "\xff"}']
    (tmp_path / METRICS).write_bytes(b"\n".join([*others, b'{"step": 1}', b""]))
    assert read_metrics(tmp_path / METRICS) == [{"step": 1}]


def test_the_training_loss_is_the_mean_over_all_steps() -> None:
    entries = [{"step": 1, "loss": 4.0}, {"step": 1, "eval_loss": 9.0}, {"step": 4, "loss": 2.0}]
    assert mean_loss(entries) == (4.0 + 3 * 2.0) / 4
    assert mean_loss([]) == 0
