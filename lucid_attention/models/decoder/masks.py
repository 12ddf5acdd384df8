"""What the queries of a batch see: from the arguments of Transformers' models to those of the attention modules."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..masks import Visibility, given_documents, hides_nothing, mask_of_places, read_mask


class Seen(NamedTuple):
    """key_mask: [B, S + T] bool or None; cu_seqlens: int32 [n + 1] over B·T tokens or None; positions: [B, T] or None.

    With cu_seqlens, positions are [1, B·T]. length: S of a static cache, None for all of its places.
    """

    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    positions: Tensor | None = None
    length: int | None = None


def read_inputs(
    mask: Any, position_ids: Tensor | None, others: dict[str, Any], B: int, T: int, S: int, M: int, *, cached: bool
) -> Seen:
    """What T new tokens after S in the cache see. mask: as the model got it; M: places of a static cache, else 0.

    others: may hold cu_seq_lens_q, borders of packed documents, which otherwise begin where positions restart. cached:
    whether a cache is used, or made.
    """
    total = S + T
    positions = None if position_ids is None else _check_positions(position_ids, B, T)
    visible = Visibility()
    if isinstance(mask, Tensor) and mask.ndim == 4 and tuple(mask.shape[1:]) in ((1, T, total), (1, T, M)):
        visible = read_mask(mask, B, T, total)
    elif mask is not None:
        if not isinstance(mask, Tensor) or tuple(mask.shape) not in ((B, total), (B, M)):
            raise ValueError(
                f"attention_mask must be [B, S + T] = {[B, total]}, 0 at padding, or a causal mask [B, 1, T, S + T] = "
                f"{[B, 1, T, total]}, got {list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__}"
            )
        visible = Visibility(mask[:, :total].bool())
    if visible.key_mask is not None and hides_nothing(visible.key_mask, T):
        visible = Visibility()
    if others.get("seq_idx") is not None and position_ids is None and others.get("cu_seq_lens_q") is None:
        raise ValueError("seq_idx needs position_ids or cu_seq_lens_q, which say where packed documents begin")
    # A dense mask of ones says that there is one document.
    if mask is None or mask.ndim == 2:
        documents = given_documents(B, T, others | {"position_ids": positions}, cached=cached)
        visible = visible.with_documents(documents, T)
    cu_seqlens = visible.cu_seqlens
    if cu_seqlens is not None and positions is not None:
        positions = positions.reshape(1, -1)
    return Seen(visible.key_mask, cu_seqlens, positions)


def read_places(mask: Tensor | None, position_ids: Tensor | None, position: Tensor, B: int, T: int, M: int) -> Seen:
    """What T new tokens see of a static cache of M places: those before `position`, then the new tokens.

    Nothing here depends on the value of `position`, so that a graph can hold it.
    """
    if mask is None:
        mask = torch.ones(B, M, dtype=torch.bool, device=position.device)
    elif mask.ndim == 2 and not torch.compiler.is_compiling():
        mask = F.pad(mask, (0, max(0, M - mask.shape[1])))
    if tuple(mask.shape) != (B, M):
        raise ValueError(
            f"attention_mask must be [B, {M}] = {[B, M]}, one bit per place of the static cache, in a compiled model, "
            f"got {list(mask.shape)}"
        )
    positions = None if position_ids is None else _check_positions(position_ids, B, T)
    return Seen(mask_of_places(mask.bool(), position, T), None, positions)


def _check_positions(position_ids: Tensor, B: int, T: int) -> Tensor:
    """position_ids as [B, T]. One row holds for all."""
    if tuple(position_ids.shape) not in ((T,), (1, T), (B, T)):
        raise ValueError(f"position_ids must be [B, T] = {[B, T]}, got shape {list(position_ids.shape)}")
    return position_ids.expand(B, T)
