"""PaTH's operators in one table, inputs for them, and the truth: every Householder factor, multiplied token by token.

The truth drops masked tokens and runs documents one by one, and knows nothing of leaves and trees. It runs in the dtype
of its inputs: in float64 it is the truth, in a lower precision the plain formula whose error ours is measured against.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lucid_attention.ops.lucid.decode import inverse_key_norms
from lucid_attention.ops.path.api import lucid_path_attention, path_attention, path_precondition

from .cases import Sizes, keys_of

FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "path": path_attention,
    "lucid_path": lucid_path_attention,
    "precondition": path_precondition,
}
OPERATORS = list(FUNCTIONS)
# Arguments that hold one entry for each new or past token, as [B, H, tokens, ...].
NEW, OLD = ("q", "k", "v", "w", "beta"), ("k_past", "y_past", "inverse_norms")


def strengths(kind: str, *shape: int) -> Tensor:
    """β: "uniform" in [0, 2], "small" (0.01: factors that reach far), "edges" (0, 1 and 2 exactly), or a number."""
    if kind == "edges":
        return torch.randint(3, shape).double()
    if kind == "small":
        return 0.02 * torch.rand(*shape).double()
    return 2 * torch.rand(*shape).double() if kind == "uniform" else torch.full(shape, float(kind)).double()


@dataclass(frozen=True)
class PathCase(Sizes):
    """The kinds of directions w and of β, besides."""

    w: str = "shifted"
    beta: str = "uniform"

    def __str__(self) -> str:
        return f"{self.w}-{self.beta}-{super().__str__()}"

    def tensors(self, operator: str, dtype: torch.dtype = torch.float64, sharpness: bool = False) -> dict[str, Tensor]:
        """Arguments by name; past is k_past and y_past and, for LUCID, inverse_norms."""
        B, H, T, S, D, E = self.B, self.H, self.T, self.S, self.D, self.E
        out = {"q": torch.randn(B, H * self.G, T, D), "k": keys_of(self.keys, B, H, T, D)}
        out |= {"v": torch.randn(B, H, T, E), "w": F.normalize(keys_of(self.w, B, H, T, D), dim=-1)}
        out["beta"] = strengths(self.beta, B, H, T)
        if S:
            # Contracted keys, as they come out of a past.
            out |= {"k_past": 0.9 * keys_of(self.keys, B, H, S, D), "y_past": torch.randn(B, H, S, E)}
            out["inverse_norms"] = 0.9 * inverse_key_norms(out["k_past"])
        if sharpness:
            out["sharpness"] = torch.linspace(0.7, 2.1, H)
        return {name: x.to(dtype) for name, x in wanted(operator, out).items()}

    def weight(self, operator: str) -> Tensor:
        """An upstream gradient."""
        heads = self.H * (1 if operator == "precondition" else self.G)
        return torch.randn(self.B, heads, self.T, self.E, dtype=torch.float64)


def wanted(operator: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those that the operator takes."""
    without = {"path": ("inverse_norms", "sharpness"), "lucid_path": (), "precondition": ("q",)}[operator]
    return {name: x for name, x in tensors.items() if name not in without}


def packed_up(tensors: dict[str, Any]) -> dict[str, Any]:
    """The parts of the past as one argument."""
    arguments = {name: x for name, x in tensors.items() if name not in OLD}
    past = tuple(tensors[name] for name in OLD if name in tensors)
    return arguments | ({"past": past} if past else {})


def call(operator: str, tensors: dict[str, Any], **options: Any) -> Tensor:
    return FUNCTIONS[operator](**packed_up(wanted(operator, tensors)), **options)


