"""`lucid train`: the data and the model of a recipe, and its run in a folder: start, resume, finish."""

import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from torch.utils.data import Dataset, Subset
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.utils import logging

from lucid_attention import enable_lucid
from lucid_attention.files import finish_folder, partial_path, read_json, write_whole
from lucid_attention.models.checkpoint import load_config, load_model, load_tokenizer
from lucid_attention.models.decoder.configuration import LucidConfig
from lucid_attention.models.preconditioner import uses_lucid

from ..data import IGNORED, DataError
from ..data.datasets import PackedTokens, PromptAnswers
from ..data.synthetic import LatestValue, Needles
from ..data.tokenize import MANIFEST, read_manifest, tokenize
from ..locks import LOCK, locked
from ..report.figures import write_png
from ..report.records import loss_figure
from . import presets
from .loss import use_chunked_loss
from .recipes import Recipe, find_recipe

RECIPE, METRICS, SUMMARY, MODEL = "recipe.json", "metrics.jsonl", "summary.json", "model"
# Fields that may change when a run is resumed: none of them affects what the model learns.
MAY_CHANGE = {"about", "log_every", "evaluate_every", "save_every", "keep", "workers", "micro_batch_size"}
SYNTHETIC: dict[str, Any] = {"needles": Needles, "latest_value": LatestValue}
# Where the tokens of "stdlib" are saved, and the vocabulary of their tokenizer unless data_options name another.
STDLIB_FOLDER, STDLIB_VOCABULARY = Path("runs") / "data", 4096
# Added to the seed of synthetic validation items, so that no training run shares them.
VALIDATION_SEED = 1_000_003_000_000
# Share of a device's memory that a run can fill: CUDA itself and fragments take the rest.
FITS = 0.9
# Separate documents should fill a good part of a sequence from this length on.
LONG = 4096


def machine_memory() -> int:
    """Memory that this process can have at most, in bytes: of its GPU if there is one, else of the machine."""
    import psutil

    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[1])
    return int(psutil.virtual_memory().total)


def gigabytes(size: int) -> str:
    """A number of bytes, for messages."""
    return f"{size / 1e9:,.1f} GB"


def distributed_state() -> Any:
    """accelerate's `PartialState`: this process alone, or one of those that torchrun started."""
    from accelerate import PartialState

    # Without an accelerator, accelerate sees several processes only if it uses the CPU.
    return PartialState(cpu=not torch.accelerator.is_available())


def chosen_recipe(
    name: str,
    *,
    attention: str | None = None,
    data: str | None = None,
    start: str | None = None,
    seed: int | None = None,
    changes: Sequence[str] = (),
) -> Recipe:
    """The recipe of this name with the options of `lucid train`. None: that of the recipe."""
    given: dict[str, Any] = {"attention": attention, "data": data, "start": start, "seed": seed}
    if data is not None:
        # The recipe's options are for the recipe's own data.
        given["data_options"] = {}
    if start is not None:
        if attention is not None:
            raise ValueError(f"--attention is for new models: {start} keeps its own")
        given |= {"attention": attention_of(start), "attention_options": {}, "model": {}}
    recipe = replace(find_recipe(name), **{key: value for key, value in given.items() if value is not None})
    return recipe.changed(changes, distributed_state().num_processes)


# ------------------------------------------------------------------------------------------------------- the data


class Inputs(NamedTuple):
    """The data of a run. train: the sequences of all steps, in order. tokenizer: None for tasks without words."""

    train: Dataset[Any]
    validation: Dataset[Any]
    vocab_size: int
    tokenizer: Any


class Passes(Dataset[Any]):
    """`length` items from repeated passes over a data set, each in its own order. Item i depends on i and the seed."""

    def __init__(self, data: Any, length: int, seed: int) -> None:
        self.data, self.length, self.seed = data, length, seed
        self._order: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        number, item = divmod(index, len(self.data))
        if self._order[0] != number:
            generator = torch.Generator().manual_seed(self.seed + 1_000_003 * number)
            self._order = number, torch.randperm(len(self.data), generator=generator)
        return self.data[int(self._order[1][item])]


