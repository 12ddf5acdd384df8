"""What the queries of a batch see: from the arguments of Transformers' models to those of the attention modules."""

from typing import Any, NamedTuple

from torch import Tensor

from ..masks import Visibility, given_documents, hides_nothing


class Seen(NamedTuple):
    """key_mask: [B, S + T] bool or None; cu_seqlens: int32 [n + 1] over B·T tokens or None; positions: [B, T] or None.

    With cu_seqlens, positions are [1, B·T].
    """

    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    positions: Tensor | None = None


def read_inputs(
    mask: Any, position_ids: Tensor | None, others: dict[str, Any], B: int, T: int, S: int, *, cached: bool
) -> Seen:
    """What T new tokens after S in the cache see. mask: as the model got it.

    others: may hold cu_seq_lens_q, borders of packed documents, which otherwise begin where positions restart. cached:
    whether a cache is used, or made.
    """
    if position_ids is not None:
        if tuple(position_ids.shape) not in ((T,), (1, T), (B, T)):
            raise ValueError(f"position_ids must be [B, T] = {[B, T]}, got shape {list(position_ids.shape)}")
        # One row holds for all.
        position_ids = position_ids.expand(B, T)
    visible = Visibility()
    if mask is not None:
        if not isinstance(mask, Tensor) or tuple(mask.shape) != (B, S + T):
            raise ValueError(
                f"attention_mask must be [B, S + T] = {[B, S + T]}, 0 at padding, got "
                f"{list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__}"
            )
        if not hides_nothing(mask.bool(), T):
            visible = Visibility(mask.bool())
    if others.get("seq_idx") is not None and position_ids is None and others.get("cu_seq_lens_q") is None:
        raise ValueError("seq_idx needs position_ids or cu_seq_lens_q, which say where packed documents begin")
    documents = given_documents(B, T, others | {"position_ids": position_ids}, cached=cached)
    visible = visible.with_documents(documents, T)
    if visible.cu_seqlens is not None and position_ids is not None:
        position_ids = position_ids.reshape(1, -1)
    return Seen(visible.key_mask, visible.cu_seqlens, position_ids)
