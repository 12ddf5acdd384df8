"""What the queries of a batch see: from the arguments of Transformers' models to those of the attention modules."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..masks import document_borders, hides_nothing, read_mask

# Borders of packed documents, in the forms in which collators of Transformers and TRL add them to position_ids.
BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


class Seen(NamedTuple):
    """key_mask: [B, S + T] bool or None; cu_seqlens: int32 [n + 1] over B·T tokens or None; positions: [B, T] or None.

    With cu_seqlens, positions are [1, B·T]. length: S of a static cache, None for all of its places.
    """

    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    positions: Tensor | None = None
    length: int | None = None


def read_inputs(
    attention_mask: Any,
    position_ids: Tensor | None,
    others: dict[str, Any],
    B: int,
    T: int,
    S: int,
    places: int,
    *,
    cached: bool,
) -> Seen:
    """What T new tokens after S in the cache see.

    places: of a static cache, else 0. others: may hold `BORDERS`. cached: whether a cache is used, or made.
    """
    positions = None if position_ids is None else _check_positions(position_ids, B, T)
    key_mask, cu_seqlens, dense = _read_attention_mask(attention_mask, B, T, S + T, places)
    given = _given_borders(others, B, T)
    if key_mask is not None and given is not None:
        raise ValueError("cu_seq_lens_q and seq_idx describe batches without padding, got an attention_mask with zeros")
    if given is not None:
        if positions is not None and not torch.compiler.is_compiling():
            _check_agreement("position_ids", document_borders(positions), given)
        cu_seqlens = given if given.shape[0] > 2 else None
    elif positions is not None and T > 1 and key_mask is None and not dense:
        cu_seqlens = document_borders(positions, cached=cached)
    if cu_seqlens is not None and positions is not None:
        positions = positions.reshape(1, -1)
    return Seen(key_mask, cu_seqlens, positions)


def read_places(
    attention_mask: Any,
    position_ids: Tensor | None,
    others: dict[str, Any],
    position: Tensor,
    B: int,
    T: int,
    M: int,
) -> Seen:
    """What T new tokens see of a static cache of M places: those before `position`, then the new tokens.

    Nothing here depends on the value of `position`, so that a graph can hold it.
    """
    if any(others.get(name) is not None for name in BORDERS):
        raise ValueError("packed documents cannot be cached: leave cu_seq_lens_q and seq_idx out, or the cache")
    device = position.device
    if attention_mask is None:
        attention_mask = torch.ones(B, M, dtype=torch.bool, device=device)
    elif isinstance(attention_mask, Tensor) and attention_mask.ndim == 2 and not torch.compiler.is_compiling():
        attention_mask = F.pad(attention_mask, (0, max(0, M - attention_mask.shape[1])))
    if not isinstance(attention_mask, Tensor) or tuple(attention_mask.shape) != (B, M):
        raise ValueError(
            f"attention_mask must be [B, {M}] = {[B, M]}, one bit per place of the static cache, in a compiled model, "
            f"got {_described(attention_mask)}"
        )
    shown = attention_mask.bool()
    earlier = shown & (torch.arange(M, device=device) < position)
    new = shown.index_select(1, torch.arange(T, device=device) + position)
    positions = None if position_ids is None else _check_positions(position_ids, B, T)
    return Seen(torch.cat([earlier, new], 1), None, positions)


def _read_attention_mask(
    mask: Any, B: int, T: int, total: int, places: int
) -> tuple[Tensor | None, Tensor | None, bool]:
    """key_mask, cu_seqlens, and whether the mask was dense: then it says all about documents."""
    if mask is None:
        return None, None, False
    if isinstance(mask, Tensor) and mask.ndim == 4:
        if mask.shape[0] not in (1, B) or tuple(mask.shape[1:]) not in ((1, T, total), (1, T, places)):
            _refuse_shape(mask, B, T, total)
        visible = read_mask(mask, B, T, total)
        key_mask, cu_seqlens = visible.key_mask, visible.cu_seqlens
    else:
        if not isinstance(mask, Tensor) or tuple(mask.shape) not in ((B, total), (B, places)):
            _refuse_shape(mask, B, T, total)
        key_mask, cu_seqlens = mask[:, :total].bool(), None
    if key_mask is not None and hides_nothing(key_mask, T):
        key_mask = None
    return key_mask, cu_seqlens, mask.ndim == 4


def _refuse_shape(mask: Any, B: int, T: int, total: int) -> None:
    raise ValueError(
        f"attention_mask must be [B, S + T] = {[B, total]}, 0 at padding, or a causal mask [B, 1, T, S + T] = "
        f"{[B, 1, T, total]}, got {_described(mask)}"
    )


def _described(mask: Any) -> Any:
    return list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__


def _check_positions(position_ids: Tensor, B: int, T: int) -> Tensor:
    """position_ids as [B, T]. One row holds for all."""
    if tuple(position_ids.shape) not in ((T,), (1, T), (B, T)):
        raise ValueError(f"position_ids must be [B, T] = {[B, T]}, got shape {list(position_ids.shape)}")
    return position_ids.expand(B, T)


def _given_borders(others: dict[str, Any], B: int, T: int) -> Tensor | None:
    """Borders of documents over B·T tokens, int32 [n + 1], from the arguments of flattening collators."""
    found: dict[str, Tensor] = {}
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if others.get(name) is not None:
            found[name] = _check_borders(name, others[name], B * T)
    if others.get("seq_idx") is not None:
        found["seq_idx"] = _borders_of_indices(others["seq_idx"], B, T)
    if not found:
        return None
    first, borders = next(iter(found.items()))
    if not torch.compiler.is_compiling():
        for name, other in found.items():
            if not torch.equal(other, borders):
                raise ValueError(f"{first} and {name} must describe the same documents: got {borders} and {other}")
    return borders


def _check_borders(name: str, borders: Tensor, tokens: int) -> Tensor:
    if not isinstance(borders, Tensor) or borders.ndim != 1 or borders.shape[0] < 2:
        raise ValueError(f"{name} must be [n + 1] borders of n documents, got {_described(borders)}")
    if not torch.compiler.is_compiling():
        # Operators do not wait for borders on the CPU.
        borders = borders.cpu()
        whole = int(borders[0]) == 0 and int(borders[-1]) == tokens and bool((borders.diff() >= 0).all())
        if not whole:
            raise ValueError(f"{name} must go up from 0 to the number of tokens, {tokens}, got {borders.tolist()}")
    return borders.to(torch.int32)


def _borders_of_indices(seq_idx: Tensor, B: int, T: int) -> Tensor:
    seq_idx = _check_positions(seq_idx, B, T)
    changes = F.pad((seq_idx[:, 1:] != seq_idx[:, :-1]).long(), (1, 0))
    # Numbers that go up inside of a document, and down where the next one begins.
    rising = torch.arange(T, device=seq_idx.device) - T * changes.cumsum(1)
    borders = document_borders(rising)
    return torch.arange(0, B * T + 1, T, dtype=torch.int32) if borders is None else borders


def _check_agreement(name: str, restarts: Tensor | None, borders: Tensor) -> None:
    """Positions may go on where a document begins, but must not restart inside of one."""
    if restarts is not None and not bool(torch.isin(restarts, borders).all()):
        raise ValueError(
            f"{name} restart where cu_seq_lens_q or seq_idx have no border: documents begin at "
            f"{restarts[:-1].tolist()} or at {borders[:-1].tolist()}?"
        )
