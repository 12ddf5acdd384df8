"""The data and the model of a recipe."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from torch.utils.data import Dataset, Subset
from transformers import AutoModelForCausalLM, PreTrainedModel

from lucid_attention import enable_lucid
from lucid_attention.models.checkpoint import load_config, load_model, load_tokenizer
from lucid_attention.models.decoder import presets
from lucid_attention.models.decoder.configuration import LucidConfig
from lucid_attention.models.preconditioner import uses_lucid

from ..data import DataError
from ..data.context import context_lines, context_of
from ..data.datasets import PackedTokens, PromptAnswers
from ..data.shards import open_folder
from ..data.synthetic import MemoryUpdate, Needles
from ..data.tokenize import tokenize
from ..processes import distributed_state
from .limits import vocabulary
from .recipe import Recipe

SYNTHETIC: dict[str, Any] = {"needles": Needles, "memory_update": MemoryUpdate}
# Where the tokens of "stdlib" are saved.
STDLIB_FOLDER = Path("runs") / "data"
# The vocabulary of its tokenizer, unless data_options name another.
VOCAB_SIZE = 4096
# Pass i over the data has the seed `recipe.seed + SEED_STEP * i`: runs with nearby seeds share no pass.
SEED_STEP = 1_000_003
# Prompts whose length is measured to tell the context: each has to be tokenized.
CONTEXT_ITEMS = 64
# Synthetic validation items have the seed of this pass, which no run reaches.
VALIDATION_PASS = 1_000_000


class Inputs(NamedTuple):
    """The data of a run.

    train: the sequences of all steps, in order. tokenizer: None for synthetic tasks. context: lines that say how much
    context the tokens of `train` have.
    """

    train: Dataset[Any]
    validation: Dataset[Any]
    vocab_size: int
    tokenizer: Any
    context: Sequence[str] = ()


class Passes(Dataset[Any]):
    """`length` items from repeated passes over a data set. make: gives the data set of pass i, in its own order."""

    def __init__(self, make: Callable[[int], Any], length: int) -> None:
        self.make, self.length = make, length
        self._current: tuple[int, Any] | None = None
        self.size = len(self.data(0))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        number, item = divmod(index, self.size)
        return self.data(number)[item]

    def data(self, number: int) -> Any:
        """The data set of pass `number`. The last one is kept."""
        if self._current is None or self._current[0] != number:
            self._current = number, self.make(number)
        return self._current[1]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_current": None}


class _PassMaker:
    """Makes the data set of pass i. A class and not a closure, because worker processes receive it by pickle."""

    def __init__(self, kind: Any, args: tuple[Any, ...], options: dict[str, Any], seed: int) -> None:
        self.kind, self.args, self.options, self.seed = kind, args, options, seed

    def __call__(self, number: int) -> Any:
        return self.kind(*self.args, **self.options, seed=self.seed + SEED_STEP * number)


def load_inputs(recipe: Recipe) -> Inputs:
    """The data of a recipe. "stdlib" is tokenized on first use, by the first process."""
    T, sequences = recipe.sequence_length, recipe.steps * recipe.batch_size
    tokenizer = None
    options = dict(recipe.data_options)
    if recipe.data in SYNTHETIC:
        kind: Any = SYNTHETIC[recipe.data]
        args: tuple[Any, ...] = ()
        # Every item is new: the run is one pass.
        training, held_out = {**options, "length": T, "size": sequences}, {"size": recipe.evaluation_sequences}
        validation = kind(**{**training, **held_out}, seed=recipe.seed + SEED_STEP * VALIDATION_PASS)
    elif recipe.data.endswith(".jsonl"):
        if recipe.start is None:
            raise DataError(f"{recipe.data}: prompts with answers are for a trained model: give one with --from")
        tokenizer = load_tokenizer(recipe.start)
        kind, args, training = PromptAnswers, (recipe.data, tokenizer, T), options
        validation = kind(*args, **options, split="validation")
    else:
        folder = _token_folder(recipe, options)
        with distributed_state().main_process_first():
            # Later openings of the folder trust that its shards are those of the manifest.
            open_folder(folder, verify=True)
        kind, args, training = PackedTokens, (folder, T), {"separate_documents": recipe.separate_documents}
        validation = kind(*args, **training, split="validation")
        tokenizer = load_tokenizer(folder)
    train = Passes(_PassMaker(kind, args, training, recipe.seed), sequences)
    count = min(recipe.evaluation_sequences, len(validation))
    context = _context(train.data(0), recipe)
    return Inputs(train, Subset(validation, range(count)), validation.vocab_size, tokenizer, context)


def _context(data: Any, recipe: Recipe) -> list[str]:
    T = recipe.sequence_length
    if isinstance(data, PackedTokens):
        of_document = context_of(data.document_pieces())
        seen = of_document if recipe.separate_documents else context_of([T])
        return context_lines(seen, of_document, T, recipe.separate_documents)
    masks = (data[i].get("attention_mask") for i in range(min(len(data), CONTEXT_ITEMS)))
    return context_lines(context_of([T if mask is None else int(mask.sum()) for mask in masks]), None, T, False)


def _token_folder(recipe: Recipe, options: dict[str, Any]) -> Path:
    if recipe.data != "stdlib":
        if options:
            raise DataError(f"a folder of tokens has no data_options: got {options} for {recipe.data}")
        folder = Path(recipe.data)
        if not folder.is_dir():
            raise DataError(
                f"{recipe.data}: there is no such folder of tokens. Make one with: lucid tokenize SOURCE {recipe.data} "
                "--tokenizer train:32000, where SOURCE is a folder of text, hf:NAME, or stdlib"
            )
        return folder
    vocab_size = options.pop("vocab_size", VOCAB_SIZE)
    if options:
        raise DataError(f"the data 'stdlib' have one option, vocab_size, got also {sorted(options)}")
    folder = _stdlib_folder(vocab_size)
    with distributed_state().main_process_first():
        if not (folder / "manifest.json").exists():
            print(f"Tokenizing the Python standard library into {folder}, once")
            tokenize("stdlib", folder, tokenizer=f"train:{vocab_size}", validation=0.05, workers=1)
    return folder


def _stdlib_folder(vocab_size: int) -> Path:
    return STDLIB_FOLDER / f"stdlib-{vocab_size}"


def token_folder_path(recipe: Recipe) -> Path | None:
    """The folder of a recipe's tokens, whether it is there or not; None for other data."""
    if recipe.data in SYNTHETIC or recipe.data.endswith(".jsonl"):
        return None
    is_stdlib = recipe.data == "stdlib"
    return _stdlib_folder(recipe.data_options.get("vocab_size", VOCAB_SIZE)) if is_stdlib else Path(recipe.data)


