"""PaTH and LUCID-PaTH as contestants, their inputs, and their gate.

Shapes as in `peers`: q [1, H·G, N, D]; k, v, w [1, H, N, D]; beta [1, H, N].
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lucid_attention.ops.path.api import lucid_path_attention, path_attention

from .. import gate
from . import peers
from .peers import SDPA
from .solve import Shape

SHAPES = (Shape(64, 4, 4), Shape(64, 8, 2))
GATE_LENGTH = 300
# Up to here the dense formula judges one head at the length of the benchmark.
DENSE_LENGTH = 2048
PATH, LUCID_PATH = "path_attention", "lucid_path_attention"
PARTS = (*gate.ATTENTION_PARTS, "the gradient of w", "the gradient of β")

PathAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
ATTENTIONS: dict[str, PathAttention] = {PATH: path_attention, LUCID_PATH: lucid_path_attention}


def inputs(shape: Shape, N: int, far: bool = False) -> list[Tensor]:
    """q, k, v, w, beta and the gradient of the output, keys correlated; β uniform in [0, 2].

    Uniform β forgets: a key is gone after some hundred tokens, and so is what went wrong with it. With `far`, every
    second head, the first one to begin with, has reflections (β = 2, nothing is lost) between strengths near 0.
    """
    q, k, v, do = gate.inputs(*shape, N)
    random = torch.Generator().manual_seed(N + 1)
    w = F.normalize(torch.randn(k.shape, generator=random), dim=-1)
    beta = 2 * torch.rand(k.shape[:3], generator=random)
    if far:
        reflects = torch.rand(k.shape[:3], generator=random) < 0.5
        beta[:, ::2] = torch.where(reflects, 2.0, 0.01 * beta)[:, ::2]
    return [q, k, v, w, beta, do]


def evaluate(name: str, tensors: Sequence[Tensor], backward: bool) -> tuple[Tensor, ...]:
    """The output and, if `backward`, gradients: of q, k, v, w, β, or of q, k, v for torch's attention."""
    *given, do = tensors
    if name == SDPA:
        return derive(peers.sdpa, given[:3], do, backward)
    return derive(ATTENTIONS[name], given, do, backward)


def derive(run: Callable[..., Tensor], given: Sequence[Tensor], do: Tensor, backward: bool) -> tuple[Tensor, ...]:
    """The output of `run` and, if `backward`, the gradients of all it is given."""
    if not backward:
        with torch.no_grad():
            return (run(*given),)
    given = [x.detach().requires_grad_() for x in given]
    o = run(*given)
    return (o.detach(), *torch.autograd.grad(o, given, do.to(o.dtype)))


def _met_keys(k: Tensor, w: Tensor, beta: Tensor) -> list[Tensor]:
    """For each token the keys so far as it meets them, moved by one factor after the other: N × [1, H, t + 1, D]."""
    identity = torch.eye(k.shape[-1], dtype=k.dtype)
    keys, met = k[:, :, :0], []
    for t in range(k.shape[2]):
        factor = identity - beta[:, :, t, None, None] * w[:, :, t, :, None] * w[:, :, t, None, :]
        keys = torch.cat([keys @ factor, k[:, :, t : t + 1]], 2)
        met.append(keys)
    return met


def true_values(k: Tensor, v: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    """Y = P⁻¹ V with P_ij = exp(√D (k̂_jᵀ H_{j+1} … H_i k̂_i − 1)), row after row, in float64."""
    k, v, w, beta = (x.double() for x in (k, v, w, beta))
    unit, root = k / k.norm(dim=-1, keepdim=True), math.sqrt(k.shape[-1])
    y = v[:, :, :0]
    for t, keys in enumerate(_met_keys(unit, w, beta)):
        row = torch.exp(root * (keys[:, :, :t] @ unit[:, :, t, :, None] - 1))
        y = torch.cat([y, v[:, :, t : t + 1] - row.mT @ y], 2)
    return y


def true_attention(q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    """Softmax over q_iᵀ H_i … H_{j+1} k_j / √D applied to v, with every factor written out, in float64."""
    q, k, v, w, beta = (x.double() for x in (q, k, v, w, beta))
    H, root = k.shape[1], math.sqrt(k.shape[-1])
    asked, rows = q.unflatten(1, (H, -1)), []
    for t, keys in enumerate(_met_keys(k, w, beta)):
        weights = torch.softmax(asked[:, :, :, t] @ keys.mT / root, -1)
        rows.append((weights @ v[:, :, : t + 1]).flatten(1, 2))
    return torch.stack(rows, 2)


def true_lucid_attention(q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    return true_attention(q, k, true_values(k, v, w, beta), w, beta)


TRUTHS: dict[str, PathAttention] = {PATH: true_attention, LUCID_PATH: true_lucid_attention}
DENSE: dict[str, PathAttention] = {
    PATH: partial(path_attention, impl="reference"),
    LUCID_PATH: partial(lucid_path_attention, impl="reference"),
}


@cache
def check_truth(benchmark: str, shape: Shape, backward: bool) -> None:
    """Both operators and torch's attention against the definitions in float64; several leaves, the last one ragged."""
    tensors = inputs(shape, GATE_LENGTH, far=True)
    *given, do = tensors
    where = f"{benchmark}, {shape}, N={GATE_LENGTH}"
    softmax = derive(lambda q, k, v: gate.true_attention(q, k, v, False), given[:3], do, backward)
    truths = {name: derive(truth, given, do, backward) for name, truth in TRUTHS.items()}
    gate.check_sharp(where, truths[PATH][0], softmax[0], torch.float32)
    gate.check_sharp(where, truths[LUCID_PATH][0], truths[PATH][0], torch.float32)
    for name, truth in {SDPA: softmax, **truths}.items():
        gate.check(where, name, evaluate(name, tensors, backward), "the float64 truth", truth, PARTS)


@cache
def check_length(benchmark: str, D: int, N: int, backward: bool) -> None:
    """One head that sees far, at the length of the benchmark, against the dense formula in float64."""
    tensors = inputs(Shape(D, 1, 1), N, far=True)
    *given, do = [x.double() for x in tensors]
    for name, dense in DENSE.items():
        expected = derive(dense, given, do, backward)
        got = evaluate(name, tensors, backward)
        gate.check(f"{benchmark}, D={D}, one head, N={N}", name, got, "the dense formula in float64", expected, PARTS)
