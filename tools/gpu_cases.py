"""Calls of the operators that launch Triton kernels, on the meta device: what `gpu_offline.py` compiles.

A case is a function of dtype and head size; its launches are those of the real library. Add a case for a new operator
to `OPERATORS`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lucid_attention.ops.lucid import triton_launch, triton_solve
from lucid_attention.ops.lucid.system import System

T, S = 1024, 300


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def solve(system: System, v: Tensor, beta: bool) -> None:
    """Forward and backward."""
    y, z = torch.empty_like(v), torch.empty_like(v) if beta else None
    triton_solve.forward(system, v, y, z)
    grads = [None if x is None else torch.empty_like(x) for x in (system.k_past, system.y_past, system.beta)]
    out = triton_solve.Gradients(torch.empty_like(v), torch.empty_like(system.k), *grads, None)
    triton_solve.backward(system, v, y, z, out)


def plain(dtype: torch.dtype, size: int) -> None:
    k, v = (empty(1, 8, T, size, dtype=dtype) for _ in range(2))
    k_past, y_past = (empty(1, 8, S, size, dtype=dtype) for _ in range(2))
    solve(System(k, k_past, y_past, sharpness=8.0), v, False)


def packed(dtype: torch.dtype, size: int) -> None:
    k, v = (empty(1, 8, T, size, dtype=dtype) for _ in range(2))
    mask = empty(1, T, dtype=torch.bool)
    borders, beta = empty(4, dtype=torch.int32), empty(1, 8, T, dtype=dtype)
    solve(System(k, key_mask=mask, cu_seqlens=borders, beta=beta, sharpness=8.0), v, True)


def step(dtype: torch.dtype, size: int) -> None:
    """Growing caches, preallocated buffers and pages."""
    q, k, v = empty(2, 32, 1, size, dtype=dtype), empty(2, 8, T, size, dtype=dtype), empty(2, 8, 1, size, dtype=dtype)
    norms, c = empty(2, 8, T, dtype=torch.float32), empty(16, dtype=torch.float32)
    common = {"strength": 1.0, "scale": 0.1}
    triton_launch.step(
        q, k, v, k, v, norms, torch.empty_like(q), c, key_mask=None, beta=None, count=T - 1, counts=None, table=None,
        norm="key", **common,
    )  # fmt: skip
    triton_launch.step(
        q, k, v, k, v, norms, torch.empty_like(q), c, key_mask=empty(2, T, dtype=torch.bool),
        beta=empty(2, 8, 1, dtype=dtype), count=0, counts=empty(1, dtype=torch.int64), table=None, norm="qk", **common,
    )  # fmt: skip
    pages, sizes = empty(64, 8, 16, size, dtype=dtype), empty(64, 8, 16, dtype=torch.float32)
    triton_launch.step(
        q, pages, v, pages, pages, sizes, torch.empty_like(q), c, key_mask=None, beta=None, count=0,
        counts=empty(2, dtype=torch.int64), table=empty(2, 32, dtype=torch.int32), norm="key", **common,
    )  # fmt: skip


OPERATORS: tuple[Callable[[torch.dtype, int], None], ...] = (plain, packed, step)