def evaluate(
    fn: Callable[..., Tensor], operator: str, tensors: dict[str, Tensor], weight: Tensor, **options: Any
) -> dict[str, Tensor]:
    """The output of `call` or `truth` and the gradient of (out · weight).sum() with respect to every tensor."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in wanted(operator, tensors).items()}
    out = fn(operator, leaves, **options)
    grads = torch.autograd.grad(out, list(leaves.values()), weight.to(out.dtype), allow_unused=True)
    results = {"out": out.detach()}
    for (name, x), grad in zip(leaves.items(), grads, strict=True):
        # The truth does not touch what is masked everywhere, and one token has no use for its w.
        assert grad is not None or fn is truth, f"no gradient: {name}"
        results[f"d{name}"] = torch.zeros_like(x) if grad is None else grad
    return results


def factor(w: Tensor, beta: Tensor) -> Tensor:
    """H = I − β w wᵀ: w [..., D], beta [...] -> [..., D, D]."""
    return torch.eye(w.shape[-1], dtype=w.dtype) - beta[..., None, None] * w[..., :, None] * w[..., None, :]


def moved_keys(k: Tensor, w: Tensor, beta: Tensor, k_past: Tensor) -> list[Tensor]:
    """For every token, all keys so far, each moved by the factors after it: T times [H, S + t + 1, D]."""
    keys, seen = k_past, []
    for t in range(k.shape[1]):
        keys = torch.cat([keys @ factor(w[:, t], beta[:, t]), k[:, t : t + 1]], 1)
        seen.append(keys)
    return seen


def _read(q: Tensor, y: Tensor, seen: list[Tensor], scale: float) -> Tensor:
    """q [H, G, T, D], y [H, S + T, E] -> [H, G, T, E]."""
    rows = []
    for t, keys in enumerate(seen):
        weights = torch.softmax(scale * q[:, :, t] @ keys.mT, -1)
        rows.append(weights @ y[:, : keys.shape[1]])
    return torch.stack(rows, 2)


def _unit(k: Tensor) -> Tensor:
    """A zero key has no direction."""
    zero = (k == 0).all(-1, keepdim=True)
    safe = torch.where(zero, torch.ones_like(k), k)
    return torch.where(zero, torch.zeros_like(k), safe / safe.pow(2).sum(-1, keepdim=True).sqrt())


def _solve(unit: Tensor, v: Tensor, y_past: Tensor, seen: list[Tensor], c: Tensor) -> Tensor:
    """y_t = v_t − Σ_j exp(c (a_tj − 1)) y_j, one token after the other. unit [H, T, D], c [H] -> [H, S + T, E]."""
    y = y_past
    for t, keys in enumerate(seen):
        cosines = keys[:, :-1] @ unit[:, t, :, None]
        row = torch.exp(c[:, None, None] * (cosines - 1))
        y = torch.cat([y, v[:, t : t + 1] - row.mT @ y], 1)
    return y


def truth(
    operator: str,
    tensors: dict[str, Any],
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sharpness: float | Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """What `call` returns. The exact products, on the tokens that take part."""
    k, v = tensors["k"], tensors["v"]
    B, H, T, D = k.shape
    k_past, y_past = tensors.get("k_past", k[:, :, :0]), tensors.get("y_past", v[:, :, :0])
    S = k_past.shape[2]
    inverse_norms = tensors.get("inverse_norms", k.new_zeros(B, H, S))
    sharpness = tensors.get("sharpness", sharpness)
    c = torch.as_tensor(math.sqrt(D) if sharpness is None else sharpness, dtype=k.dtype).expand(H)
    scale = 1 / math.sqrt(D) if scale is None else scale
    q = tensors["q"].unflatten(1, (H, -1)) if operator != "precondition" else k[:, :, None]
    borders = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    kept = torch.ones(B, S + T, dtype=torch.bool) if key_mask is None else key_mask
    outputs = []
    for b in range(B):
        out = v.new_zeros(T, H, q.shape[2], v.shape[3])
        old = kept[b, :S].nonzero()[:, 0]
        for start, stop in pairwise(borders):
            new = kept[b, S + start : S + stop].nonzero()[:, 0] + start
            if len(new) == 0:
                continue
            keys, w, beta = k[b, :, new], tensors["w"][b, :, new], tensors["beta"][b, :, new]
            y = torch.cat([y_past[b, :, old], v[b, :, new]], 1)
            if operator != "path":
                unit, unit_past = _unit(keys), k_past[b, :, old] * inverse_norms[b, :, old, None]
                y = _solve(unit, v[b, :, new], y_past[b, :, old], moved_keys(unit, w, beta, unit_past), c)
            if operator == "precondition":
                made = y[:, None, len(old) :]
            else:
                made = _read(q[b, :, :, new], y, moved_keys(keys, w, beta, k_past[b, :, old]), scale)
            out = out.index_put((new,), made.permute(2, 0, 1, 3))
        outputs.append(out.permute(1, 2, 0, 3).flatten(0, 1))
    return torch.stack(outputs)


def five_masks(N: int) -> Tensor:
    """Rows: whole, padded on the left, on the right, holes of all sizes, nothing at all."""
    mask = torch.ones(5, N, dtype=torch.bool)
    mask[1, : N // 3] = False
    mask[2, -(N // 3) :] = False
    mask[3] = torch.rand(N) > 0.3
    mask[3, N // 4 : N // 2] = False
    mask[4] = False
    return mask


def tokens(tensors: dict[str, Tensor], where: slice | Tensor) -> dict[str, Tensor]:
    """The same problem on some of its new tokens."""
    return {name: x[:, :, where] if name in NEW else x for name, x in tensors.items()}
