"""The truth, written without the package: the defining equation on the tokens that take part, and the delta rule.

Masked tokens are dropped and documents are run one by one, so nothing here knows the package's rules for padding and
packing. Everything is differentiable and runs in the dtype of its inputs: in float64 it is the truth, in a lower
precision it is the plain formula whose error ours is measured against.
"""

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

Past = tuple[Tensor, Tensor]
Sharpness = float | Tensor | None


def preconditioner(k: Tensor, norm: str = "key", sharpness: Sharpness = None) -> Tensor:
    """P of one head without β: k [N, D] -> [N, N]."""
    N, D = k.shape
    c = math.sqrt(D) if sharpness is None else sharpness
    lower = torch.ones(N, N, dtype=torch.bool).tril(-1)
    if norm == "row_max":
        scores = torch.einsum("id,jd->ij", k, k) * c / D
        seen = torch.where(lower | torch.eye(N, dtype=torch.bool), scores, -math.inf)
        exponents = scores - seen.amax(1)[:, None]
    else:
        # A zero key has no direction: cosine 0 to every other, and no gradient.
        zero = (k == 0).all(1, keepdim=True)
        somewhere = torch.where(zero, 1, k)
        unit = torch.where(zero, 0, somewhere / somewhere.pow(2).sum(1, keepdim=True).sqrt())
        exponents = c * torch.einsum("id,jd->ij", unit, unit) - c
    return torch.eye(N, dtype=k.dtype) + torch.where(lower, torch.where(lower, exponents, 0).exp(), 0)


def _systems(N: int, key_mask: Tensor | None, cu_seqlens: Tensor | None) -> Iterator[Tensor]:
    """Positions of the tokens of each document that take part."""
    borders = [0, N] if cu_seqlens is None else cu_seqlens.tolist()
    for a, b in pairwise(borders):
        index = torch.arange(a, b)
        yield index if key_mask is None else index[key_mask[a:b]]


def _head_values(
    k: Tensor, v: Tensor, y_past: Tensor, index: Tensor, beta: Tensor, norm: str, c: Sharpness, strength: float
) -> Tensor:
    """y at `index` of one head. k [S + T, D], v [T, E], y_past [S, E], beta [T]; index into S + T."""
    S = y_past.shape[0]
    P = preconditioner(k[index], norm, c)
    old, new = index[index < S], index[index >= S] - S
    b, n = beta[new][:, None], len(old)
    L = strength * P.tril(-1)
    rhs = b * (v[new] - L[n:, :n] @ y_past[old])
    return torch.linalg.solve(torch.eye(len(new), dtype=k.dtype) + b * L[n:, n:], rhs)


def precondition(
    k: Tensor,
    v: Tensor,
    *,
    past: Past | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    beta: Tensor | None = None,
    norm: str = "key",
    sharpness: Sharpness = None,
    strength: float = 1.0,
) -> Tensor:
    """Y = (I + s · diag(β) stril P)⁻¹ diag(β) V, zero at masked positions."""
    B, H, T, E = v.shape
    k_past, y_past = past if past is not None else (k[:, :, :0], v[:, :, :0])
    S = k_past.shape[2]
    keys = torch.cat([k_past, k], 2)
    beta = torch.ones(B, H, T, dtype=v.dtype) if beta is None else beta
    rows = []
    for b in range(B):
        for h in range(H):
            c = sharpness[h] if isinstance(sharpness, Tensor) else sharpness
            y = torch.zeros(T, E, dtype=v.dtype)
            for index in _systems(S + T, None if key_mask is None else key_mask[b], cu_seqlens):
                new = index[index >= S] - S
                if len(new):
                    part = _head_values(keys[b, h], v[b, h], y_past[b, h], index, beta[b, h], norm, c, strength)
                    y = y.index_put((new,), part)
            rows.append(y)
    return torch.stack(rows).unflatten(0, (B, H))


def read_out(
    q: Tensor,
    k: Tensor,
    y: Tensor,
    *,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """softmax(q kᵀ · scale) y over the keys that each query sees; zero if it sees none."""
    B, heads, T, D = q.shape
    H, N = k.shape[1:3]
    scale = 1 / math.sqrt(D) if scale is None else scale
    query = torch.arange(N - T, N)
    rows = []
    for b in range(B):
        for head in range(heads):
            h = head // (heads // H)
            o = torch.zeros(T, y.shape[3], dtype=y.dtype)
            everything = _systems(N, None, cu_seqlens)
            for index, members in zip(
                _systems(N, None if key_mask is None else key_mask[b], cu_seqlens), everything, strict=True
            ):
                # Queries of this document that see at least one key of it.
                asking = query[torch.isin(query, members)]
                asking = asking[asking >= index[0]] if len(index) else asking[:0]
                if len(asking) == 0:
                    continue
                scores = scale * q[b, head, asking - (N - T)] @ k[b, h, index].T
                weights = torch.where(index <= asking[:, None], scores, -math.inf).softmax(-1)
                o = o.index_put((asking - (N - T),), weights @ y[b, h, index])
            rows.append(o)
    return torch.stack(rows).unflatten(0, (B, heads))


def lucid_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    past: Past | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    beta: Tensor | None = None,
    norm: str = "key",
    sharpness: Sharpness = None,
    strength: float = 1.0,
    scale: float | None = None,
) -> Tensor:
    options = {"beta": beta, "norm": norm, "sharpness": sharpness, "strength": strength}
    y = precondition(k, v, past=past, key_mask=key_mask, cu_seqlens=cu_seqlens, **options)
    if past is not None:
        k, y = torch.cat([past[0], k], 2), torch.cat([past[1], y], 2)
    if norm == "qk":
        q, k = (x * math.sqrt(x.shape[-1]) / x.norm(dim=-1, keepdim=True) for x in (q, k))
    return read_out(q, k, y, key_mask=key_mask, cu_seqlens=cu_seqlens, scale=scale)


def kernel(a: Tensor, b: Tensor, sharpness: float) -> Tensor:
    """κ(a, b) = exp(c (cos − 1)) of two keys."""
    return torch.exp(sharpness * (torch.dot(a, b) / (a.norm() * b.norm()) - 1))


def delta_rule(k: Tensor, v: Tensor, beta: Tensor, sharpness: float) -> Tensor:
    """Token by token, the memory kept as pairs (k_j, y_j): k [T, D], v [T, E], beta [T] -> y [T, E]."""
    written: list[Tensor] = []
    for t in range(len(k)):
        read = torch.zeros_like(v[t])
        for j in range(t):
            read = read + kernel(k[t], k[j], sharpness) * written[j]
        written.append(beta[t] * (v[t] - read))
    return torch.stack(written)


def taylor_features(k: Tensor, sharpness: float, degree: int = 40) -> Tensor:
    """φ(k) with φ(a)·φ(b) = κ(a, b) up to the given degree, for D = 2: monomials of the unit key. [T, 2] -> [T, F]."""
    x, z = (k / k.norm(dim=-1, keepdim=True)).unbind(-1)
    columns = []
    for n in range(degree):
        for a in range(n + 1):
            size = math.sqrt(sharpness**n / (math.factorial(a) * math.factorial(n - a)))
            columns.append(size * x**a * z ** (n - a))
    return math.exp(-sharpness / 2) * torch.stack(columns, -1)
