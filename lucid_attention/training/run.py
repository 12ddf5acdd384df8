"""A training run in a folder: begun, resumed, finished."""

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import default_data_collator, set_seed
from transformers.utils import logging

from ..base.processes import distributed_state
from ..models.ramps import StrengthRamp, set_strength
from ..report.pictures import draw_loss
from .checked import difference, from_dict
from .checkpoints import PARTIAL, UNFINISHED, Found, newest, write_whole
from .inputs import load_inputs, make_model
from .loss import use_chunked_loss
from .recipes import Recipe
from .trainer import LucidTrainer, TrainingStopped, disk_is_full
from .watching import METRICS, MetricsFile, Progress, read_metrics

RECIPE, SUMMARY, MODEL = "recipe.json", "summary.json", "model"
# What may change when a run is resumed: none of it touches what is learned.
HARMLESS = {"about", "log_every", "evaluate_every", "save_every", "keep", "workers", "micro_batch_size"}


class RunError(Exception):
    """Why a run cannot begin or go on, in a sentence."""


def train(recipe: Recipe, out: str | Path, *, parallel: str = "ddp", restart: bool = False) -> dict[str, Any]:
    """Train, or go on from the newest whole checkpoint in `out`. Gives the summary that is saved at the end.

    parallel: "ddp" or "fsdp", with several processes (torchrun). restart: remove what `out` holds of an earlier run.
    """
    run, first = Path(out), distributed_state().is_main_process
    _check_parallel(parallel)
    if restart and first:
        _remove(run)
    distributed_state().wait_for_everyone()
    if (run / SUMMARY).exists():
        _check_same(recipe, run)
        if first:
            print(f"{run}: finished already. --restart begins again, another --out begins another run")
        return json.loads((run / SUMMARY).read_text())
    _check_folder(recipe, run)
    # One bar is enough: every saved and loaded file would have its own.
    logging.disable_progress_bar()
    set_seed(recipe.seed)
    inputs = load_inputs(recipe)
    model = make_model(recipe, inputs)
    if recipe.loss_rows:
        use_chunked_loss(model, recipe.loss_rows)
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(run / "tensorboard")
    # The ramp first: it adds to what the others write down.
    ramp: list[Any] = [StrengthRamp(recipe.strength_steps)] if recipe.strength_steps else []
    if ramp:
        set_strength(model, 0.0)
    callbacks = [*ramp, MetricsFile(run), Progress()]
    trainer = LucidTrainer(
        recipe,
        run,
        parallel=parallel,
        model=model,
        train_dataset=inputs.train,
        eval_dataset=inputs.validation,
        data_collator=default_data_collator,
        processing_class=inputs.tokenizer,
        callbacks=callbacks,
    )
    # Now that everything is there, there is a run.
    found = _open(recipe, run, first)
    try:
        trainer.train(resume_from_checkpoint=None if found.folder is None else str(found.folder))
        return _finish(trainer, recipe, run, inputs.vocab_size)
    except Exception as error:
        full = disk_is_full(error, run)
        shutil.rmtree(run / (MODEL + PARTIAL), ignore_errors=True)
        if isinstance(error, TrainingStopped) or not full:
            raise
        raise TrainingStopped(
            f"The disk of {run} is full. Its checkpoints are whole: make room, then resume"
        ) from error


def _check_parallel(parallel: str) -> None:
    if parallel not in ("ddp", "fsdp"):
        raise RunError(f"parallel must be ddp or fsdp, got {parallel!r}")
    if parallel == "fsdp" and distributed_state().num_processes == 1:
        raise RunError("--parallel fsdp divides a model between processes: start several, with torchrun")


def _remove(run: Path) -> None:
    if not (run / RECIPE).exists():
        return
    # The recipe last: as long as it is there, what is left is known to be a run.
    for path in [path for path in run.iterdir() if path.name != RECIPE]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (run / RECIPE).unlink()


def _check_same(recipe: Recipe, run: Path) -> None:
    try:
        before = from_dict(Recipe, json.loads((run / RECIPE).read_text()))
    except (ValueError, TypeError) as error:
        raise RunError(f"{run / RECIPE} cannot be read: {error}") from error
    other = {name: pair for name, pair in difference(before, recipe).items() if name not in HARMLESS}
    if other:
        said = ", ".join(f"{name} was {old!r}, is {new!r}" for name, (old, new) in other.items())
        raise RunError(f"{run} holds a run of another recipe: {said}. Choose another --out, or give --restart")


def _check_folder(recipe: Recipe, run: Path) -> None:
    if (run / RECIPE).exists():
        _check_same(recipe, run)
    elif run.exists() and any(not path.name.endswith(PARTIAL) for path in run.iterdir()):
        raise RunError(f"{run} holds something that is not a run: choose another --out")


def _open(recipe: Recipe, run: Path, first: bool) -> Found:
    """Where to go on from. Several processes find the same."""
    distributed_state().wait_for_everyone()
    if first:
        run.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(run / UNFINISHED, ignore_errors=True)
        write_whole(run / RECIPE, json.dumps(asdict(recipe), indent=1))
    distributed_state().wait_for_everyone()
    found = newest(run)
    if first:
        for wrong in found.damaged:
            print(f"damaged checkpoint: {wrong}")
        if found.folder is not None:
            print(f"going on from {found.folder}")
        elif found.damaged:
            print("no whole checkpoint is left: starting again")
    return found


def _finish(trainer: LucidTrainer, recipe: Recipe, run: Path, vocab_size: int) -> dict[str, Any]:
    last = [entry for entry in trainer.state.log_history if "eval_loss" in entry][-1:]
    done = bool(last) and last[0]["step"] == trainer.state.global_step
    evaluated = last[0] if done else trainer.evaluate()
    partial = run / (MODEL + PARTIAL)
    trainer.save_model(str(partial))
    trainer.accelerator.wait_for_everyone()
    entries = read_metrics(run / METRICS)
    speeds = sorted(entry["tokens_per_second"] for entry in entries if "tokens_per_second" in entry)
    summary = {
        "steps": trainer.state.global_step,
        "tokens": trainer.state.global_step * recipe.batch_size * recipe.sequence_length,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "vocab_size": vocab_size,
        "validation_loss": evaluated["eval_loss"],
        "median_tokens_per_second": speeds[len(speeds) // 2] if speeds else None,
        "model": str(run / MODEL),
    }
    if trainer.args.should_save:
        shutil.rmtree(run / MODEL, ignore_errors=True)
        partial.rename(run / MODEL)
        draw_loss(entries, run / "loss.png", f"{recipe.about}\n{recipe.attention}", recipe.attention)
        write_whole(run / SUMMARY, json.dumps(summary, indent=1))
    trainer.accelerator.wait_for_everyone()
    return summary
