"""Rotary embedding with the frequencies of Transformers' `rope_parameters`."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ...messages import did_you_mean
from ...nn.rotary import Rotary

if TYPE_CHECKING:
    from .configuration import LucidConfig

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


class ScaledRotary(Rotary):
    """A rotary embedding whose frequencies Transformers computes.

    Args:
        head_dim: D, even.
        config: with rope_parameters and max_position_embeddings.
    """

    def __init__(self, head_dim: int, config: "LucidConfig") -> None:
        parameters = dict(config.rope_parameters or {})
        super().__init__(head_dim, parameters["rope_theta"], rotary_dim(head_dim, parameters))
        self.rope_type = parameters["rope_type"]
        # The functions of Transformers read these fields of a configuration.
        shape: dict[str, Any] = {"head_dim": head_dim, "max_position_embeddings": config.max_position_embeddings}
        try:
            self.config = LlamaConfig(rope_parameters=parameters, **shape)
            # Modules may be made on the meta device.
            with torch.device("cpu"):
                self.fixed, self.factor = self._compute()
                self.long = self._compute(seq_len=self.original_length + 1)[0] if self.rope_type == "longrope" else None
        except KeyError as missing:
            raise ValueError(f"rope_parameters of rope_type {self.rope_type!r} need {missing.args[0]}") from missing

    @property
    def original_length(self) -> int:
        """The length before which "longrope" takes its short factors."""
        return self.config.rope_parameters["original_max_position_embeddings"]

    def _compute(self, **options: Any) -> tuple[Tensor, float]:
        return ROPE_INIT_FUNCTIONS[self.rope_type](self.config, **options)

    def frequencies(self, positions: Tensor) -> tuple[Tensor, float]:
        device = positions.device
        # Neither a buffer (see `Rotary.frequencies`) nor copied to the device at every call.
        if self.fixed.device != device:
            self.fixed = self.fixed.to(device)
            self.long = None if self.long is None else self.long.to(device)
        if self.rope_type == "dynamic":
            return self._compute(device=device, seq_len=positions.max() + 1)
        if self.long is not None:
            return torch.where(positions.max() < self.original_length, self.fixed, self.long), self.factor
        return self.fixed, self.factor

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rope_type={self.rope_type!r}"


def make_rotary(head_dim: int, config: "LucidConfig") -> Rotary:
    """The rotary embedding of `config.rope_parameters` for heads of this size."""
    parameters = config.rope_parameters or {}
    if parameters["rope_type"] == "default":
        return Rotary(head_dim, parameters["rope_theta"], rotary_dim(head_dim, parameters))
    return ScaledRotary(head_dim, config)


def rotary_dim(head_dim: int, parameters: dict[str, Any]) -> int:
    """The number of features of a head that are rotated."""
    return int(head_dim * parameters.get("partial_rotary_factor", 1.0))


def check_rope_type(parameters: dict[str, Any]) -> None:
    rope_type = parameters["rope_type"]
    if rope_type not in ROPE_TYPES:
        raise ValueError(
            f"rope_type must be one of {', '.join(ROPE_TYPES)}, got {rope_type!r}{did_you_mean(rope_type, ROPE_TYPES)}"
        )
