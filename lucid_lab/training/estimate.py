"""What a run needs: memory of every GPU, and hours, before anything is allocated.

Operations are counted. Activations are measured on tensors without content (`FakeTensorMode`), in models of one and two
layers, and grow in proportion to the tokens and layers. What operators of this package allocate inside is not seen:
tiles of a fixed size for LUCID, about a fifth of all memory for PaTH.
"""

import json
import weakref
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lucid_attention.memory import gigabytes
from lucid_attention.messages import did_you_mean
from lucid_attention.models.decoder.configuration import LucidConfig
from lucid_attention.models.decoder.modeling import LucidForCausalLM
from lucid_attention.nn.attention import ATTENTIONS
from lucid_attention.nn.recurrent import RecurrentAttention

from ..data.shards import MANIFEST, read_manifest
from .inputs import VOCAB_SIZE, new_config, read_config, token_folder_path
from .limits import vocabulary
from .recipe import Recipe

FLOAT32 = 4
# Tokens of the two measurements of activations. Attentions that work in chunks have shorter ones.
LENGTHS = (1024, 2048)
# Tokens of a chunk of the recurrent attentions.
CHUNK = 64
# The share of its operations a second that a GPU reaches in training of this kind.
REACHED = 0.4
# CUDA's own memory, buffers of the libraries, tiles of the solve.
WORKSPACE = 2_000_000_000


class Device(NamedTuple):
    """A GPU: its memory in bytes, and operations a second in bfloat16 (dense) and in float32."""

    memory: float
    bfloat16: float
    float32: float


DEVICES = {
    "A100": Device(80e9, 312e12, 19.5e12),
    "H100": Device(80e9, 989e12, 67e12),
    "H200": Device(141e9, 989e12, 67e12),
}


@dataclass(frozen=True)
class Estimate:
    """The needs of a run on `gpus` GPUs of the kind `device`.

    parameters: number of weights of the model.
    memory: bytes on each GPU at its fullest moment, by part. activations: what all layers keep for the backward pass,
        with checkpointing if the recipe has it. working: the larger one of `working`.
    activations: the same {"with checkpointing": ..., "without checkpointing": ...}.
    working: bytes {"loss": of the logits and their gradients, "layer": of the backward pass of one layer}. They are
        not needed at the same time.
    operations, float32_operations: of the whole run; the second are those of the first that stay in float32.
    hours: of the run, at REACHED of the operations a second; evaluation and data are not counted.
    """

    gpus: int
    device: str
    parameters: int
    memory: dict[str, int]
    activations: dict[str, int]
    working: dict[str, int]
    operations: float
    float32_operations: float
    hours: float

    @property
    def memory_bytes(self) -> int:
        """Bytes on each GPU, all parts together."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether the run fits in the memory of the GPU."""
        return self.memory_bytes <= DEVICES[self.device].memory

    @property
    def gpu_hours(self) -> float:
        """Hours of all GPUs together."""
        return self.hours * self.gpus

    def lines(self) -> list[str]:
        """The estimate for a reader."""
        device = DEVICES[self.device]
        parts = ", ".join(f"{name} {gigabytes(size)}" for name, size in self.memory.items() if size)
        both = ", ".join(f"{gigabytes(size)} {name}" for name, size in self.activations.items())
        working = " or ".join(f"{name} {gigabytes(size)}" for name, size in self.working.items())
        fits = "fits" if self.fits else "DOES NOT FIT"
        return [
            f"memory of each GPU: {gigabytes(self.memory_bytes)} of {gigabytes(int(device.memory))}: {fits}",
            f"  {parts}",
            f"  activations: {both}; working: {working}",
            f"time: {self.hours:,.1f} hours on {self.gpus} × {self.device} ({self.gpu_hours:,.0f} GPU hours), "
            f"{self.parameters:,} parameters, {self.operations:.2e} operations",
        ]


