"""Several processes train as one process does, with copied weights (ddp) and with divided ones (fsdp)."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lucid_lab.training.recipes import tiny_needle
from lucid_lab.training.run import RunError, train
from lucid_lab.training.trainer import LucidTrainer

from .running import METRICS, around, finished, killed, losses, lucid, read_metrics, summary, weights, words

pytestmark = pytest.mark.slow

HALF: dict[str, Any] = {"micro_batch_size": 2}
FSDP = ("--parallel", "fsdp")


def assert_near(run: Path, whole: Path) -> None:
    """The same up to rounding: the sums have another order."""
    assert losses(run) == pytest.approx(losses(whole), abs=1e-5)
    norms = [
        [entry["grad_norm"] for entry in read_metrics(folder / METRICS) if "loss" in entry] for folder in (run, whole)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert summary(run)["validation_loss"] == pytest.approx(summary(whole)["validation_loss"], abs=1e-5)
    mine, others = weights(run), weights(whole)
    assert mine.keys() == others.keys()
    for name, tensor in others.items():
        torch.testing.assert_close(mine[name], tensor, rtol=0, atol=1e-4)


def test_two_processes_of_torchrun_train_as_one(whole: Path, tmp_path: Path) -> None:
    argv = words("tiny_needle", tmp_path / "run", **HALF)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "lucid_lab.cli"]
    done = subprocess.run([sys.executable, *launcher, *argv], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert_near(tmp_path / "run", whole)
    # Only the first process prints.
    assert done.stdout.count("validation loss") == 1
    assert done.stderr.count("8/8") <= 3


@pytest.mark.parametrize("more", [(), FSDP], ids=["ddp", "fsdp"])
def test_two_processes_with_accumulation_train_as_one(more: tuple[str, ...], whole: Path, tmp_path: Path) -> None:
    assert_near(finished(words("tiny_needle", tmp_path / "run", *more, micro_batch_size=1), processes=2), whole)


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes with FSDP that was killed in step 6 and has the checkpoints 2 and 4."""
    return killed(words("tiny_needle", tmp_path_factory.mktemp("divided") / "run", *FSDP, **HALF), 6, processes=2)


@pytest.mark.parametrize("processes", [2, 4])
def test_a_divided_run_is_resumed_by_any_number_of_processes(
    processes: int, divided: Path, whole: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(divided, tmp_path / "run")
    ended = lucid(words("tiny_needle", run, *FSDP, micro_batch_size=4 // processes), processes=processes)
    assert ended.code == 0, ended
    assert f"resuming from {run / 'checkpoint-4'}" in ended.out
    assert_near(run, whole)


def test_a_divided_checkpoint_holds_shards_and_no_pickled_optimiser(divided: Path) -> None:
    names = {path.relative_to(divided / "checkpoint-4").as_posix() for path in (divided / "checkpoint-4").rglob("*")}
    assert len([name for name in names if name.startswith("sharded/") and name.endswith(".safetensors")]) == 2
    assert "optimizer.pt" not in names
    assert "model.safetensors" in names


def test_a_divided_run_is_not_resumed_as_another_kind(divided: Path, tmp_path: Path) -> None:
    run = shutil.copytree(divided, tmp_path / "run")
    before = {path: path.read_bytes() for path in (run / "checkpoint-4").rglob("*") if path.is_file()}
    ended = lucid(words("tiny_needle", run))
    assert ended.code == 1
    assert "was saved with --parallel fsdp" in ended.err
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2)])
def test_a_run_of_copies_is_resumed_by_another_number_of_processes(
    first: int, then: int, whole: Path, tmp_path: Path
) -> None:
    run = killed(words("tiny_needle", tmp_path / "run", micro_batch_size=4 // first), 6, processes=first)
    assert lucid(words("tiny_needle", run, micro_batch_size=4 // then), processes=then).code == 0
    assert_near(run, whole)


def test_a_run_of_copies_is_not_resumed_as_a_divided_one(tmp_path: Path) -> None:
    run = killed(words("tiny_needle", tmp_path / "run"), 3)
    ended = lucid(words("tiny_needle", run, *FSDP, **HALF), processes=2)
    assert ended.code == 1
    assert "it was saved without --parallel fsdp" in ended.err


def print_shares() -> None:
    def print_share(self: LucidTrainer, model: Any, *_: Any, **__: Any) -> None:
        from torch.distributed.tensor import DTensor

        print(f"copies {isinstance(model, torch.nn.parallel.DistributedDataParallel)}")
        parameters = list(model.parameters())
        print(f"divided {all(isinstance(parameter, DTensor) for parameter in parameters)}")
        if isinstance(parameters[0], DTensor):
            local = sum(parameter.to_local().numel() for parameter in parameters)
            print(f"share {local / sum(parameter.numel() for parameter in parameters)}")
            state = [tensor for values in self.optimizer.state.values() for tensor in values.values() if tensor.ndim]
            print(f"state {all(isinstance(tensor, DTensor) for tensor in state)} {len(state)}")

    around(LucidTrainer, "training_step", call=2, do=print_share)


def test_fsdp_divides_weights_and_optimiser_and_does_not_copy(tmp_path: Path) -> None:
    argv = words("tiny_needle", tmp_path / "run", *FSDP, **HALF, steps=2)
    output = lucid(argv, processes=2, before=print_shares).out
    assert "copies False" in output
    assert "divided True" in output
    assert "state True" in output
    assert "state True 0" not in output
    assert float(output.split("share ")[1].split()[0]) == pytest.approx(0.5, abs=0.01)


def test_ddp_copies_the_weights(tmp_path: Path) -> None:
    output = lucid(words("tiny_needle", tmp_path / "run", **HALF, steps=2), processes=2, before=print_shares).out
    assert "copies True" in output
    assert "divided False" in output


def test_fsdp_trains_tied_embeddings_with_checkpointed_gradients_in_sixteen_bits_and_resumes(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "model.tie_word_embeddings": True,
        "gradient_checkpointing": True,
        "precision": "bfloat16",
    }
    alone = finished(words("tiny_needle", tmp_path / "alone", **changes))
    argv = words("tiny_needle", tmp_path / "run", *FSDP, **HALF, **changes)
    run = killed(argv, 4, processes=2)
    assert lucid(argv, processes=2).code == 0
    # bfloat16 rounds differently for other micro-batches.
    assert losses(run) == pytest.approx(losses(alone), abs=3e-3)


def test_fsdp_with_one_process_is_refused(tmp_path: Path) -> None:
    ended = lucid(words("tiny_needle", tmp_path / "run", *FSDP))
    assert ended.code == 1
    assert "--parallel fsdp needs several processes: expected torchrun to start them, got 1" in ended.err
    assert not (tmp_path / "run").exists()


def test_a_batch_that_the_processes_cannot_share_is_refused(tmp_path: Path) -> None:
    ended = lucid(words("tiny_needle", tmp_path / "run", micro_batch_size=4), processes=2)
    assert ended.code == 1
    assert "batch_size must be a multiple of micro_batch_size × processes = 4 × 2, got 4" in ended.err


def test_another_kind_of_parallelism_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="parallel must be ddp or fsdp, got 'tensor'"):
        train(tiny_needle(), tmp_path / "run", parallel="tensor")
