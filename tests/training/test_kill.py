"""A run killed at any moment and resumed has the same losses and weights as a run that was not killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lucid_lab.training import run as runs
from lucid_lab.training import trainer
from lucid_lab.training.metrics import METRICS, MetricsFile
from lucid_lab.training.trainer import LucidTrainer

from .running import around, assert_same, die, killed, losses, lucid, words

pytestmark = pytest.mark.slow

# (owner, name, about, call, after): see `around`. The run saves every 2 steps.
MOMENTS: dict[str, tuple[Any, str, str, int, bool]] = {
    "before the first step": (LucidTrainer, "training_step", "", 1, False),
    "between two steps": (LucidTrainer, "training_step", "", 6, False),
    "before the recipe is written": (Path, "replace", "recipe.json", 1, False),
    "after the weights of a checkpoint are written": (LucidTrainer, "_save", "checkpoint-4", 1, True),
    "before its optimiser is written": (torch, "save", "optimizer.pt", 2, False),
    "before it is listed": (trainer, "finish_checkpoint", "checkpoint-4", 1, False),
    "before it is renamed": (Path, "rename", "checkpoint-4", 1, False),
    "after it is renamed": (Path, "rename", "checkpoint-4", 1, True),
    "when an old checkpoint is half removed": (Path, "unlink", "checkpoint-2/complete.json", 1, True),
    "after the last step": (LucidTrainer, "training_step", "", 8, True),
    "before the model is renamed": (Path, "rename", "run/model", 1, False),
    "before the summary": (runs, "draw_loss", "", 1, True),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed_at_any_moment_resumes_to_the_same_losses_and_weights(
    moment: str, whole: Path, tmp_path: Path
) -> None:
    owner, name, about, call, after = MOMENTS[moment]
    argv = words("tiny_needle", tmp_path / "run")
    ended = lucid(argv, before=lambda: around(owner, name, about=about, call=call, do=die, after=after))
    assert ended.code == -signal.SIGKILL, ended
    ended = lucid(argv)
    assert ended.code == 0, ended
    assert_same(tmp_path / "run", whole, same_lines=True)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {path.name for path in whole.iterdir()}


def test_a_run_killed_several_times_ends_in_the_same_result(whole: Path, tmp_path: Path) -> None:
    argv = words("tiny_needle", tmp_path / "run")
    # Processes start at steps 1, 3 and 5: each is killed in the step of its own that is given here.
    for step in (4, 3, 2):
        killed(argv, step)
    assert lucid(argv).code == 0
    assert_same(tmp_path / "run", whole, same_lines=True)


def test_a_kill_from_outside_during_a_save_loses_nothing(whole: Path, tmp_path: Path) -> None:
    argv, unfinished = words("tiny_needle", tmp_path / "run"), tmp_path / "run" / "unfinished"
    process = subprocess.Popen([sys.executable, "-m", "lucid_lab.cli", *argv], stderr=subprocess.DEVNULL)
    try:
        started = time.monotonic()
        while not unfinished.exists():
            assert process.poll() is None
            assert time.monotonic() - started < 100
            time.sleep(0.0005)
    finally:
        process.kill()
        process.wait()
    assert not (tmp_path / "run" / "summary.json").exists()
    assert lucid(argv).code == 0
    assert_same(tmp_path / "run", whole, same_lines=True)
    assert not unfinished.exists()


def ctrl_c(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    "moment", [(LucidTrainer, "training_step", 6), (trainer, "finish_checkpoint", 2)], ids=["a step", "a save"]
)
def test_after_ctrl_c_the_same_command_resumes(moment: tuple[Any, str, int], whole: Path, tmp_path: Path) -> None:
    argv = words("tiny_needle", tmp_path / "run")
    owner, name, call = moment
    ended = lucid(argv, before=lambda: around(owner, name, call=call, do=ctrl_c))
    assert ended.code == 130
    assert "the same command resumes from the last checkpoint" in ended.err
    assert "Traceback" not in ended.err
    ended = lucid(argv)
    assert f"resuming from {tmp_path / 'run' / 'checkpoint'}-{4 if name == 'training_step' else 2}" in ended.out
    assert_same(tmp_path / "run", whole, same_lines=True)


def test_a_run_with_several_steps_in_a_log_entry_resumes_to_the_same_entries(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"log_every": 3, "save_every": 2}
    assert lucid(words("tiny_needle", tmp_path / "whole", **settings)).code == 0
    argv = words("tiny_needle", tmp_path / "run", **settings)
    killed(argv, 6)
    assert lucid(argv).code == 0
    assert_same(tmp_path / "run", tmp_path / "whole", same_lines=True)


def test_dropout_is_resumed(tmp_path: Path) -> None:
    # Our models have no dropout; a pretrained model can have it.
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=161,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=0.3,
    )
    AutoModelForCausalLM.from_config(config, attn_implementation="eager").save_pretrained(tmp_path / "llama")
    more = ("--from", str(tmp_path / "llama"))
    changes = {"evaluate_every": 3}
    assert lucid(without_model(words("tiny_needle", tmp_path / "whole", *more, **changes))).code == 0
    argv = without_model(words("tiny_needle", tmp_path / "run", *more, **changes))
    killed(argv, 6)
    assert lucid(argv).code == 0
    assert_same(tmp_path / "run", tmp_path / "whole", same_lines=True)


def without_model(argv: list[str]) -> list[str]:
    return [word for word in argv if not word.startswith("--set=model.")]


def half_a_line(self: MetricsFile, *_: Any, **__: Any) -> None:
    with self.path.open("a") as file:
        file.write('{"step": 6, "lo')
    die()


def test_half_a_line_in_the_metrics_is_removed(whole: Path, tmp_path: Path) -> None:
    argv = words("tiny_needle", tmp_path / "run")
    ended = lucid(argv, before=lambda: around(MetricsFile, "on_log", call=6, do=half_a_line))
    assert ended.code == -signal.SIGKILL
    assert (tmp_path / "run" / METRICS).read_text().endswith('"lo')
    assert lucid(argv).code == 0
    assert_same(tmp_path / "run", whole, same_lines=True)


def test_a_kill_while_metrics_are_rewritten_loses_none(whole: Path, tmp_path: Path) -> None:
    argv = words("tiny_needle", tmp_path / "run")
    killed(argv, 6)
    kept = losses(tmp_path / "run")

    def before() -> None:
        # Die when a file is open for writing, and empty.
        original = Path.open

        def dying(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            file = original(self, mode, *args, **kwargs)
            if self.name.startswith(METRICS) and "w" in mode:
                die()
            return file

        Path.open = dying  # type: ignore[assignment,method-assign]

    assert lucid(argv, before=before).code == -signal.SIGKILL
    assert losses(tmp_path / "run") == kept
    assert lucid(argv).code == 0
    assert_same(tmp_path / "run", whole, same_lines=True)