def estimate(recipe: Recipe, gpus: int = 1, device: str = "H100", *, parallel: str = "ddp") -> Estimate:
    """What a recipe needs on each of `gpus` GPUs of the kind `device`, one of DEVICES. Nothing has to be there yet.

    A recipe with `start` is judged by that model if it is there. parallel: "ddp" or "fsdp", as in `train`.
    """
    if device not in DEVICES:
        raise ValueError(f"--gpu must be one of {', '.join(DEVICES)}, got {device!r}{did_you_mean(device, DEVICES)}")
    if gpus < 1:
        raise ValueError(f"--gpus must be at least 1, got {gpus}")
    config = _config(recipe)
    counts = _parameters(_key(config))
    is_narrow = recipe.precision == "bfloat16"
    tokens = recipe.micro_batch_size * recipe.sequence_length
    kept_by_layers, layer = _activations(config, tokens, is_narrow, recipe.gradient_checkpointing)
    inputs = tokens * FLOAT32 * config.hidden_size * config.num_hidden_layers
    activations = {"with checkpointing": inputs, "without checkpointing": kept_by_layers}
    working = {"loss": _loss(config, tokens, recipe.loss_rows, is_narrow), "layer": layer}
    memory = {
        **_state(counts, gpus, parallel, is_narrow),
        "activations": inputs if recipe.gradient_checkpointing else kept_by_layers,
        "working": max(working.values()),
        "workspace": WORKSPACE,
    }
    operations, float32_operations = _operations(recipe, config, counts)
    speeds = DEVICES[device]
    fast = speeds.bfloat16 if is_narrow else speeds.float32
    seconds = ((operations - float32_operations) / fast + float32_operations / speeds.float32) / REACHED / gpus
    return Estimate(
        gpus=gpus,
        device=device,
        parameters=counts.total,
        memory=memory,
        activations=activations,
        working=working,
        operations=operations,
        float32_operations=float32_operations,
        hours=seconds / 3600,
    )


def _config(recipe: Recipe) -> LucidConfig:
    if recipe.start is not None and (Path(recipe.start) / "config.json").is_file():
        config = read_config(recipe.start).get_text_config(decoder=True)
        if isinstance(config, LucidConfig):
            return config
    # Also for a checkpoint that an earlier command has still to make.
    of_data = _data_vocabulary(recipe)
    return new_config(recipe, **({} if of_data is None else {"vocab_size": vocabulary(recipe, of_data)}))


def _data_vocabulary(recipe: Recipe) -> int | None:
    """The vocabulary of the data, None if there are none yet: then that of the preset stands for it."""
    folder = token_folder_path(recipe)
    if folder is not None and (folder / MANIFEST).is_file():
        return int(read_manifest(folder)["tokenizer"]["vocab_size"])
    return recipe.data_options.get("vocab_size", VOCAB_SIZE) if recipe.data == "stdlib" else None


class _Counts(NamedTuple):
    """Numbers of weights: all, of the largest layer, and outside the layers (embedding, last norm, head)."""

    total: int
    layer: int
    ends: int


def _key(config: LucidConfig) -> str:
    """The fields of a configuration that decide about its size, for caches."""
    fields = config.to_dict() | {"max_position_embeddings": 0, "rope_theta": config.rope_theta and 10_000.0}
    fields.pop("rope_parameters", None)
    return json.dumps(fields, sort_keys=True, default=str)


def _of_key(key: str, **changes: Any) -> LucidConfig:
    fields = json.loads(key) | {"max_position_embeddings": max(LENGTHS), "use_cache": False} | changes
    config: LucidConfig = LucidConfig.from_dict(fields)
    return config


@lru_cache
def _parameters(key: str) -> _Counts:
    with torch.device("meta"):
        model: Any = LucidForCausalLM(_of_key(key))
    total = _size(model)
    layers = [_size(layer) for layer in model.model.layers]
    return _Counts(total, max(layers), total - sum(layers))


