"""transformers.Trainer with checkpoints that are whole or do not exist. It stops if loss or gradient is not finite."""

import errno
import math
import shutil
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import PrinterCallback, Trainer, TrainingArguments
from transformers.trainer import TRAINING_ARGS_NAME

from ..labels import IGNORED
from ..processes import distributed_state
from . import sharded
from .checkpoints import UNFINISHED, finish_checkpoint, newest_whole, remove_old
from .recipe import Recipe


class TrainingStopped(Exception):
    """Why a run stopped early, and which checkpoint is left, in a sentence or two."""


def training_arguments(recipe: Recipe, run: Path, world_size: int, validation_size: int) -> TrainingArguments:
    """A recipe as arguments of transformers.Trainer. validation_size: number of validation sequences."""
    at_once = recipe.micro_batch_size * world_size
    if recipe.batch_size % at_once:
        raise ValueError(
            f"batch_size must be a multiple of micro_batch_size × processes = {recipe.micro_batch_size} × {world_size}"
            f", got {recipe.batch_size}"
        )
    return TrainingArguments(
        output_dir=str(run),
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.micro_batch_size,
        # Trainer would fill an incomplete last batch with sequences that it has already counted.
        per_device_eval_batch_size=1 if validation_size % at_once else recipe.micro_batch_size,
        gradient_accumulation_steps=recipe.batch_size // at_once,
        learning_rate=recipe.learning_rate,
        adam_beta1=recipe.beta1,
        adam_beta2=recipe.beta2,
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.clip,
        warmup_steps=round(recipe.warmup * recipe.steps),
        lr_scheduler_type="cosine" if recipe.schedule == "cosine" else "constant_with_warmup",
        use_cpu=not torch.accelerator.is_available(),
        bf16=recipe.precision == "bfloat16",
        gradient_checkpointing=recipe.gradient_checkpointing,
        logging_steps=recipe.log_every,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        eval_strategy="steps" if recipe.evaluate_every else "no",
        eval_steps=recipe.evaluate_every or None,
        save_strategy="steps",
        save_steps=recipe.save_every or recipe.steps,
        prediction_loss_only=True,
        remove_unused_columns=False,
        # The data are already shuffled. A resumed run continues at its index.
        train_sampling_strategy="sequential",
        dataloader_num_workers=recipe.workers,
        dataloader_pin_memory=torch.cuda.is_available(),
        seed=recipe.seed,
        report_to=["tensorboard"],
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
    )


