"""What LUCID adds to an attention module of Transformers: its settings, and the tensors that hold their values."""

import math
from dataclasses import asdict, dataclass
from operator import index
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..ops.checks import check_center, check_positive, check_strength
from ..ops.keys import KeyMap, calibrated_key_map

# The field of a configuration, the name of the module in every attention, and the attn_implementation.
NAME = "lucid"
LEARNABLE = ("sharpness", "strength")
ALL = slice(None)


@dataclass(frozen=True)
class LucidSettings:
    """LUCID in an existing architecture, as its configuration holds it: structure, and the values of a new model.

    The state dict holds the present values, per layer and key/value head.

    layers: indices of the layers that read preconditioned values; None for all with full attention.
    strength: s in P = I + s·L, from 0 (softmax attention) to 1 (LUCID).
    sharpness: c in P_ij = exp(c (cos θ_ij − 1)); None for √D.
    learned: names in `LEARNABLE` that are parameters; others are buffers.
    center, whiten: P is made of (k − center) @ matrix; see `enable_lucid`.
    """

    layers: tuple[int, ...] | None = None
    strength: float = 1.0
    sharpness: float | None = None
    learned: tuple[str, ...] = ()
    center: str = "none"
    whiten: bool = False

    def __post_init__(self) -> None:
        check_strength(self.strength)
        check_center(self.center, self.whiten)
        check_positive("sharpness", self.sharpness, optional=True)
        object.__setattr__(self, "learned", (self.learned,) if isinstance(self.learned, str) else tuple(self.learned))
        for name in self.learned:
            if name not in LEARNABLE:
                raise ValueError(f"learned must hold names among {', '.join(LEARNABLE)}, got {name!r}")
        if self.layers is None:
            return
        try:
            layers = tuple(sorted({index(layer) for layer in self.layers}))
        except TypeError as error:
            raise TypeError(f"layers must be a list of layer indices or None, got {self.layers!r}") from error
        if not layers:
            raise ValueError("layers must hold at least one layer, got none: None means all, strength=0 means off")
        object.__setattr__(self, "layers", layers)

    @classmethod
    def from_dict(cls, saved: Any) -> "LucidSettings":
        """The settings in the field of a configuration; the defaults for None."""
        return cls() if saved is None else cls(**saved)

    def to_dict(self) -> dict[str, Any]:
        """The dictionary that is saved with a configuration."""
        lists = {"layers": None if self.layers is None else list(self.layers), "learned": list(self.learned)}
        return asdict(self) | lists


class Preconditioner(nn.Module):
    """LUCID's values in one attention module, per key/value head: all that the solve needs besides keys and values.

    sharpness, strength: [H]; center: [H, D] and matrix: [H, D, D] or None. Buffers, or parameters if they are learned.

    Args:
        heads: H.
        head_dim: D.
        settings: the values to begin with.
    """

    sharpness: Tensor
    strength: Tensor
    center: Tensor | None
    matrix: Tensor | None

    def __init__(self, heads: int, head_dim: int, settings: LucidSettings) -> None:
        super().__init__()
        self.heads, self.head_dim, self.learned = heads, head_dim, settings.learned
        self.structure = structure(settings)
        # Whether a graph needs the strength: at 1 the solve has no factor.
        self.gated = settings.strength != 1 or "strength" in settings.learned
        # By name: the tensor, its version, and the number that all heads have, or None.
        self._numbers: dict[str, tuple[Tensor, int, float | None]] = {}
        values = {name: torch.full((heads,), value) for name, value in self.initial(settings).items()}
        center = torch.zeros(heads, head_dim) if settings.center != "none" else None
        matrix = torch.eye(head_dim).repeat(heads, 1, 1) if settings.whiten else None
        for name, x in {**values, "center": center, "matrix": matrix}.items():
            if x is not None and (name in settings.learned or (name not in values and settings.center == "learned")):
                self.register_parameter(name, nn.Parameter(x))
            else:
                self.register_buffer(name, x)
        # What is loaded may differ from the configuration, as in an adapter with modules_to_save.
        self.register_load_state_dict_post_hook(_expect_any_strength)

    def initial(self, settings: LucidSettings) -> dict[str, float]:
        """The values of a new model, besides the map of the keys."""
        c = math.sqrt(self.head_dim) if settings.sharpness is None else settings.sharpness
        return {"sharpness": c, "strength": settings.strength}

    @torch.no_grad()
    def set_values(self, settings: LucidSettings) -> None:
        """Set all heads to these values. What was learned or calibrated stays."""
        for name, value in self.initial(settings).items():
            if name not in self.learned:
                getattr(self, name).fill_(value)
        self.gated = settings.strength != 1 or "strength" in self.learned

    @property
    def key_map(self) -> KeyMap | None:
        """The map of the keys of P; None without a center."""
        return None if self.center is None else KeyMap(self.center, self.matrix)

    @torch.no_grad()
    def calibrate(self, k: Tensor, key_mask: Tensor | None = None) -> None:
        """Set center and matrix to those of sample keys; see `calibrated_key_map`."""
        if self.key_map is None:
            raise ValueError("calibration needs center='learned' or center='calibrated', got center='none'")
        found = calibrated_key_map(k, key_mask, whiten=self.matrix is not None)
        for own, value in zip(self.key_map, found, strict=True):
            if own is not None and value is not None:
                own.copy_(value)

    def forward(self, k: Tensor, heads: slice = ALL) -> dict[str, Any]:
        """Arguments of the operators for keys k: [B, H, T, D]. strength may be a tensor [H]: see `attention.gated`.

        heads: of this process, if it has some of them.
        """
        c = self._of_heads("sharpness", heads)
        key_map = None if self.key_map is None else KeyMap(*(None if x is None else x[heads] for x in self.key_map))
        options = {"sharpness": c.clamp(min=1e-2) if "sharpness" in self.learned else c, "key_map": key_map}
        if self.gated or not torch.compiler.is_compiling():
            s = self._of_heads("strength", heads)
            # A gate that training moves out of [0, 1] keeps its gradient, to come back.
            options["strength"] = s + (s.clamp(0, 1) - s).detach() if isinstance(s, Tensor) else s
        return options

    def _of_heads(self, name: str, heads: slice) -> Any:
        """The number that all heads have, with which the solve is faster; or a tensor of the heads."""
        x = getattr(self, name)
        number = None if name in self.learned else self._number(name, x)
        return x[heads] if number is None else number

    def _number(self, name: str, x: Tensor) -> float | None:
        """Read once after a change: reading waits for the device. None in a graph, which would fix the number."""
        if torch.compiler.is_compiling() or type(x) is not Tensor or x.is_meta or x.is_inference():
            return None
        known = self._numbers.get(name)
        if known is None or known[0] is not x or known[1] != x._version:
            values = set(x.tolist())
            known = self._numbers[name] = (x, x._version, values.pop() if len(values) == 1 else None)
        return known[2]

    def extra_repr(self) -> str:
        _, center, whiten = self.structure
        return f"heads={self.heads}, learned={list(self.learned)}, center={center!r}, whiten={whiten}"


