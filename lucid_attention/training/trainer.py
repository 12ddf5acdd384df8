"""transformers.Trainer, with checkpoints that are whole or not there, and a stop where going on would do harm."""

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

from . import sharded
from .checkpoints import UNFINISHED, newest, rotate, seal
from .processes import processes
from .recipes import Recipe


class TrainingStopped(Exception):
    """Why a run ended before its time, and what is left of it, in a sentence or two."""


def arguments(recipe: Recipe, run: Path, world_size: int) -> TrainingArguments:
    """A recipe as Transformers says it."""
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
        per_device_eval_batch_size=recipe.micro_batch_size,
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
        # Data are in a shuffled order already, and a run is resumed by its index in them.
        train_sampling_strategy="sequential",
        dataloader_num_workers=recipe.workers,
        dataloader_drop_last=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        seed=recipe.seed,
        report_to=["tensorboard"],
        disable_tqdm=True,
    )


class LucidTrainer(Trainer):
    """A run of a recipe in a folder. parallel: "ddp" or "fsdp", which matters with several processes only."""

    def __init__(self, recipe: Recipe, run: Path, *, parallel: str = "ddp", **kwargs: Any) -> None:
        self.recipe, self.run = recipe, run
        super().__init__(args=arguments(recipe, run, processes().num_processes), **kwargs)
        # `Progress` shows what it prints.
        self.remove_callback(PrinterCallback)
        self.sharded = parallel == "fsdp"
        if self.sharded:
            sharded.shard(self.model)
            # Trainer's own words for a model that does its part itself, and must not be wrapped.
            self.is_distributed_loading_by_transformers = True
        self._writing = False
        self._last_log = (time.monotonic(), 0)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        if not math.isfinite(loss.item()):
            raise TrainingStopped(
                f"The loss became {loss.item()} in step {self.state.global_step + 1}; the weights were not changed by "
                f"it. {self._what_is_left()} Try a lower learning_rate or clip, then resume"
            )
        return loss

    def _what_is_left(self) -> str:
        found = newest(self.run).folder
        return f"The last good state is {found}." if found else "No checkpoint was saved yet."

    def _get_output_dir(self, trial: Any) -> str:
        # While a checkpoint is written it is nobody's checkpoint.
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
                seal(self.run / UNFINISHED / name, self.run / name)
        except Exception as error:
            shutil.rmtree(self.run / UNFINISHED, ignore_errors=True)
            if not _disk_is_full(error, self.run):
                raise
            raise TrainingStopped(
                f"The disk of {self.run} is full: {name} could not be saved and was removed. {self._what_is_left()} "
                "Make room, then resume"
            ) from error
        finally:
            self._writing = False
        if self.args.should_save:
            shutil.rmtree(self.run / UNFINISHED, ignore_errors=True)
            rotate(self.run, self.recipe.keep)
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
        # A pickle that nobody reads: the recipe says it all.
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
        if not self.sharded or checkpoint is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        sharded.load_shards(self.model, self.optimizer, Path(checkpoint))
        scheduler = torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True)
        self.lr_scheduler.load_state_dict(scheduler)
        return None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            now, step = time.monotonic(), self.state.global_step
            before, done = self._last_log
            if done and step > done:
                tokens = (step - done) * self.recipe.batch_size * self.recipe.sequence_length
                logs["tokens_per_second"] = round(tokens / (now - before), 1)
            logs["memory_gb"] = round(_memory() / 1e9, 3)
            self._last_log = (now, step)
        super().log(logs, start_time)


def _memory() -> int:
    """Bytes that this process uses: of the accelerator where there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return psutil.Process().memory_info().rss


def _disk_is_full(error: BaseException, folder: Path) -> bool:
    said = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return said or "No space left" in str(error) or shutil.disk_usage(folder).free < 1 << 20
