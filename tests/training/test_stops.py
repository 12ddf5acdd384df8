"""A full disk or a number that is not finite stops a run with one message. The last good checkpoint stays."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from lucid_lab.training import run as runs
from lucid_lab.training import trainer
from lucid_lab.training.checkpoints import checkpoints, find_damage
from lucid_lab.training.metrics import MetricsFile
from lucid_lab.training.trainer import LucidTrainer

from .running import Ended, around, assert_same, lucid, words

# The errors of Python, torch.save and safetensors for a full disk.
PYTHON = OSError(errno.ENOSPC, "No space left on device")
TORCH = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 1123648 vs 1123536")
SAFETENSORS = Exception("Error while serializing: I/O error: No space left on device (os error 28)")


def write_half(written: Path, to: Path) -> None:
    (written / "complete.json").write_text("{")
    raise PYTHON


def fails(error: Exception) -> Callable[..., None]:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


def assert_one_message(ended: Ended) -> str:
    assert ended.code == 1, ended
    assert "Traceback" not in ended.err
    return ended.err[ended.err.index("lucid train: error: ") :]


@pytest.mark.parametrize(
    ("owner", "name", "about", "error"),
    [
        (LucidTrainer, "_save", "checkpoint-6", SAFETENSORS),
        (torch, "save", "checkpoint-6/optimizer.pt", TORCH),
        (trainer, "finish_checkpoint", "checkpoint-6", PYTHON),
    ],
    ids=["weights", "optimiser", "list"],
)
def test_a_full_disk_stops_a_run_that_can_be_resumed(
    owner: Any, name: str, about: str, error: Exception, whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    do, after = (write_half, False) if owner is trainer else (fails(error), True)
    ended = lucid(
        words("tiny_needle", run), before=lambda: around(owner, name, about=about, call=1, do=do, after=after)
    )
    message = assert_one_message(ended)
    assert f"The disk of {run} is full: checkpoint-6 could not be saved" in message
    assert f"The last good state is {run / 'checkpoint-4'}." in message
    assert not (run / "unfinished").exists()
    assert [path.name for path in checkpoints(run)] == ["checkpoint-4", "checkpoint-2"]
    assert all(find_damage(path) is None for path in checkpoints(run))
    assert lucid(words("tiny_needle", run)).code == 0
    assert_same(run, whole)


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [(MetricsFile, "on_log", PYTHON), (LucidTrainer, "save_model", SAFETENSORS), (runs, "draw_loss", PYTHON)],
    ids=["metrics", "model", "picture"],
)
def test_a_full_disk_outside_of_checkpoints_stops_a_run_that_can_be_resumed(
    owner: Any, name: str, error: Exception, whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    about = "model.partial" if name == "save_model" else ""
    ended = lucid(
        words("tiny_needle", run), before=lambda: around(owner, name, call=1, about=about, do=fails(error), after=True)
    )
    assert "full" in assert_one_message(ended)
    assert not (run / "summary.json").exists()
    assert lucid(words("tiny_needle", run)).code == 0
    assert_same(run, whole)


def test_another_error_during_a_save_is_not_reported_as_a_full_disk(tmp_path: Path) -> None:
    def before() -> None:
        around(trainer, "finish_checkpoint", call=1, do=fails(RuntimeError("of another kind")))

    ended = lucid(words("tiny_needle", tmp_path / "run"), before=before)
    assert ended.code != 0
    assert "of another kind" in ended.err
    assert "full" not in ended.err
    assert not (tmp_path / "run" / "unfinished").exists()


def spoil(factor: float, step: int) -> Callable[[], None]:
    """A patch that multiplies the loss in a step, counted from 1."""

    def before() -> None:
        original = LucidTrainer.compute_loss

        def spoiled(self: LucidTrainer, *args: Any, **kwargs: Any) -> Any:
            return original(self, *args, **kwargs) * (factor if self.state.global_step + 1 == step else 1)

        LucidTrainer.compute_loss = spoiled  # type: ignore[method-assign]

    return before


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_the_run_before_the_weights_change(
    factor: float, whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ended = lucid(words("tiny_needle", run, save_every=1), before=spoil(factor, 6))
    message = assert_one_message(ended)
    assert f"The loss became {factor} in step 6" in message
    assert f"The last good state is {run / 'checkpoint-5'}." in message
    assert [path.name for path in checkpoints(run)] == ["checkpoint-5", "checkpoint-4"]
    # Without the patch the resumed run equals the whole one.
    assert lucid(words("tiny_needle", run)).code == 0
    assert_same(run, whole)


def test_before_the_first_checkpoint_the_message_names_none(tmp_path: Path) -> None:
    ended = lucid(words("tiny_needle", tmp_path / "run"), before=spoil(float("nan"), 1))
    assert "No checkpoint was saved yet." in assert_one_message(ended)


def spoil_gradient(step: int) -> None:
    original = LucidTrainer.compute_loss

    def spoiled(self: LucidTrainer, model: Any, *args: Any, **kwargs: Any) -> Any:
        loss = original(self, model, *args, **kwargs)
        if self.state.global_step + 1 == step:
            weight = next(iter(model.parameters())).flatten()[0]
            # The value is 0, its derivative is NaN.
            loss = loss + (weight - weight.detach()).abs().sqrt()
        return loss

    LucidTrainer.compute_loss = spoiled  # type: ignore[method-assign]


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_a_gradient_that_is_not_finite_stops_the_run_before_the_weights_change(clip: float, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = lucid(words("tiny_needle", run, clip=clip), before=lambda: spoil_gradient(6))
    message = assert_one_message(ended)
    assert "in step 6" in message
    assert f"The last good state is {run / 'checkpoint-4'}." in message
    for checkpoint in checkpoints(run):
        weights = safetensors.torch.load_file(checkpoint / "model.safetensors")
        assert all(tensor.isfinite().all() for tensor in weights.values())


def test_the_advice_of_the_message_works(tmp_path: Path) -> None:
    run = tmp_path / "run"
    message = assert_one_message(lucid(words("tiny_needle", run), before=spoil(float("nan"), 6)))
    assert "--from CHECKPOINT --out ANOTHER" in message
    argv = words("tiny_needle", tmp_path / "other", "--from", str(run / "checkpoint-4"), learning_rate=1e-3, steps=2)
    assert lucid([word for word in argv if not word.startswith("--set=model.")]).code == 0
    recipe = json.loads((tmp_path / "other" / "recipe.json").read_text())
    assert recipe["start"] == str(run / "checkpoint-4")


def test_a_learning_rate_that_is_far_too_large_stops_the_run(tmp_path: Path) -> None:
    ended = lucid(words("tiny_needle", tmp_path / "run", learning_rate=1e30, schedule="constant"))
    assert "became" in assert_one_message(ended)
