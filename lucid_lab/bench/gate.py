"""The correctness gate: a contestant is timed only after its results agree with the definition in float64.

All keys are correlated. On independent random keys P is nearly the identity, and a contestant that skips the solve
would pass.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Limits on ‖x − truth‖ / ‖truth‖. Correct contestants stay five times below; without the solve the error is near 1.
TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
TRUTH = "the float64 truth"
ATTENTION_PARTS = ("its output", "the gradient of q", "the gradient of k", "the gradient of v")
DECODER_PARTS = ("its output", "its stored value")


class WrongAnswer(ValueError):
    """The result of a contestant differs from the definition."""


class Shape(NamedTuple):
    """Heads of attention: D features, `heads` query heads over `kv_heads` key/value heads."""

    D: int
    heads: int
    kv_heads: int

    @property
    def flop_ratio(self) -> float:
        """LUCID over softmax attention by the count of operations: a solve is one more attention per key/value head."""
        return 1 + self.kv_heads / self.heads

    @property
    def label(self) -> str:
        return f"{self.heads}/{self.kv_heads}"


def inputs(D: int, heads: int, kv_heads: int, N: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v and the gradient of the output. The keys of a head share a mean: their cosines are about 0.86."""
    random = torch.Generator().manual_seed(N)
    q, do = (torch.randn(1, heads, N, D, generator=random) for _ in range(2))
    k, v = (torch.randn(1, kv_heads, N, D, generator=random) for _ in range(2))
    k += 2.5 * torch.randn(1, kv_heads, 1, D, generator=random)
    return [x.to(dtype) for x in (q, k, v, do)]


def true_values(k: Tensor, v: Tensor) -> Tensor:
    """Y = P⁻¹ V by its definition, in float64."""
    unit = k.double() / k.double().norm(dim=-1, keepdim=True)
    root = math.sqrt(k.shape[-1])
    P = torch.exp(root * (unit @ unit.mT - 1)).tril(-1) + torch.eye(k.shape[2], dtype=torch.float64)
    return torch.linalg.solve_triangular(P, v.double(), upper=False)


def true_attention(q: Tensor, k: Tensor, v: Tensor, solves: bool) -> Tensor:
    """softmax(q kᵀ/√D + causal) applied to v, or to P⁻¹ v, by its definition, in float64."""
    y = true_values(k, v) if solves else v.double()
    G, N = q.shape[1] // k.shape[1], k.shape[2]
    scores = q.double() @ k.double().repeat_interleave(G, 1).mT / math.sqrt(k.shape[-1])
    future = torch.ones(N, N, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -math.inf).softmax(-1) @ y.repeat_interleave(G, 1)


def evaluate(run: Callable[..., Tensor], tensors: Sequence[Tensor], backward: bool) -> tuple[Tensor, ...]:
    """The output of `run` and, if `backward`, the gradients of its inputs. The last tensor is the output's gradient."""
    *arguments, do = tensors
    if not backward:
        with torch.no_grad():
            return (run(*arguments),)
    arguments = [x.detach().requires_grad_() for x in arguments]
    o = run(*arguments)
    return (o.detach(), *torch.autograd.grad(o, arguments, do.to(o.dtype)))


def distance(x: Tensor, truth: Tensor) -> float:
    truth = truth.double()
    return float((x.double() - truth).norm() / truth.norm())


def check(
    where: str,
    name: str,
    got: Sequence[Tensor],
    expected: Sequence[Tensor],
    parts: Sequence[str] = ATTENTION_PARTS,
    against: str = TRUTH,
) -> None:
    """Compare the tensors of contestant `name` with the expected ones, which come from `against`."""
    tolerance = TOLERANCE[got[0].dtype]
    for x, truth, part in zip(got, expected, parts, strict=False):
        error = distance(x, truth)
        if not error <= tolerance:  # NaN is wrong too
            raise WrongAnswer(
                f"{where}: {name!r} does not compute what it should: {part} is {error:.2g} away from {against} "
                f"(relative; allowed {tolerance:g}). Nothing was timed"
            )


def check_sharp(where: str, lucid: Tensor, softmax: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Refuse inputs on which a contestant that computes softmax attention would pass as LUCID."""
    error = distance(lucid, softmax)
    if error < 5 * TOLERANCE[dtype]:
        raise WrongAnswer(f"{where}: the keys are too little correlated to tell LUCID from softmax ({error:.2g} apart)")
