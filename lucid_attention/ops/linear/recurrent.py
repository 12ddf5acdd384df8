"""What the operators with a state of fixed size share: checks, masks, packing, grouped queries, dtypes.

Two rules cover all cases. A masked token writes nothing and forgets nothing, so it is ignored. A
document begins by forgetting completely (log decay −∞), so it cannot see the one before.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import checks, packing
from ..precision import no_autocast, readout_dtype, working_dtype

State = TypeVar("State")


class Recurrent(NamedTuple, Generic[State]):
    """What is read at every position, and what is left in the memory after the last one.

    o: [B, H·G, T, E] in the dtype that `scaled_dot_product_attention` would give it. state: in float32, or float64 for
    float64 inputs; pass it as `state` to continue.
    """

    o: Tensor
    state: State


def check_sequence(q: Any, k: Any, v: Any, key_mask: Any, cu_seqlens: Any, state: Any, scale: Any) -> None:
    """The arguments that all operators with a state have in common; the state itself is checked by `check_state`."""
    checks.check_kv(k, v)
    checks.check_q(q, k)
    checks.check_key_mask(key_mask, k, 0, "[B, T]")
    checks.check_cu_seqlens(cu_seqlens, k, state, "state")
    checks.check_scale(scale)


def check_per_token(name: str, x: Any, k: Tensor, size: int | None = None, letter: str = "") -> None:
    """A floating point [B, H, T] tensor, or [B, H, T, size]; gates often come in a wider dtype than keys."""
    checks.check_tensor(name, x)
    checks.check_float(name, x)
    shape, letters = tuple(k.shape[:3]), "[B, H, T]"
    if size is not None:
        shape, letters = (*shape, size), f"[B, H, T, {letter}]"
    checks.check_shape(name, x, shape, letters)
    checks.check_device(name, x, k)


def check_state(name: str, state: Any, k: Tensor, size: tuple[int, int], letters: str) -> None:
    checks.check_tensor(name, state)
    checks.check_shape(name, state, (*k.shape[:2], *size), f"[B, H, {letters}]")
    if state.dtype != working_dtype(k):
        raise TypeError(f"{name} must be {working_dtype(k)} for k in {k.dtype}, as it was returned, got {state.dtype}")
    checks.check_device(name, state, k)


def mask_tokens(key_mask: Tensor | None, *tensors: Tensor | None) -> list[Any]:
    """Zero at masked positions, so that these tokens read, write and (log decay 0) forget nothing."""
    if key_mask is None:
        return list(tensors)
    hidden = ~key_mask[:, None]
    return [None if x is None else x.masked_fill(hidden if x.ndim == 3 else hidden[..., None], 0) for x in tensors]


def forget_at_borders(log_decay: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """−∞ at the first token of every packed document. [B, H, T, ...]"""
    if cu_seqlens is None:
        return log_decay
    T = log_decay.shape[2]
    packing.offsets(cu_seqlens, T)
    # Empty documents at the end start after the last token.
    begins = torch.zeros(T + 1, dtype=torch.bool, device=log_decay.device)
    begins = begins.index_fill_(0, packing.on_device(cu_seqlens.long(), log_decay.device), True)[:T]
    return log_decay.masked_fill(begins.view(T, *[1] * (log_decay.ndim - 3)), -torch.inf)


def run(
    attend: Callable[..., tuple[Tensor, State]], q: Tensor, tensors: Sequence[Tensor | None], state: State, scale: float
) -> Recurrent[State]:
    """`attend` in working precision, with the queries of a group contiguous. tensors: [B, H, T, ...], k first."""
    k = tensors[0]
    assert k is not None
    wide, dtype = working_dtype(k), readout_dtype(q)
    with no_autocast(k):
        # [B, H·G, T, D] -> [B, H, T, G, D]: the queries that read one state are contiguous.
        queries = (q.to(wide) * scale).unflatten(1, (k.shape[1], -1)).transpose(2, 3)
        o, state = attend(queries, *(None if x is None else x.to(wide) for x in tensors), state)
        return Recurrent(o.transpose(2, 3).flatten(1, 2).to(dtype), state)


def empty_state(k: Tensor, rows: int, columns: int) -> Tensor:
    """A state of zeros, [B, H, rows, columns], in working precision."""
    return torch.zeros(*k.shape[:2], rows, columns, dtype=working_dtype(k), device=k.device)