def structure(settings: LucidSettings) -> tuple[Any, ...]:
    """What decides which parameters and buffers a `Preconditioner` has."""
    return settings.learned, settings.center, settings.whiten


def heads_here(attention: nn.Module, k: Tensor) -> slice:
    """The key/value heads of keys k: [B, H, T, D] of this process: some under tensor parallelism, otherwise all."""
    if k.shape[1] == getattr(attention, NAME).heads:
        return ALL
    divided = next(weight for weight in attention.parameters() if isinstance(weight, DTensor))
    first = divided.device_mesh.get_local_rank() * k.shape[1]
    return slice(first, first + k.shape[1])


def _expect_any_strength(module: Any, incompatible_keys: Any) -> None:
    module.gated = True


def text_config(config: Any) -> Any:
    """The configuration of the text decoder."""
    return config.get_text_config(decoder=True)


def uses_lucid(config: Any) -> bool:
    """Whether the models of this configuration attend with LUCID."""
    return getattr(config, NAME, None) is not None


def layer_kinds(config: Any) -> list[str]:
    """The kind of attention of every layer."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return list(kinds)
    windows = ("sliding_window", "attention_chunk_size")
    local = any(getattr(config, name, None) is not None for name in windows)
    return ["sliding_attention" if local else "full_attention"] * config.num_hidden_layers


def lucid_layers(config: Any) -> list[int]:
    """The layers that read preconditioned values."""
    layers = LucidSettings.from_dict(getattr(config, NAME, None)).layers
    return full_layers(layer_kinds(config)) if layers is None else list(layers)


def full_layers(kinds: list[str]) -> list[int]:
    """The indices of layers that see the whole past. Only these can be LUCID."""
    return [i for i, kind in enumerate(kinds) if kind == "full_attention"]


def check_layers(settings: LucidSettings, config: Any) -> None:
    """Refuse layers that the model does not have, or that do not see the whole past."""
    kinds = layer_kinds(config)
    count, full = len(kinds), full_layers(kinds)
    if getattr(config, "num_kv_shared_layers", None):
        raise ValueError(
            "LUCID needs keys and values of its own in every layer: expected num_kv_shared_layers = 0, got "
            f"{config.num_kv_shared_layers}"
        )
    for layer in settings.layers or ():
        if not 0 <= layer < count:
            raise ValueError(f"layers must be indices of the model's {count} layers, 0 to {count - 1}, got {layer}")
        if layer not in full:
            raise ValueError(
                f"layer {layer} has {kinds[layer]!r}: LUCID preconditions over the whole past and needs full "
                f"attention, which layers {full} have"
            )
    if not full:
        raise ValueError(
            f"LUCID needs at least one layer with full attention, got only {sorted(set(kinds))}, "
            "which do not keep all keys that P is made of"
        )


def head_size(config: Any) -> int:
    """The head size D of a model, from its configuration."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def kv_heads(config: Any) -> int:
    """The number of key/value heads H, from a model's configuration."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
