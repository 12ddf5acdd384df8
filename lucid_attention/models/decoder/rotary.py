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

# Those whose frequencies do not depend on the length of the text.
ROPE_TYPES = ("default", "linear", "yarn", "llama3")


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
            # Modules may be made on the meta device.
            with torch.device("cpu"):
                made = ROPE_INIT_FUNCTIONS[self.rope_type](LlamaConfig(rope_parameters=parameters, **shape))
        except KeyError as missing:
            raise ValueError(f"rope_parameters of rope_type {self.rope_type!r} need {missing.args[0]}") from missing
        self.fixed, self.factor = made

    def frequencies(self, positions: Tensor) -> tuple[Tensor, float]:
        # Neither a buffer (see `Rotary.frequencies`) nor copied to the device at every call.
        if self.fixed.device != positions.device:
            self.fixed = self.fixed.to(positions.device)
        return self.fixed, self.factor

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rope_type={self.rope_type!r}"


def make_rotary(head_dim: int, config: "LucidConfig") -> Rotary:
    """The rotary embedding of `config.rope_parameters` for heads of this size."""
    parameters = config.rope_parameters or {}
    if parameters["rope_type"] not in ROPE_TYPES:
        raise ValueError(
            f"rope_type must be one of {', '.join(ROPE_TYPES)}, got {parameters['rope_type']!r}"
            f"{did_you_mean(parameters['rope_type'], ROPE_TYPES)}"
        )
    if parameters["rope_type"] == "default":
        return Rotary(head_dim, parameters["rope_theta"], rotary_dim(head_dim, parameters))
    return ScaledRotary(head_dim, config)


def rotary_dim(head_dim: int, parameters: dict[str, Any]) -> int:
    """The number of features of a head that are rotated."""
    return int(head_dim * parameters.get("partial_rotary_factor", 1.0))