class LucidTrainer(Trainer):
    """Trains a recipe in a folder. parallel: "ddp" or "fsdp"; it matters only with several processes."""

    def __init__(self, recipe: Recipe, run: Path, *, parallel: str = "ddp", **kwargs: Any) -> None:
        self.recipe, self.run = recipe, run
        validation = kwargs["eval_dataset"]
        args = training_arguments(recipe, run, distributed_state().num_processes, len(validation))
        super().__init__(args=args, **kwargs)
        counts = [int((validation[i]["labels"][1:] != IGNORED).sum()) for i in range(len(validation))]
        self._labels_per_sequence = sum(counts) / len(counts)
        # `metrics.Progress` shows the same numbers.
        self.remove_callback(PrinterCallback)
        self.sharded = parallel == "fsdp"
        if self.sharded:
            sharded.shard(self.model)
            # The flag with which Trainer leaves a distributed model as it is, instead of wrapping it.
            self.is_distributed_loading_by_transformers = True
        self._writing = False
        self._last_log = (time.monotonic(), 0)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self._check_finite("loss", loss.item())
        return loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        # Trainer calls this before the optimiser's step. A finite loss can have a gradient that is not finite.
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self._check_finite("gradient", float(norm))
        return norm

    def _check_finite(self, what: str, value: float) -> None:
        if not math.isfinite(value):
            raise TrainingStopped(
                f"The {what} became {value} in step {self.state.global_step + 1}, before the weights were changed. "
                f"{self._last_good_state()} To train on with other settings, start another run from it: --from "
                "CHECKPOINT --out ANOTHER, with a lower learning_rate or clip"
            )

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._init_training_state(*args, **kwargs)
        # A resumed state has the intervals of its checkpoint. Replace them by those of the recipe.
        self.state.compute_steps(self.args, self.state.max_steps)
        return result

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[torch.Tensor, None, None]:
        """Weight the loss of a batch by its number of labels, because Trainer averages over sequences."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = model(**inputs).loss
        labels = (inputs["labels"][:, 1:] != IGNORED).sum()
        return loss * labels / len(inputs["labels"]) / self._labels_per_sequence, None, None

    def _last_good_state(self) -> str:
        checkpoint, _ = newest_whole(self.run)
        return f"The last good state is {checkpoint}." if checkpoint else "No checkpoint was saved yet."

    def _get_output_dir(self, trial: Any) -> str:
        # Trainer writes here; `finish_checkpoint` moves the checkpoint once it is whole.
        return str(self.run / UNFINISHED) if self._writing else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        name = f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            shutil.rmtree(self.run / UNFINISHED, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self._writing = True
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                finish_checkpoint(self.run / UNFINISHED / name, self.run / name)
        except Exception as error:
            # Before the removal, which makes room.
            is_full = disk_is_full(error, self.run)
            shutil.rmtree(self.run / UNFINISHED, ignore_errors=True)
            if not is_full:
                raise
            raise TrainingStopped(
                f"The disk of {self.run} is full: {name} could not be saved and was removed. {self._last_good_state()} "
                "Make room, then resume"
            ) from error
        finally:
            self._writing = False
        if self.args.should_save:
            shutil.rmtree(self.run / UNFINISHED, ignore_errors=True)
            remove_old(self.run, self.recipe.keep, self.state.global_step)
        self.accelerator.wait_for_everyone()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self.sharded:
            return super().save_model(output_dir, _internal_call)
        weights = sharded.whole_weights(self.model)
        if self.args.should_save:
            self._save(output_dir, state_dict=weights)
        return None

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        # A pickle that nothing reads: recipe.json holds the settings.
        (Path(output_dir or self.args.output_dir) / TRAINING_ARGS_NAME).unlink(missing_ok=True)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.sharded:
            return super()._save_optimizer_and_scheduler(output_dir)
        sharded.save_shards(self.model, self.optimizer, Path(output_dir))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")
        return None

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self.sharded:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and not self.sharded and (Path(checkpoint) / sharded.FOLDER).is_dir():
            raise TrainingStopped(
                f"{checkpoint} was saved with --parallel fsdp: resume it with that, or start another run from its "
                f"weights with --from {checkpoint} --out ANOTHER"
            )
        if not self.sharded or checkpoint is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        sharded.load_shards(self.model, self.optimizer, Path(checkpoint))
        scheduler = torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True)
        self.lr_scheduler.load_state_dict(scheduler)
        # The scheduler writes the rate into the optimiser after each step, and the saved optimiser state lacks it.
        for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = rate
        return None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            now, step = time.monotonic(), self.state.global_step
            last_time, last_step = self._last_log
            if last_step and step > last_step:
                tokens = (step - last_step) * self.recipe.batch_size * self.recipe.sequence_length
                logs["tokens_per_second"] = round(tokens / (now - last_time), 1)
            logs["memory_gb"] = round(_memory() / 1e9, 3)
            self._last_log = (now, step)
        if "train_loss" in logs:
            # Trainer's mean is over the steps of this process. The history has those of the whole run.
            logs["train_loss"] = mean_loss(self.state.log_history)
        super().log(logs, start_time)


def mean_loss(entries: list[dict[str, Any]]) -> float:
    """The mean loss over all steps, from log entries. A loss is the mean over the steps since the last entry."""
    total, last_step = 0.0, 0
    for entry in entries:
        if "loss" in entry:
            total += entry["loss"] * (entry["step"] - last_step)
            last_step = entry["step"]
    return total / max(last_step, 1)


def _memory() -> int:
    """Memory of this process in bytes: peak memory of the GPU if there is one, else resident memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return psutil.Process().memory_info().rss


def disk_is_full(error: BaseException, folder: Path) -> bool:
    """Whether an error means that the disk is full. torch.save only reports that its writer failed."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    phrases = ("No space left", "inline_container", "PytorchStreamWriter failed")
    return any(phrase in str(error) for phrase in phrases) or shutil.disk_usage(folder).free < 1 << 20
