"""The operators with a state of fixed size, in one table, and their recurrences written without the package.

The truth drops masked tokens and runs documents and heads one by one, so nothing in it knows the package's rules for
padding, packing and grouped queries. It runs in the dtype of its inputs: in float64 it is the truth, in a lower
precision it is the plain formula whose error ours is measured against.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lucid_attention.ops.linear.delta import delta_attention
from lucid_attention.ops.linear.gated import gla_attention, gsa_attention

from . import cases
from .cases import keys_of

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "delta": delta_attention,
    "gated_delta": delta_attention,
    "gla": gla_attention,
    "gsa": gsa_attention,
}
OPERATORS = list(FUNCTIONS)
SLOTS = 4


@dataclass(frozen=True)
class Sizes(cases.Sizes):
    """Without a past; decay: the typical log decay of a token."""

    decay: float = 0.3

    def tensors(self, operator: str, state: bool = False, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """Arguments by name; a state as state, or keys and values of the slots as state0 and state1."""
        B, H, T, D, E, M = self.B, self.H, self.T, self.D, self.E, SLOTS
        k = F.normalize(keys_of(self.keys, B, H, T, D), dim=-1)
        out = {"q": torch.randn(B, H * self.G, T, D), "k": k, "v": torch.randn(B, H, T, E)}
        if "delta" in operator:
            out["beta"] = torch.rand(B, H, T)
        if operator == "gsa":
            out["s"] = torch.randn(B, H, T, M)
        per_token = {"gated_delta": (), "gla": (D,), "gsa": (M,)}
        if operator in per_token:
            out["log_decay"] = -2 * self.decay * torch.rand(B, H, T, *per_token[operator])
        if state and operator == "gsa":
            out |= {"state0": torch.randn(B, H, D, M), "state1": torch.randn(B, H, M, E)}
        elif state:
            out["state"] = torch.randn(B, H, D, E)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return {name: x.to(wide if name.startswith("state") else dtype) for name, x in out.items()}


def call(operator: str, tensors: dict[str, Tensor], **options: Any) -> tuple[Tensor, ...]:
    """o and the state, or o and the two parts of the state."""
    arguments: dict[str, Any] = dict(tensors)
    if "state0" in arguments:
        arguments["state"] = arguments.pop("state0"), arguments.pop("state1")
    o, state = FUNCTIONS[operator](**arguments, **options)
    return (o, *state) if isinstance(state, tuple) else (o, state)


def _delta(x: dict[str, Tensor], state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    (S,), k, beta = state, x["k"], x["beta"]
    decay = x["log_decay"].exp() if "log_decay" in x else 1
    S = (torch.eye(len(k), dtype=k.dtype) - beta * torch.outer(k, k)) @ (decay * S) + beta * torch.outer(k, x["v"])
    return x["q"] @ S, (S,)


def _gla(x: dict[str, Tensor], state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    S = torch.diag(x["log_decay"].exp()) @ state[0] + torch.outer(x["k"], x["v"])
    return x["q"] @ S, (S,)


def _gsa(x: dict[str, Tensor], state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    decay = torch.diag(x["log_decay"].exp())
    keys = state[0] @ decay + torch.outer(x["k"], x["s"])
    values = decay @ state[1] + torch.outer(x["s"], x["v"])
    return torch.softmax(x["q"] @ keys, -1) @ values, (keys, values)


RULES = {"delta": _delta, "gated_delta": _delta, "gla": _gla, "gsa": _gsa}


def truth(
    operator: str,
    tensors: dict[str, Tensor],
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """What `call` returns, token by token."""
    B, heads, T, D = tensors["q"].shape
    H, E = tensors["v"].shape[1], tensors["v"].shape[3]
    names = [name for name in tensors if not name.startswith("state")]
    x = dict(tensors, q=tensors["q"] * (1 / math.sqrt(D) if scale is None else scale))
    x["q"] = x["q"].unflatten(1, (H, heads // H)).movedim(2, 3)
    sizes = [(D, SLOTS), (SLOTS, E)] if operator == "gsa" else [(D, E)]
    borders = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    rows, states = [], []
    for b in range(B):
        for h in range(H):
            zeros = tuple(tensors["v"].new_zeros(size) for size in sizes)
            state = tuple(tensors[name][b, h] for name in sorted(set(tensors) - set(names))) or zeros
            o = [torch.zeros(heads // H, E, dtype=tensors["v"].dtype)] * T
            for start, stop in pairwise(borders):
                state = zeros if cu_seqlens is not None and stop > start else state
                for t in range(start, stop):
                    if key_mask is None or key_mask[b, t]:
                        o[t], state = RULES[operator]({name: x[name][b, h, t] for name in names}, state)
            rows.append(torch.stack(o, 1))
            states.append(state)
    parts = [torch.stack(part).unflatten(0, (B, H)) for part in zip(*states, strict=True)]
    return torch.stack(rows).view(B, heads, T, E), *parts


def evaluate(
    fn: Callable[..., tuple[Tensor, ...]], operator: str, tensors: dict[str, Tensor], **options: Any
) -> dict[str, Tensor]:
    """Outputs and the gradients of a weighted sum of all of them with respect to every tensor."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    outputs = fn(operator, leaves, **options)
    generator = torch.Generator().manual_seed(0)
    # As few digits as the narrowest dtype has: every precision is asked for the same gradient.
    weights = [torch.randn(x.shape, generator=generator).bfloat16().to(x.dtype) for x in outputs]
    grads = torch.autograd.grad(outputs, list(leaves.values()), weights, allow_unused=True)
    results = {f"out{i}": x.detach() for i, x in enumerate(outputs)}
    for (name, x), grad in zip(leaves.items(), grads, strict=True):
        results[f"d{name}"] = torch.zeros_like(x) if grad is None else grad
    return results