def _size(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def _state(counts: _Counts, gpus: int, parallel: str, is_narrow: bool) -> dict[str, int]:
    """Bytes of weights, gradients and the two moments of AdamW, all in float32."""
    owned = counts.total if parallel == "ddp" or gpus == 1 else -(-counts.total // gpus)
    # Autocast keeps the narrow weights of a forward pass. With FSDP those of a layer, and what is gathered for it.
    narrow = 2 * counts.total if is_narrow else 0
    others = 0
    if gpus > 1:
        others = FLOAT32 * counts.total if parallel == "ddp" else FLOAT32 * (counts.ends + 2 * counts.layer)
    return {
        "weights": FLOAT32 * owned + narrow,
        "gradients": FLOAT32 * owned,
        "optimizer": 2 * FLOAT32 * owned,
        "exchange": others,
    }


def _activations(config: LucidConfig, tokens: int, is_narrow: bool, checkpointing: bool) -> tuple[int, int]:
    """Bytes that all layers keep without checkpointing, and what the backward pass of a layer needs besides.

    With checkpointing, a layer's backward pass first makes again what the layer would have kept.
    """
    key = _key(config)
    measured = {
        name: _slopes(key, name, json.dumps(config.options_of(name)), is_narrow)
        for name in dict.fromkeys(config.layer_attentions)
    }
    kept = sum(measured[name].layer for name in config.layer_attentions)
    besides = max(slopes.peak - (0 if checkpointing else slopes.layer) for slopes in measured.values())
    return round(tokens * kept), round(tokens * besides)


class _Slopes(NamedTuple):
    """Bytes for every token: that a layer keeps, and the most that a model of one layer has at any time."""

    layer: float
    peak: float


@lru_cache
def _slopes(key: str, attention: str, options: str, is_narrow: bool) -> _Slopes:
    def measured(layers: int, tokens: int) -> tuple[int, int]:
        changes = {"attention": attention, "attention_options": json.loads(options), "num_hidden_layers": layers}
        config = _of_key(key, vocab_size=64, pad_token_id=None, bos_token_id=None, eos_token_id=None, **changes)
        return measure_activations(config, tokens, is_narrow)

    short, long = LENGTHS
    one, one_longer = measured(1, short), measured(1, long)
    two, two_longer = measured(2, short), measured(2, long)
    both = (two_longer[0] - two[0]) - (one_longer[0] - one[0])
    return _Slopes(both / (long - short), (one_longer[1] - one[1]) / (long - short))


def measure_activations(config: LucidConfig, tokens: int, is_narrow: bool) -> tuple[int, int]:
    """Bytes that the decoder keeps for its backward pass, and the most bytes at any time, weights not counted.

    The tensors have no content and take no memory.
    """
    with FakeTensorMode(), _Live() as live:
        model = LucidForCausalLM(config).train().model
        ids = torch.zeros(1, tokens, dtype=torch.long)
        live.start()
        kept: dict[int, int] = {}
        weights = {weight.untyped_storage()._cdata for weight in model.parameters()}

        def pack(x: Tensor) -> Tensor:
            storage = x.untyped_storage()
            if storage._cdata not in weights:
                kept[storage._cdata] = storage.nbytes()
            return x

        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
            torch.autocast("cpu", torch.bfloat16, enabled=is_narrow),
        ):
            h = model(input_ids=ids)[0]
        # The gradient of each weight takes its place before the peak is read: it does not depend on the tokens.
        h.backward(torch.empty_like(h))
        return sum(kept.values()), live.peak


class _Live(TorchDispatchMode):
    """Counts the bytes of the storages that are alive, from `start` on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()
        self._counts = False

    def start(self) -> None:
        self._counts = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self._add(x.untyped_storage())
        return result

    def _add(self, storage: Any) -> None:
        identity = storage._cdata
        if identity in self._known:
            return
        self._known.add(identity)
        size = storage.nbytes() if self._counts else 0
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, identity, size)

    def _remove(self, identity: int, size: int) -> None:
        self._known.discard(identity)
        self.now -= size


def _loss(config: LucidConfig, tokens: int, rows: int, is_narrow: bool) -> int:
    """Bytes of logits and what is made of them: `training.loss`, or all logits at once."""
    at_once = min(rows or tokens, tokens)
    # In float32: logits, their softmax twice; with autocast also the narrow logits and their narrow gradient.
    logits = at_once * config.vocab_size * (3 * FLOAT32 + (4 if is_narrow else 0))
    # The gradient of the head is summed in float32 beside the one of the last rows; that of the last layer is kept.
    return logits + (FLOAT32 * config.hidden_size * (2 * config.vocab_size + tokens) if rows else 0)


def _operations(recipe: Recipe, config: LucidConfig, counts: _Counts) -> tuple[float, float]:
    """Floating point operations of a run, and those of them that are in float32 whatever the precision.

    Two for every weight and token; the products of scores and values, of LUCID's solve and of PaTH; twice that in the
    backward pass. With checkpointing, those of the layers once more.
    """
    head = config.vocab_size * config.hidden_size
    embedding = 0 if config.tie_word_embeddings else head
    layers, narrow, wide = counts.total - head - embedding, 0.0, 0.0
    for name in config.layer_attentions:
        products, solve = _products(config, name, recipe.sequence_length)
        narrow, wide = narrow + products, wide + solve
    passes = 4 if recipe.gradient_checkpointing else 3
    tokens = recipe.steps * recipe.batch_size * recipe.sequence_length
    in_float32 = passes * tokens * wide
    return tokens * (passes * (2 * layers + narrow) + 3 * 2 * head) + in_float32, in_float32


def _products(config: LucidConfig, name: str, length: int) -> tuple[float, float]:
    """Operations for a token in a forward pass: of the scores and values, and of what stays in float32."""
    assert config.head_dim is not None
    assert config.num_key_value_heads is not None
    # Two products, two operations for each number.
    of_head = 4 * config.head_dim
    if issubclass(ATTENTIONS[name], RecurrentAttention):
        return 0.0, of_head * (CHUNK + 2 * config.head_dim) * config.num_attention_heads
    window = min(config.options_of(name).get("window", length), length)
    # The mean number of keys that a query sees.
    visible = window - window * (window - 1) / (2 * length)
    scores = of_head * visible * config.num_attention_heads
    solve = of_head * visible * config.num_key_value_heads if "lucid" in name else 0.0
    return (0.0, scores + solve) if "path" in name else (scores, solve)
