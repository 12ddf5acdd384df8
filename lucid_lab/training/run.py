"""A training run in a folder: start, resume, finish."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import default_data_collator, set_seed
from transformers.utils import logging

from lucid_attention.files import PARTIAL, UnreadableFile, finish_folder, partial_path, read_json, write_record
from lucid_attention.models.ramps import SharpnessRamp, StrengthRamp

from ..data.shards import file_hash
from ..locks import LOCK, locked
from ..processes import distributed_state
from ..report.figures import write_png
from ..report.records import loss_figure
from .checkpoints import UNFINISHED, newest_whole
from .identity import INPUTS, changed_inputs, input_hashes
from .inputs import load_inputs, make_model
from .limits import check_fits
from .loss import use_chunked_loss
from .metrics import METRICS, MetricsFile, Progress, read_metrics
from .recipe import Recipe
from .trainer import LucidTrainer, TrainingStopped, disk_is_full

RECIPE, SUMMARY, MODEL = "recipe.json", "summary.json", "model"
# Fields that may change when a run is resumed: none of them affects what the model learns.
MAY_CHANGE = {"about", "log_every", "evaluate_every", "save_every", "keep", "workers", "micro_batch_size"}


class RunError(Exception):
    """Why a run cannot start or resume, in a sentence."""


def train(recipe: Recipe, out: str | Path, *, parallel: str = "ddp", restart: bool = False) -> dict[str, Any]:
    """Train, or resume from the newest whole checkpoint in `out`. Returns the summary that is saved at the end.

    parallel: "ddp" or "fsdp", with several processes (torchrun). restart: remove an earlier run in `out`.
    """
    run, is_first = Path(out), distributed_state().is_main_process
    _check_parallel(parallel)
    if not restart and (run / SUMMARY).exists():
        _check_same(recipe, run)
        _check_inputs(recipe, run)
        if is_first:
            print(f"{run}: finished already. --restart trains again, another --out starts another run")
        return _read_summary(run)
    check_fits(recipe, parallel=parallel)
    if not (restart and (run / RECIPE).exists()):
        # Also before the lock, which would leave a file in a folder that is not ours.
        _check_folder(recipe, run)
    with _locked(run) if is_first else nullcontext():
        if restart and is_first:
            _remove(run)
        distributed_state().wait_for_everyone()
        return _train(recipe, run, parallel, is_first)


def _train(recipe: Recipe, run: Path, parallel: str, is_first: bool) -> dict[str, Any]:
    _check_folder(recipe, run)
    # Transformers would show a progress bar for every file that is saved or loaded.
    logging.disable_progress_bar()
    set_seed(recipe.seed)
    inputs = load_inputs(recipe)
    if is_first:
        print("\n".join(inputs.context))
    # After the data are loaded: those of "stdlib" are made on first use.
    hashes = _check_inputs(recipe, run)
    check_fits(recipe, vocab_size=inputs.vocab_size, parallel=parallel)
    model = make_model(recipe, inputs)
    if recipe.loss_rows:
        use_chunked_loss(model, recipe.loss_rows)
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(run / "tensorboard")
    # The ramp comes first: it adds its value to the entries that the other callbacks write.
    callbacks = [*_ramps(recipe, model), MetricsFile(run), Progress()]
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
    # The folder is written only now: a command that failed above leaves no run.
    checkpoint = _open(recipe, run, hashes, is_first)
    try:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        return _finish(trainer, recipe, run, inputs.vocab_size)
    except Exception as error:
        # Before the removal, which makes room.
        is_full = disk_is_full(error, run)
        shutil.rmtree(partial_path(run / MODEL), ignore_errors=True)
        if isinstance(error, TrainingStopped) or not is_full:
            raise
        raise TrainingStopped(
            f"The disk of {run} is full. Its checkpoints are whole: make room, then resume"
        ) from error


def _ramps(recipe: Recipe, model: Any) -> list[Any]:
    """The ramp of a recipe, if it has one, with the model at its start."""
    ramp: StrengthRamp | SharpnessRamp
    if recipe.strength_steps:
        ramp = StrengthRamp(recipe.strength_steps)
    elif recipe.sharpness_steps:
        ramp = SharpnessRamp(recipe.sharpness_steps, start=recipe.sharpness_start, end=recipe.sharpness_end)
    else:
        return []
    ramp.apply(model, 0, recipe.steps)
    return [ramp]


def _read_summary(run: Path) -> dict[str, Any]:
    file = run / SUMMARY
    try:
        summary = read_json(file)
        _ = summary["steps"] + summary["validation_loss"] + (summary["median_tokens_per_second"] or 0), summary["model"]
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{file} is damaged: remove it, and the same command finishes the run again from its last checkpoint"
        ) from error
    if not (run / METRICS).is_file() or file_hash(run / METRICS) != summary.get("metrics_sha256"):
        raise RunError(
            f"{run / METRICS} is not the file that the run wrote: remove {file}, and the same command writes both "
            "again from the last checkpoint"
        )
    return dict(summary)


def _check_parallel(parallel: str) -> None:
    if parallel not in ("ddp", "fsdp"):
        raise RunError(f"parallel must be ddp or fsdp, got {parallel!r}")
    if parallel == "fsdp" and distributed_state().num_processes == 1:
        raise RunError("--parallel fsdp needs several processes: expected torchrun to start them, got 1")


@contextmanager
def _locked(run: Path) -> Iterator[None]:
    """Lock the folder of a run. A command that fails before it writes anything leaves no new folder."""
    is_new = not run.exists()
    with locked(run, "lucid train"):
        try:
            yield
        finally:
            if is_new and not _entries(run):
                shutil.rmtree(run, ignore_errors=True)


def _entries(run: Path) -> list[Path]:
    """What a folder holds, without the files of its lock."""
    return [path for path in run.iterdir() if not path.name.startswith(LOCK)]


def _remove(run: Path) -> None:
    if not (run / RECIPE).exists():
        return
    # The recipe goes last: it marks the folder as a run until all else is removed.
    for path in [path for path in _entries(run) if path.name != RECIPE]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (run / RECIPE).unlink()


def _check_same(recipe: Recipe, run: Path) -> None:
    try:
        before = Recipe.from_dict(read_json(run / RECIPE))
    except (ValueError, TypeError) as error:
        raise RunError(f"{run / RECIPE} cannot be read: {error}") from error
    changes = [
        f"{name} was {old!r}, is {new!r}"
        for name, (old, new) in before.differences(recipe).items()
        if name not in MAY_CHANGE
    ]
    if changes:
        raise RunError(
            f"{run} holds a run of another recipe: {', '.join(changes)}. Choose another --out, or give --restart"
        )


def _check_folder(recipe: Recipe, run: Path) -> None:
    if (run / RECIPE).exists():
        _check_same(recipe, run)
    elif run.exists() and any(not path.name.endswith(PARTIAL) for path in _entries(run)):
        raise RunError(
            f"{run} must be new, empty or the folder of a run, got a folder with other files: choose another --out"
        )


def _check_inputs(recipe: Recipe, run: Path) -> dict[str, str]:
    """The hashes of data and start, which must be those that the run began with."""
    hashes = input_hashes(recipe)
    try:
        changed = changed_inputs(run / INPUTS, hashes)
    except UnreadableFile as error:
        raise RunError(
            f"{error}. It says which data the run began with: if they are the same now, remove it and resume"
        ) from error
    if changed:
        paths = {"data": recipe.data, "start": recipe.start}
        names = " and ".join(f"{name} {paths[name]}" for name in changed)
        raise RunError(
            f"{run} holds a run on other content: {names} has changed since it began. Choose another --out, or give "
            "--restart"
        )
    return hashes


def _open(recipe: Recipe, run: Path, hashes: dict[str, str], is_first: bool) -> Path | None:
    """Write the recipe, and return the checkpoint to resume from: the same one in every process."""
    distributed_state().wait_for_everyone()
    if is_first:
        run.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(run / UNFINISHED, ignore_errors=True)
        write_record(run / RECIPE, asdict(recipe))
        write_record(run / INPUTS, dict(hashes))
    distributed_state().wait_for_everyone()
    checkpoint, damages = newest_whole(run)
    if is_first:
        for damage in damages:
            print(f"damaged checkpoint: {damage}")
        if checkpoint is not None:
            print(f"resuming from {checkpoint}")
        elif damages:
            print("no whole checkpoint is left: starting again")
    return checkpoint


def _finish(trainer: LucidTrainer, recipe: Recipe, run: Path, vocab_size: int) -> dict[str, Any]:
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    is_evaluated = bool(evaluations) and evaluations[-1]["step"] == trainer.state.global_step
    evaluation = evaluations[-1] if is_evaluated else trainer.evaluate()
    partial = partial_path(run / MODEL)
    trainer.save_model(str(partial))
    trainer.accelerator.wait_for_everyone()
    entries = read_metrics(run / METRICS)
    speeds = sorted(entry["tokens_per_second"] for entry in entries if "tokens_per_second" in entry)
    summary = {
        "steps": trainer.state.global_step,
        "tokens": trainer.state.global_step * recipe.batch_size * recipe.sequence_length,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "vocab_size": vocab_size,
        "validation_loss": evaluation["eval_loss"],
        "median_tokens_per_second": speeds[len(speeds) // 2] if speeds else None,
        "model": str(run / MODEL),
    }
    if trainer.args.should_save:
        finish_folder(partial, run / MODEL)
        role = recipe.attention if isinstance(recipe.attention, str) else "hybrid"
        write_png(loss_figure(entries, role, f"{recipe.about}\n{recipe.attention}"), run / "loss.png")
        write_record(run / SUMMARY, summary | {"metrics_sha256": file_hash(run / METRICS)})
    trainer.accelerator.wait_for_everyone()
    return summary
