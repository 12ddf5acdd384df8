"""Calls of the operators that launch Triton kernels, on the meta device: what `gpu_offline.py` compiles.

A case is a function of dtype and head size; its launches are those of the real library. Add a case for a new operator
to `OPERATORS`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lucid_attention.ops.lucid import triton_decode, triton_solve
from lucid_attention.ops.lucid.system import Gradients, System
from lucid_attention.ops.path import triton_decode as path_triton_decode
from lucid_attention.ops.path import triton_pass
from lucid_attention.ops.path.decode import PathDecoded
from lucid_attention.ops.path.system import PathSystem
from lucid_attention.ops.softmax.one_token import Token

T, S = 1024, 300


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def solve(system: System, v: Tensor, beta: bool) -> None:
    """Forward and backward."""
    y, z = torch.empty_like(v), torch.empty_like(v) if beta else None
    triton_solve.forward(system, v, y, z)
    dk_past, dy_past, dbeta = (
        None if x is None else torch.empty_like(x) for x in (system.k_past, system.y_past, system.beta)
    )
    out = Gradients(torch.empty_like(v), torch.empty_like(system.k), dk_past, dy_past, dbeta, None)
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
    norms, y = empty(2, 8, T, dtype=torch.float32), empty(2, 8, T - 1, size, dtype=dtype)
    c, mask = empty(16, 1, 1, dtype=torch.float32), empty(2, T, dtype=torch.bool)
    beta, position = empty(2, 8, 1, dtype=dtype), empty(1, dtype=torch.int64)
    pages, sizes = empty(64, 8, 16, size, dtype=dtype), empty(64, 8, 16, dtype=torch.float32)
    lengths, table = empty(2, dtype=torch.int64), empty(2, 32, dtype=torch.int32)
    growing = Token(q, k, v, y, norms, None, None, "key", c, 1.0, 0.1, None)
    buffer = Token(q, k, v, k, norms, mask, beta, "qk", c, 1.0, 0.1, position)
    paged = Token(q, pages, v, pages, sizes, None, None, "key", c, 1.0, 0.1, lengths)
    triton_decode.step(growing, torch.empty_like(v), torch.empty_like(q))
    triton_decode.step(buffer, torch.empty_like(v), torch.empty_like(q))
    triton_decode.step(paged, pages, torch.empty_like(q), table)


def path(dtype: torch.dtype, size: int) -> None:
    """PaTH and LUCID-PaTH, forward and backward: with a past, and with a mask and packed documents."""
    q = empty(1, 16, T, size, dtype=dtype)
    k, v, k_past, y_past = (empty(1, 8, length, size, dtype=dtype) for length in (T, T, S, S))
    w, beta, norms = (empty(1, 8, *shape, dtype=torch.float32) for shape in ((T, size), (T,), (S,)))
    mask, borders, c = empty(1, T, dtype=torch.bool), empty(4, dtype=torch.int32), empty(1, 8, dtype=torch.float32)
    for solves in (False, True):
        behind = PathSystem(q, k, v, w, beta, k_past, y_past, norms if solves else None, sharpness=8.0, solves=solves)
        alone = PathSystem(
            q, k, v, w, beta, key_mask=mask, cu_seqlens=borders, sharpness=c if solves else 8.0, solves=solves
        )
        for system in (behind, alone):
            made = triton_pass.forward(system)
            triton_pass.backward(system, made, made[0], made[2])


def path_step(dtype: torch.dtype, size: int) -> None:
    q, k, v = empty(2, 32, 1, size, dtype=dtype), empty(2, 8, T, size, dtype=dtype), empty(2, 8, 1, size, dtype=dtype)
    y_past, norms = empty(2, 8, T - 1, size, dtype=dtype), empty(2, 8, T, dtype=torch.float32)
    w, beta, product = (empty(2, 8, *shape, dtype=torch.float32) for shape in ((1, size), (1,), (size, size)))
    mask, pending = empty(2, T, dtype=torch.bool), T // 2
    for inverse_norms, key_mask in ((None, None), (norms, mask)):
        token = Token(q, k, v, y_past, inverse_norms, key_mask, None, "key", 8.0, 1.0, 0.1, None)
        live = empty(2, 8, T - 1 - pending, size, dtype=torch.float32)
        made = PathDecoded(q, v, empty(2, 8, T - pending, size, dtype=torch.float32), product)
        path_triton_decode.step(token, w, beta, product, live, pending, made)


OPERATORS: tuple[Callable[[torch.dtype, int], None], ...] = (plain, packed, step, path, path_step)
