"""The settings of LUCID in a configuration of Transformers: its field `lucid`, a dictionary that is saved with it.

A configuration with this field is one of a LUCID model.
"""

from dataclasses import asdict, dataclass, fields
from operator import index
from typing import Any

from ...messages import did_you_mean
from ...ops.checks import check_positive, check_strength

NAME = "lucid"


@dataclass(frozen=True)
class LucidSettings:
    """LUCID in an existing architecture.

    layers: indices of the layers that read preconditioned values; None for all with full attention.
    strength: s in P = I + s·L, from 0 (softmax attention) to 1 (LUCID).
    sharpness: c in P_ij = exp(c (cos θ_ij − 1)); None for √D.
    """

    layers: tuple[int, ...] | None = None
    strength: float = 1.0
    sharpness: float | None = None

    def __post_init__(self) -> None:
        check_strength(self.strength)
        check_positive("sharpness", self.sharpness)
        if self.layers is None:
            return
        if isinstance(self.layers, (str, bytes)) or not hasattr(self.layers, "__iter__"):
            raise TypeError(f"layers must be a list of layer indices or None, got {self.layers!r}")
        object.__setattr__(self, "layers", tuple(self.layers))
        for layer in self.layers:
            if isinstance(layer, bool) or not hasattr(layer, "__index__"):
                raise TypeError(f"layers must be a list of integers, got {layer!r} in it")
        if not len(tuple(self.layers)):
            raise ValueError("layers must hold at least one layer, got none: None means all, strength=0 means off")
        object.__setattr__(self, "layers", tuple(sorted({index(layer) for layer in self.layers})))

    @classmethod
    def from_dict(cls, saved: Any) -> "LucidSettings":
        """The settings in the field of a configuration; the defaults for None."""
        if saved is None:
            return cls()
        if not isinstance(saved, dict):
            raise TypeError(f"config.{NAME} must be a dictionary, got {type(saved).__name__}")
        known = [field.name for field in fields(cls)]
        for key in saved:
            if key not in known:
                raise ValueError(
                    f"config.{NAME} has an unknown key {key!r}{did_you_mean(key, known)}: expected some of {known}"
                )
        return cls(**saved)

    def to_dict(self) -> dict[str, Any]:
        """The dictionary that is saved with a configuration."""
        return asdict(self) | {"layers": None if self.layers is None else list(self.layers)}


class LucidName(str):
    """The name "lucid", which carries the settings of a model along.

    Tools copy a model by its path and config._attn_implementation. So the settings must be in there.
    """

    settings: dict[str, Any]

    def __new__(cls, settings: dict[str, Any]) -> "LucidName":
        """settings: the dictionary in a configuration. It is not copied: the name knows the current strength."""
        self = super().__new__(cls, NAME)
        self.settings = settings
        return self

    def __getnewargs__(self) -> tuple[Any]:
        return (self.settings,)


class CompositeName(str):
    """The name in a configuration of several parts, one of which is LUCID: the name of the other parts.

    part, config: name and configuration of the part with LUCID.
    """

    part: str
    config: Any

    def __new__(cls, name: str, part: str, config: Any) -> "CompositeName":
        self = super().__new__(cls, name)
        self.part, self.config = part, config
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        return str(self), self.part, self.config


def uses_lucid(config: Any) -> bool:
    """Whether the models of this configuration attend with LUCID."""
    implementation = getattr(config, "_attn_implementation", None)
    return implementation == NAME or (implementation is None and getattr(config, NAME, None) is not None)


def put_settings(config: Any, settings: LucidSettings) -> None:
    """Make this the configuration of a LUCID model."""
    setattr(config, NAME, settings.to_dict())
    # `_attn_implementation` would set the parts of this configuration too.
    config._attn_implementation_internal = LucidName(getattr(config, NAME))


def drop_settings(config: Any) -> None:
    """Make this a configuration without LUCID."""
    config.__dict__.pop(NAME, None)


def parts_of(config: Any) -> dict[str, Any]:
    """The parts of a composite configuration by their names, such as "text_config"."""
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    return {name: part for name, part in parts.items() if part is not None}


def full_layers(layer_types: list[str]) -> list[int]:
    """The indices of layers that see the whole past. Only these can be LUCID."""
    return [i for i, kind in enumerate(layer_types) if kind == "full_attention"]


def check_layers(settings: LucidSettings, layer_types: list[str]) -> None:
    """Refuse layers that the model does not have, or that do not see the whole past."""
    count, full = len(layer_types), full_layers(layer_types)
    for layer in settings.layers or ():
        if not 0 <= layer < count:
            raise ValueError(f"layers must be indices of the model's {count} layers, 0 to {count - 1}, got {layer}")
        if layer not in full:
            raise ValueError(
                f"layer {layer} has {layer_types[layer]!r}: LUCID preconditions over the whole past and needs full "
                f"attention, which layers {full} have"
            )
    if not full:
        raise ValueError(
            f"LUCID needs at least one layer with full attention, got only {sorted(set(layer_types))}, "
            "which do not keep all keys that P is made of"
        )


def check_config(config: Any) -> None:
    """`check_layers` for a configuration."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        windows = ("sliding_window", "attention_chunk_size")
        local = any(getattr(config, name, None) is not None for name in windows)
        kinds = ["sliding_attention" if local else "full_attention"] * config.num_hidden_layers
    check_layers(LucidSettings.from_dict(getattr(config, NAME, None)), kinds)
