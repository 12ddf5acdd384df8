"""The members with a state of fixed size as contestants, their inputs, and their gate."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lucid_attention.ops.delta.api import delta_attention
from lucid_attention.ops.gla.api import gla_attention
from lucid_attention.ops.gsa.api import gsa_attention

from .. import gate
from .path_peers import derive
from .solve import Shape

SHAPE = Shape(64, 4, 4)
GATE_LENGTH = 300
# Up to here the recurrence judges one head at the length of the benchmark.
RECURRENT_LENGTH = 2048
# How much slower than a sigmoid a state decays: per head, and per channel or slot.
DECAY, CHANNEL_DECAY = 4.0, 8.0


def gated_delta_attention(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, **options: Any) -> Any:
    return delta_attention(q, k, v, beta, log_decay=log_decay, **options)


class Member(NamedTuple):
    run: Callable[..., Any]
    """Returns the output and the state."""
    gates: Callable[[Tensor, torch.Generator], list[Tensor]]
    """What it takes beside q, k, v, for keys of this shape."""
    names: tuple[str, ...]
    """Of these."""


def _strengths(k: Tensor, random: torch.Generator) -> list[Tensor]:
    return [torch.rand(k.shape[:3], generator=random)]


def _decays(shape: Sequence[int], random: torch.Generator, slowness: float) -> Tensor:
    """Logarithms of decays as trained models have them: a sigmoid, slowed down."""
    return F.logsigmoid(torch.randn(*shape, generator=random)) / slowness


def _strengths_and_decays(k: Tensor, random: torch.Generator) -> list[Tensor]:
    return [*_strengths(k, random), _decays(k.shape[:3], random, DECAY)]


def _channel_decays(k: Tensor, random: torch.Generator) -> list[Tensor]:
    return [_decays(k.shape, random, CHANNEL_DECAY)]


def _slots(k: Tensor, random: torch.Generator) -> list[Tensor]:
    """As many slots as a key has channels."""
    log_decay = _decays(k.shape, random, CHANNEL_DECAY)
    return [1 - log_decay.exp(), log_decay]


DELTA, GATED_DELTA, GLA, GSA = "delta", "gated_delta", "gla", "gsa"
MEMBERS = {
    DELTA: Member(delta_attention, _strengths, ("β",)),
    GATED_DELTA: Member(gated_delta_attention, _strengths_and_decays, ("β", "log_decay")),
    GLA: Member(gla_attention, _channel_decays, ("log_decay",)),
    GSA: Member(gsa_attention, _slots, ("s", "log_decay")),
}
# Token by token, in float64.
TRUTHS = {name: partial(member.run, impl="reference") for name, member in MEMBERS.items()}


def inputs(name: str, shape: Shape, N: int) -> list[Tensor]:
    """q, k, v, what the member takes beside them, and the gradient of the output; keys of length 1, correlated."""
    q, k, v, do = gate.inputs(*shape, N)
    k = F.normalize(k, dim=-1)
    return [q, k, v, *MEMBERS[name].gates(k, torch.Generator().manual_seed(N + 2)), do]


def evaluate(run: Callable[..., Any], tensors: Sequence[Tensor], backward: bool) -> tuple[Tensor, ...]:
    """The output and, if `backward`, the gradients of all inputs."""
    *given, do = tensors
    return derive(lambda *xs: run(*xs)[0], given, do, backward)


@cache
def check_truth(shape: Shape, N: int, backward: bool) -> None:
    """Every member against its recurrence in float64."""
    where = f"linear, {shape}, N={N}"
    for name, member in MEMBERS.items():
        tensors = inputs(name, shape, N)
        truth = evaluate(TRUTHS[name], [x.double() for x in tensors], backward)
        parts = (*gate.ATTENTION_PARTS, *(f"the gradient of {gate_}" for gate_ in member.names))
        gate.check(where, name, evaluate(member.run, tensors, backward), "the recurrence in float64", truth, parts)


@cache
def check_steps(shape: Shape) -> None:
    """Every member token by token, from state to state, against its recurrence in float64."""
    for name, member in MEMBERS.items():
        *given, _ = inputs(name, shape, GATE_LENGTH)
        outputs, state = [], None
        with torch.no_grad():
            truth = TRUTHS[name](*(x.double() for x in given))[0]
            for token in zip(*(x.split(1, 2) for x in given), strict=True):
                o, state = member.run(*token, state=state)
                outputs.append(o)
        where = f"linear, {shape}, {GATE_LENGTH} single tokens"
        gate.check(where, name, (torch.cat(outputs, 2),), "the recurrence in float64", (truth,))