def load_inputs(recipe: Recipe) -> Inputs:
    """The data of a recipe. "stdlib" is tokenized on first use, by the first process."""
    T, sequences, tokenizer = recipe.sequence_length, recipe.steps * recipe.batch_size, None
    if recipe.data in SYNTHETIC:
        make, options = SYNTHETIC[recipe.data], {**recipe.data_options, "length": T}
        # Every item is new: the run is one pass.
        train: Any = make(**options, size=sequences, seed=recipe.seed)
        validation: Any = make(**options, size=recipe.evaluation_sequences, seed=recipe.seed + VALIDATION_SEED)
        tokenizer = getattr(train, "tokenizer", None)
    elif recipe.data.endswith(".jsonl"):
        if recipe.start is None:
            raise DataError(f"{recipe.data}: prompts with answers are for a trained model: give one with --from")
        tokenizer = load_tokenizer(recipe.start)
        train = PromptAnswers(recipe.data, tokenizer, T, seed=recipe.seed, **recipe.data_options)
        validation = PromptAnswers(recipe.data, tokenizer, T, split="validation", **recipe.data_options)
    else:
        folder = _token_folder(recipe)
        tokenizer = load_tokenizer(folder)
        train = PackedTokens(folder, T, seed=recipe.seed, separate_documents=recipe.separate_documents)
        validation = PackedTokens(folder, T, split="validation", separate_documents=recipe.separate_documents)
    count = min(recipe.evaluation_sequences, len(validation))
    return Inputs(
        train if recipe.data in SYNTHETIC else Passes(train, sequences, recipe.seed),
        Subset(validation, range(count)),
        train.vocab_size,
        tokenizer,
    )


def token_folder_path(recipe: Recipe) -> Path | None:
    """The folder of a recipe's tokens, whether it exists or not; None for other data."""
    if recipe.data in SYNTHETIC or recipe.data.endswith(".jsonl"):
        return None
    return (
        STDLIB_FOLDER / f"stdlib-{_stdlib_vocabulary(recipe)}-tokens" if recipe.data == "stdlib" else Path(recipe.data)
    )


def _stdlib_vocabulary(recipe: Recipe) -> int:
    return int(recipe.data_options.get("vocab_size", STDLIB_VOCABULARY))


def _token_folder(recipe: Recipe) -> Path:
    """The folder of a recipe's tokens; that of "stdlib" is made."""
    folder, state = token_folder_path(recipe), distributed_state()
    assert folder is not None
    known = {"vocab_size"} if recipe.data == "stdlib" else set()
    if unknown := recipe.data_options.keys() - known:
        raise DataError(f"data_options of {recipe.data} must be {known or 'none'}, got {unknown}")
    if recipe.data == "stdlib":
        with state.main_process_first():
            if not (folder / MANIFEST).exists():
                print(f"Tokenizing the Python standard library into {folder}, once")
                tokenize("stdlib", folder, tokenizer=f"train:{_stdlib_vocabulary(recipe)}", validation=0.05)
    if not folder.is_dir():
        raise DataError(
            f"{recipe.data}: there is no such folder of tokens. Make one with: lucid tokenize SOURCE {recipe.data} "
            "--tokenizer train:32000, where SOURCE is a folder of text, hf:NAME, or stdlib"
        )
    counts = read_manifest(folder)["splits"]["train"]
    mean = counts["tokens"] // max(counts["documents"], 1)
    if state.is_main_process:
        print(f"data: {folder}, {counts['tokens']:,} tokens, {counts['documents']:,} documents of {mean:,} on average")
        if recipe.separate_documents and recipe.sequence_length >= max(LONG, 8 * mean):
            print(
                f"warning: sequences of {recipe.sequence_length:,} tokens hold short documents that do not see each "
                "other. Let them see each other (--set separate_documents=false), or choose long documents (lucid "
                f"tokenize --min-document-tokens {recipe.sequence_length // 4})"
            )
    return folder


# ------------------------------------------------------------------------------------------------------ the model


