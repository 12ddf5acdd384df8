"""Softmax attention of all queries over all keys of a rectangle, with the log-sum-exp of each row.

With the log-sum-exps, parts of a row's keys can be read separately and put together; and given the output and
log-sum-exp of the *whole* row, the backward of one part is exact. On a CPU this is torch's flash kernel (no public
name), elsewhere and on older releases plain products.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..triangular import spans
from .strips import flash_kernel_for

# Elements of the scores in flight where they are plain products.
SCORE_ELEMENTS = 16 * 1024 * 1024


def attend_rectangle(q: Tensor, k: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ) y: [n, m, R, E], and its log-sum-exps: [n, m, R].

    q: [n, m, R, D]; k: [n, m, N, D]; y: [n, m, N, E].
    """
    if flash_kernel_for(q):
        E = y.shape[3]
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*_one_size(q, k, y), 0.0, False, scale=1.0)
        return o[..., :E], lse
    o, lse = q.new_empty(*q.shape[:3], y.shape[3]), q.new_empty(q.shape[:3])
    for rows in _strips(q, k):
        scores = q[:, :, rows] @ k.mT
        lse[:, :, rows] = scores.logsumexp(-1)
        o[:, :, rows] = scores.sub_(lse[:, :, rows, None]).exp_() @ y
    return o, lse


def attend_rectangle_backward(
    do: Tensor, q: Tensor, k: Tensor, y: Tensor, o: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dy of one rectangle. o: [n, m, R, E] and lse: [n, m, R] are those of the whole rows."""
    if flash_kernel_for(q):
        D, E = q.shape[3], y.shape[3]
        (q, k, y), (do, o) = _one_size(q, k, y), _one_size(do, o, like=q)
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dy = backward(do, q, k, y, o, lse, 0.0, False, scale=1.0)
        return dq[..., :D], dk[..., :D], dy[..., :E]
    dq, dk, dy = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(y)
    for rows in _strips(q, k):
        p = (q[:, :, rows] @ k.mT).sub_(lse[:, :, rows, None]).exp_()
        dy += p.mT @ do[:, :, rows]
        along = (do[:, :, rows] * o[:, :, rows]).sum(-1, keepdim=True)
        p.mul_((do[:, :, rows] @ y.mT).sub_(along))
        dq[:, :, rows] = p @ k
        dk += p.mT @ q[:, :, rows]
    return dq, dk, dy


def _one_size(*tensors: Tensor, like: Tensor | None = None) -> tuple[Tensor, ...]:
    """Tensors of one head size with a contiguous last dimension, as the kernel needs them.

    The padding is zero, so scores and outputs stay the same.
    """
    widest = max(x.shape[3] for x in (*tensors, *([] if like is None else [like])))
    padded = (F.pad(x, (0, widest - x.shape[3])) if x.shape[3] < widest else x for x in tensors)
    return tuple(x if x.stride(3) == 1 else x.contiguous() for x in padded)


def _strips(q: Tensor, k: Tensor) -> list[slice]:
    across = q.shape[0] * q.shape[1] * k.shape[2]
    return list(spans(0, q.shape[2], max(1, SCORE_ELEMENTS // across)))