def make_model(recipe: Recipe, inputs: Inputs) -> PreTrainedModel:
    """The model of a recipe: a new one, or that of its checkpoint with the recipe's length and rotary base."""
    enable_lucid()
    if recipe.start is not None:
        config = read_config(recipe.start)
        if recipe.model or recipe.attention_options:
            raise ValueError(
                f"model and attention_options are for new models: expected none with --from {recipe.start}, got "
                f"{recipe.model or recipe.attention_options}"
            )
        _check_vocabulary(config, recipe.start, inputs)
        _set_positions(config.get_text_config(decoder=True), recipe)
        model: PreTrainedModel = load_model(recipe.start, torch.float32, config=config)
        return model
    tokens: dict[str, Any] = {}
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        tokens[name] = getattr(inputs.tokenizer, name, None)
    vocab_size = vocabulary(recipe, inputs.vocab_size)
    return AutoModelForCausalLM.from_config(new_config(recipe, vocab_size=vocab_size, **tokens))


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
    return config


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


def _check_vocabulary(config: Any, start: str, inputs: Inputs) -> None:
    model_vocab_size = config.get_text_config(decoder=True).vocab_size
    if inputs.vocab_size > model_vocab_size:
        raise DataError(
            f"the model of {start} has a vocabulary of {model_vocab_size} tokens, the data one of {inputs.vocab_size}: "
            "tokenize the data with the model's own tokenizer"
        )
    if inputs.tokenizer is None or not (Path(start) / "tokenizer.json").is_file():
        return
    model_tokenizer = load_tokenizer(start)
    if model_tokenizer.get_vocab() != inputs.tokenizer.get_vocab():
        raise DataError(
            f"the data were made with another tokenizer than the model of {start}: tokenize them with the model's own"
        )


def _set_positions(config: Any, recipe: Recipe) -> None:
    config.max_position_embeddings = max(config.max_position_embeddings, recipe.sequence_length)
    if recipe.rope_theta is None:
        return
    if isinstance(config, LucidConfig):
        config.rope_theta = recipe.rope_theta
    else:
        # Gemma 3 has a base for each kind of layer. Layers with a window keep theirs.
        parameters = config.rope_parameters
        parameters.get("full_attention", parameters)["rope_theta"] = recipe.rope_theta