def make_model(recipe: Recipe, inputs: Inputs) -> PreTrainedModel:
    """The model of a recipe: a new one, or that of its checkpoint with the recipe's length and rotary base."""
    enable_lucid()
    if recipe.start is None:
        tokens = {
            name: getattr(inputs.tokenizer, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")
        }
        config = new_config(recipe, vocab_size=vocabulary(recipe, inputs.vocab_size), **tokens)
        return AutoModelForCausalLM.from_config(config)
    if recipe.model or recipe.attention_options:
        raise ValueError(
            f"model and attention_options are for new models: expected none with --from {recipe.start}, got "
            f"{recipe.model or recipe.attention_options}"
        )
    config = read_config(recipe.start)
    text_config = config.get_text_config(decoder=True)
    if inputs.vocab_size > text_config.vocab_size:
        raise DataError(
            f"the model of {recipe.start} has a vocabulary of {text_config.vocab_size} tokens, the data one of "
            f"{inputs.vocab_size}: tokenize the data with the model's own tokenizer"
        )
    has_tokenizer = inputs.tokenizer is not None and (Path(recipe.start) / "tokenizer.json").is_file()
    if has_tokenizer and load_tokenizer(recipe.start).get_vocab() != inputs.tokenizer.get_vocab():
        raise DataError(f"the data have another tokenizer than the model of {recipe.start}: tokenize with that one")
    text_config.max_position_embeddings = max(text_config.max_position_embeddings, recipe.sequence_length)
    if recipe.rope_theta is not None and isinstance(text_config, LucidConfig):
        text_config.rope_theta = recipe.rope_theta
    elif recipe.rope_theta is not None:
        # Gemma 3 has a base for each kind of layer. Layers with a window keep theirs.
        parameters = text_config.rope_parameters
        parameters.get("full_attention", parameters)["rope_theta"] = recipe.rope_theta
    model: PreTrainedModel = load_model(recipe.start, torch.float32, config=config)
    return model


def new_config(recipe: Recipe, **of_data: Any) -> LucidConfig:
    """The configuration of a recipe's new model. of_data: fields that depend on the data, such as vocab_size."""
    overrides = {
        "max_position_embeddings": recipe.sequence_length,
        **of_data,
        **({} if recipe.rope_theta is None else {"rope_theta": recipe.rope_theta}),
        **({"attention_options": recipe.attention_options} if recipe.attention_options else {}),
        **recipe.model,
    }
    try:
        config: LucidConfig = getattr(presets, recipe.preset)(recipe.attention, **overrides)
    except StrictDataclassError as error:
        # Its first line names the field, the last one the types.
        raise ValueError(f"model: {str(error).splitlines()[-1].strip()}") from error
    # Transformers looks a dtype up in torch.
    except AttributeError as error:
        raise ValueError(f"model: {error}") from error
    return config


def vocabulary(recipe: Recipe, of_data: int) -> int:
    """The vocabulary of a new model: of the data, unless the recipe or a preset in `OWN_VOCABULARY` has another."""
    chosen = recipe.model.get("vocab_size")
    if chosen is None and recipe.preset in presets.OWN_VOCABULARY:
        chosen = getattr(presets, recipe.preset)("softmax").vocab_size
    if chosen is not None and chosen < of_data:
        raise ValueError(f"model.vocab_size must be at least {of_data}, the vocabulary of the data, got {chosen}")
    return of_data if chosen is None else int(chosen)


def read_config(start: str) -> Any:
    """The configuration of the checkpoint that a run starts from."""
    if not (Path(start) / "config.json").is_file():
        raise DataError(f"{start}: holds no model to start from: expected a folder with config.json and weights")
    return load_config(start)


def attention_of(start: str) -> str | list[str]:
    """The attention of a checkpoint, as in `LucidConfig`: a name in `ATTENTIONS`, or one per layer."""
    config = read_config(start).get_text_config(decoder=True)
    if isinstance(config, LucidConfig):
        return config.attention
    return "lucid" if uses_lucid(config) else "softmax"


# ---------------------------------------------------------------------------------------------- memory, --dry-run


def memory_needs(recipe: Recipe, model: Any, devices: int = 1, parallel: str = "ddp") -> dict[str, int]:
    """Bytes on each device, by part. model: also one without content. The activations are a rough estimate.

    Weights, gradients and AdamW's two moments are float32; ddp copies the gradients once more to send them. A layer
    keeps about 8 hidden, 3 intermediate and 4 head widths per token for the backward pass; with checkpointing, its
    input, and one layer works at a time.
    """
    shared = devices if parallel == "fsdp" else 1
    weights = 4 * sum(parameter.numel() for parameter in model.parameters()) // shared
    config = model.config.get_text_config(decoder=True)
    heads = (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
    # With bfloat16, norms and the solve still keep float32.
    width = 3 if recipe.precision == "bfloat16" else 4
    tokens, layers = recipe.micro_batch_size * recipe.sequence_length, config.num_hidden_layers
    layer = tokens * width * (8 * config.hidden_size + 3 * config.intermediate_size + 4 * heads)
    inputs = tokens * 4 * config.hidden_size * layers
    rows = min(recipe.loss_rows or tokens, tokens)
    return {
        "weights": weights,
        "gradients": weights * (2 if devices > 1 and parallel == "ddp" else 1),
        "optimiser": 2 * weights,
        "activations": inputs + layer if recipe.gradient_checkpointing else layer * layers,
        "logits": 3 * 4 * rows * config.vocab_size,
    }


def planned_model(recipe: Recipe) -> Any:
    """The model of a recipe without content: shapes alone."""
    enable_lucid()
    folder = token_folder_path(recipe)
    if recipe.start is not None:
        config = read_config(recipe.start)
    else:
        known = {}
        if folder is not None and (folder / MANIFEST).exists():
            known = {"vocab_size": vocabulary(recipe, read_manifest(folder)["vocab_size"])}
        elif recipe.data == "stdlib":
            known = {"vocab_size": _stdlib_vocabulary(recipe)}
        config = new_config(recipe, **known)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def dry_run(recipe: Recipe, devices: int = 1, parallel: str = "ddp", gigabytes_each: float | None = None) -> list[str]:
    """What `--dry-run` prints: model, steps, tokens, memory of each device. Nothing is allocated or written.

    gigabytes_each: of a device; a run that needs more than FITS of them is refused.
    """
    folder, model = token_folder_path(recipe), planned_model(recipe)
    needs = memory_needs(recipe, model, devices, parallel)
    if gigabytes_each is not None and sum(needs.values()) > FITS * 1e9 * gigabytes_each:
        way_out = "" if parallel == "fsdp" else " --parallel fsdp,"
        raise ValueError(
            f"{recipe.preset} needs about {gigabytes(sum(needs.values()))} on each of {devices} device(s) with "
            f"{parallel}, and {FITS:.0%} of {gigabytes_each:g} GB can be used: take{way_out} a smaller "
            "micro_batch_size, or more memory"
        )
    missing = "" if folder is None or recipe.data == "stdlib" or folder.is_dir() else ", which does not exist yet"
    here = f"this machine's device has {gigabytes(machine_memory())}"
    return [
        f"model: {sum(parameter.numel() for parameter in model.parameters()):,} parameters, {recipe.preset}, "
        f"{recipe.attention if isinstance(recipe.attention, str) else 'hybrid'}",
        f"data: {recipe.data}{missing}",
        f"steps: {recipe.steps:,} of {recipe.batch_size} × {recipe.sequence_length:,} tokens, {recipe.tokens:,} in all",
        f"memory of each of {devices} device(s), {parallel}: about {gigabytes(sum(needs.values()))}; {here}",
        "  " + ", ".join(f"{part} {gigabytes(size)}" for part, size in needs.items()),
    ]


# ------------------------------------------------------------------------------------------------------ the run


def train(recipe: Recipe, out: str | Path, *, parallel: str = "ddp", restart: bool = False) -> dict[str, Any]:
    """Train, or resume from the newest checkpoint in `out`. Returns the summary that is saved at the end.

    parallel: "ddp" or "fsdp", with several processes (torchrun). restart: remove an earlier run in `out`.
    A signal (Ctrl-C, SIGTERM) saves a checkpoint after the current step and then has its usual effect.
    """
    run, state = Path(out), distributed_state()
    if parallel not in ("ddp", "fsdp"):
        raise ValueError(f"--parallel must be ddp or fsdp, got {parallel!r}")
    if parallel == "fsdp" and state.num_processes == 1:
        raise ValueError("--parallel fsdp needs several processes: expected torchrun to start them, got 1")
    if not (restart and (run / RECIPE).exists()):
        _check_folder(recipe, run)
        if (run / SUMMARY).exists():
            print(f"{run}: finished already. --restart trains again, another --out starts another run")
            return dict(read_json(run / SUMMARY))
    with locked(run) if state.is_main_process else nullcontext():
        if restart and state.is_main_process and (run / RECIPE).exists():
            for path in [path for path in run.iterdir() if path.name != LOCK]:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        state.wait_for_everyone()
        return _train(recipe, run, parallel)


def _check_folder(recipe: Recipe, run: Path) -> None:
    """Refuse a folder that is neither new nor a run of the same recipe."""
    if (run / RECIPE).exists():
        before, now = read_json(run / RECIPE), json.loads(json.dumps(asdict(recipe)))
        keys = [key for key in {**before, **now} if key not in MAY_CHANGE and before.get(key) != now.get(key)]
        if keys:
            changes = ", ".join(f"{key} was {before.get(key)!r}, is {now.get(key)!r}" for key in keys)
            raise ValueError(f"{run} holds a run of another recipe: {changes}. Choose another --out, or give --restart")
    elif run.exists() and any(path.name != LOCK for path in run.iterdir()):
        raise ValueError(
            f"{run} must be new, empty or the folder of a run, got a folder with other files: choose another --out"
        )


def _train(recipe: Recipe, run: Path, parallel: str) -> dict[str, Any]:
    state = distributed_state()
    # Transformers would show a progress bar for every file that is saved or loaded.
    logging.disable_progress_bar()
    set_seed(recipe.seed)
    inputs = load_inputs(recipe)
    model = make_model(recipe, inputs)
    if recipe.loss_rows:
        use_chunked_loss(model, recipe.loss_rows)
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(run / "tensorboard")
    stop = StopAfterStep()
    trainer = LucidTrainer(
        recipe,
        model=model,
        args=training_arguments(recipe, run, state.num_processes, len(inputs.validation), parallel),  # type: ignore[arg-type]
        train_dataset=inputs.train,
        eval_dataset=inputs.validation,
        data_collator=default_data_collator,
        processing_class=inputs.tokenizer,
        callbacks=[Record(run), stop],
    )
    if parallel == "fsdp" and not trainer.is_fsdp_enabled:
        raise ValueError("--parallel fsdp needs GPUs: accelerate does not divide a model between processes on CPUs")
    # The folder is written only now: a command that failed above leaves no run.
    if state.is_main_process:
        run.mkdir(parents=True, exist_ok=True)
        write_whole(run / RECIPE, json.dumps(asdict(recipe), indent=1))
    state.wait_for_everyone()
    checkpoint = newest_checkpoint(run)
    if checkpoint is not None:
        read_json(checkpoint / "trainer_state.json")
        if not any(checkpoint.glob("optimizer*")):
            raise ValueError(f"{checkpoint} must hold the state of the optimizer, which Trainer would begin anew")
        if state.is_main_process:
            print(f"resuming from {checkpoint}")
    with stop.handlers():
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if stop.number and trainer.state.global_step < recipe.steps:
        signal.raise_signal(stop.number)
        raise KeyboardInterrupt
    return _finish(trainer, recipe, run, inputs.vocab_size)


def training_arguments(
    recipe: Recipe, run: Path, processes: int, validation_size: int, parallel: str = "ddp"
) -> TrainingArguments:
    """A recipe as arguments of transformers.Trainer. validation_size: number of validation sequences."""
    at_once = recipe.micro_batch_size * processes
    if recipe.batch_size % at_once:
        raise ValueError(
            f"batch_size must be a multiple of micro_batch_size × processes = {recipe.micro_batch_size} × {processes}, "
            f"got {recipe.batch_size}"
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
        adam_epsilon=recipe.adam_eps,
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
        save_total_limit=recipe.keep,
        prediction_loss_only=True,
        remove_unused_columns=False,
        # `Passes` shuffles. A resumed run continues at its index.
        train_sampling_strategy="sequential",
        dataloader_num_workers=recipe.workers,
        dataloader_pin_memory=torch.cuda.is_available(),
        seed=recipe.seed,
        report_to=["tensorboard"],
        ddp_find_unused_parameters=False,
        # FSDP2, a unit for each decoder layer. Every process saves its own part.
        fsdp=parallel == "fsdp" or None,
        fsdp_config={"version": 2, "state_dict_type": "SHARDED_STATE_DICT"} if parallel == "fsdp" else None,
    )


class LucidTrainer(Trainer):
    """transformers.Trainer that averages validation losses by labels, and logs tokens per second."""

    def __init__(self, recipe: Recipe, **kwargs: Any) -> None:
        self.recipe = recipe
        super().__init__(**kwargs)
        validation = kwargs["eval_dataset"]
        counts = [int((validation[i]["labels"][1:] != IGNORED).sum()) for i in range(len(validation))]
        self._labels_per_sequence = sum(counts) / len(counts)
        self._last_log = (time.monotonic(), 0)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[torch.Tensor, None, None]:
        """Weight the loss of a batch by its number of labels, because Trainer averages over sequences."""
        loss, _, _ = super().prediction_step(model, inputs, True, ignore_keys)
        labels = (inputs["labels"][:, 1:] != IGNORED).sum().to(loss.device)
        return loss * labels / len(inputs["labels"]) / self._labels_per_sequence, None, None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            now, step = time.monotonic(), self.state.global_step
            before, last_step = self._last_log
            if last_step and step > last_step:
                tokens = (step - last_step) * self.recipe.batch_size * self.recipe.sequence_length
                logs["tokens_per_second"] = round(tokens / (now - before), 1)
            self._last_log = (now, step)
        super().log(logs, start_time)


class Record(TrainerCallback):
    """Writes every log entry as a line of metrics.jsonl, and stops a run that diverges.

    A resumed run begins with the entries of its checkpoint.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / METRICS

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # A resumed state has the intervals of its checkpoint. Replace them by those of the recipe.
        state.compute_steps(args, state.max_steps)
        if state.is_world_process_zero:
            write_whole(self.path, "".join(_line(entry["step"], entry) for entry in state.log_history))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Refuse a gradient that is not finite, before the weights change. A loss that is not finite has none."""
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if not math.isfinite(norm):
            raise ValueError(
                f"the gradient became {norm} in step {state.global_step + 1}, before the weights were changed. Earlier "
                "checkpoints are good: to train on with other settings, start another run from one (--from CHECKPOINT "
                "--out ANOTHER), with a lower learning_rate or clip"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        # Trainer logs the mean loss since the last entry. A checkpoint does not hold that sum: log before saving.
        control.should_log |= control.should_save
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs:
            with self.path.open("a") as file:
                file.write(_line(state.global_step, logs))


def _line(step: int, logs: dict[str, Any]) -> str:
    numbers = {key: value for key, value in logs.items() if isinstance(value, (int, float)) and key != "step"}
    # Sorted, as in checkpoints: a resumed run writes the same lines.
    return json.dumps({"step": step, **dict(sorted(numbers.items()))}) + "\n"


class StopAfterStep(TrainerCallback):
    """On Ctrl-C or SIGTERM, in any process: finish the step, save a checkpoint, stop."""

    def __init__(self) -> None:
        self.number = 0

    @contextmanager
    def handlers(self) -> Iterator[None]:
        """Handle both signals while the block runs. A second one stops at once, unless torchrun sends it."""
        alone = distributed_state().num_processes == 1

        def note(number: int, frame: FrameType | None) -> None:
            if self.number and alone:
                raise KeyboardInterrupt
            if not self.number and distributed_state().is_main_process:
                print("\nstopping after this step, with a checkpoint", file=sys.stderr, flush=True)
            self.number = number

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if args.world_size > 1:
            # All processes must stop in the same step.
            number = torch.tensor(self.number, device=args.device)
            torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX)
            self.number = int(number)
        if self.number:
            control.should_log = control.should_save = control.should_training_stop = True
        return control


def newest_checkpoint(run: Path) -> Path | None:
    """The newest checkpoint of a run that was written to the end: trainer_state.json is its last file."""
    whole = [file.parent for file in run.glob("checkpoint-*/trainer_state.json")]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def what_is_kept(out: Path) -> str:
    """What a stopped run left, in words."""
    checkpoint = newest_checkpoint(out)
    if checkpoint is None:
        return "no checkpoint was saved yet: the same command starts from the beginning"
    return f"{checkpoint} is saved: the same command resumes from it"


def _finish(trainer: LucidTrainer, recipe: Recipe, run: Path, vocab_size: int) -> dict[str, Any]:
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    is_evaluated = bool(evaluations) and evaluations[-1]["step"] == trainer.state.global_step
    evaluation = evaluations[-1] if is_evaluated else trainer.evaluate()
    partial = partial_path(run / MODEL)
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(str(partial))
    entries = trainer.state.log_history
    speeds = [entry["tokens_per_second"] for entry in entries if "tokens_per_second" in entry]
    summary = {
        "steps": trainer.state.global_step,
        "tokens": recipe.tokens,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "vocab_size": vocab_size,
        "validation_loss": evaluation["eval_loss"],
        "median_tokens_per_second": median(speeds) if speeds else None,
        "model": str(run / MODEL),
    }
    trainer.accelerator.wait_for_everyone()
    if trainer.args.should_save:
        # A pickle that nothing reads.
        (partial / "training_args.bin").unlink(missing_ok=True)
        finish_folder(partial, run / MODEL)
        role = recipe.attention if isinstance(recipe.attention, str) else "hybrid"
        write_png(loss_figure(entries, role, recipe.about), run / "loss.png")
        write_whole(run / SUMMARY, json.dumps(summary, indent=1))
    trainer.accelerator.wait_for_everyone()
    return summary
