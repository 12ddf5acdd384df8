"""The attention function behind attn_implementation="lucid".

LUCID changes what is stored, not how it is read: y = P⁻¹v instead of v goes to the cache and to the read-out.
"""

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ...ops.lucid.api import precondition, precondition_related
from ...ops.lucid.decode import lucid_decode
from ...ops.softmax.attention import softmax_attention
from ..documents import one_row, separate_rows
from .cache import PendingValues, pending_values
from .masks import Visibility, dense_mask, find_documents, read_mask
from .settings import NAME

# Arguments with which an architecture changes its scores.
SCORE_CHANGES = ("softcap", "s_aux", "position_bias")


class Readout(NamedTuple):
    """The softmax of one layer. others: further arguments that the architecture passes to its attention function."""

    module: nn.Module
    scale: float | None
    dropout: float
    others: dict[str, Any]

    @property
    def plain(self) -> bool:
        """Whether this is softmax(q kᵀ · scale) and nothing else."""
        return not self.dropout and all(self.others.get(name) is None for name in SCORE_CHANGES)

    def __call__(self, q: Tensor, k: Tensor, y: Tensor, visible: Visibility) -> Tensor:
        """Read y for the last T of S + T tokens.

        q: [B, H·G, T, D]; k: [B, H, S + T, D]; y: [B, H, S + T, E] -> [B, H·G, T, E].
        """
        B = q.shape[0]
        if not self.plain or visible.relation is not None:
            return self.dense(q, k, y, visible, k.shape[2] - q.shape[2])
        if visible.cu_seqlens is None:
            return softmax_attention(q, k, y, key_mask=visible.key_mask, scale=self.scale)
        q, k, y = (one_row(x) for x in (q, k, y))
        return separate_rows(softmax_attention(q, k, y, cu_seqlens=visible.cu_seqlens, scale=self.scale), B)

    def dense(self, q: Tensor, k: Tensor, y: Tensor, visible: Visibility, position: int | Tensor) -> Tensor:
        """The same with a T × (S + T) mask. position: place of the first query among the keys."""
        mask = dense_mask(visible, q.shape[0], q.shape[2], k.shape[2], position, q.device)
        return self.stock(q, k, y, mask)

    def stock(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """The layer's attention as Transformers computes it. mask: [B, 1, T, S + T] bool, or None for plain causal."""
        if self.plain or (self.others.get("softcap") is None and self.others.get("s_aux") is None):
            attend = sdpa_attention_forward
        else:
            # SDPA has no soft caps and no sinks. Every architecture that has them defines an eager attention.
            attend = sys.modules[type(self.module).__module__].eager_attention_forward
            if mask is None:
                mask = dense_mask(Visibility(), q.shape[0], q.shape[2], k.shape[2], k.shape[2] - q.shape[2], q.device)
            if mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, torch.finfo(q.dtype).min)
        o = attend(self.module, q, k, v, mask, scaling=self.scale, dropout=self.dropout, **self.others)[0]
        return o.transpose(1, 2)


def lucid_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend, with the arguments of an attention function of Transformers.

    query: [B, H·G, T, D]; key, value: [B, H, S + T, *], as the cache returned them -> ([B, T, H·G, E], None).
    """
    readout = Readout(module, scaling, dropout, kwargs)
    pending = pending_values(value)
    if not sees_whole_past(module, kwargs):
        o = readout.stock(query, key, value, attention_mask)
    elif pending is None:
        _check_no_cache(query, key)
        B, T = query.shape[0], query.shape[2]
        visible = find_documents(read_mask(attention_mask, B, T, T), B, T, kwargs)
        o = readout(query, key, _prepare(key, value, visible, _options(module)), visible)
    else:
        options = _options(module)
        pending.check(options)
        attend = _with_growing_cache if pending.position is None else _with_static_cache
        o = attend(query, pending, attention_mask, options, readout)
    return o.transpose(1, 2).contiguous(), None


def sees_whole_past(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether a layer has causal full attention. Other layers keep the attention of their architecture."""
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        return False
    kinds, index = getattr(module.config, "layer_types", None), getattr(module, "layer_idx", None)
    window = kwargs.get("sliding_window")
    if kinds is None or index is None:
        return window is None
    if kinds[index] == "full_attention" and window is not None:
        raise ValueError(
            f"layer {index} has full attention according to config.layer_types, but {type(module).__name__} asks for a "
            f"window of {window}: set config.sliding_window to None, or correct layer_types"
        )
    return kinds[index] == "full_attention"


def _options(module: nn.Module) -> dict[str, Any]:
    """Strength and sharpness of a layer. A layer that was not chosen has strength 0: it keeps v."""
    settings = getattr(module.config, NAME, None) or {}
    layers = settings.get("layers")
    chosen = layers is None or module.layer_idx in layers
    return {"strength": settings.get("strength", 1.0) if chosen else 0.0, "sharpness": settings.get("sharpness")}


def _check_no_cache(q: Tensor, k: Tensor) -> None:
    if k.shape[2] != q.shape[2]:
        raise ValueError(
            "past_key_values must be a fresh cache, or one that this LUCID model filled: got a cache whose values "
            f"LUCID has not preconditioned ({k.shape[2]} keys for {q.shape[2]} queries). What softmax attention "
            "filled cannot be continued: run its tokens again. PEFT's prefix tuning fills caches itself: use "
            "PromptTuningConfig, PromptEncoderConfig or LoRA"
        )


def _prepare(
    k: Tensor, v: Tensor, visible: Visibility, options: dict[str, Any], past: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """y of new keys and values: [B, H, T, E]."""
    if visible.relation is not None:
        return precondition_related(k, v, visible.relation, past=past, key_mask=visible.key_mask, **options)
    if visible.cu_seqlens is None:
        return precondition(k, v, past=past, key_mask=visible.key_mask, **options)
    return separate_rows(precondition(one_row(k), one_row(v), cu_seqlens=visible.cu_seqlens, **options), k.shape[0])


def _can_decode_in_one_step(q: Tensor, readout: Readout, options: dict[str, Any]) -> bool:
    return q.shape[2] == 1 and readout.plain and options["strength"] > 0 and not torch.is_grad_enabled()


def _with_growing_cache(
    q: Tensor, pending: PendingValues, mask: Tensor | None, options: dict[str, Any], readout: Readout
) -> Tensor:
    """With a cache whose keys and y are as long as the past."""
    k, v, y_past = pending.k, pending.v, pending.y_past
    T, total = q.shape[2], k.shape[2]
    visible = read_mask(mask, q.shape[0], T, total)
    if y_past is None:
        visible = find_documents(visible, q.shape[0], T, readout.others)
    if y_past is not None and _can_decode_in_one_step(q, readout, options):
        step = lucid_decode(
            q, k, v, y_past, pending.inverse_norms, key_mask=visible.key_mask, scale=readout.scale, **options
        )
        pending.commit(step.y)
        return step.o
    past = None if y_past is None else (k[:, :, : total - T], y_past)
    y = pending.commit(_prepare(k[:, :, total - T :], v, visible, options, past))
    return readout(q, k, y, visible)


def _with_static_cache(
    q: Tensor, pending: PendingValues, mask: Tensor | None, options: dict[str, Any], readout: Readout
) -> Tensor:
    """With a cache whose keys and y are whole buffers. The new tokens are at `pending.position`."""
    k, v, buffer, position = pending.k, pending.v, pending.y_past, pending.position
    assert buffer is not None
    assert position is not None
    T, M = q.shape[2], k.shape[2]
    if mask is None and T == M:
        # The prompt fills the cache.
        mask = torch.ones(q.shape[0], M, dtype=torch.bool, device=q.device)
    if mask is None or mask.ndim != 2 or mask.shape[1] != M:
        form = "None" if mask is None else f"shape {list(mask.shape)}"
        raise ValueError(f"the mask of a static cache must be [B, {M}], one bit per place in it, got {form}")
    if _can_decode_in_one_step(q, readout, options):
        step = lucid_decode(
            q, k, v, buffer, pending.inverse_norms, key_mask=mask, scale=readout.scale, position=position, **options
        )
        pending.commit(step.y)
        return step.o
    if T == 1 or torch.compiler.is_compiling():
        return _with_whole_buffers(q, pending, mask, options, readout)
    S = 0 if pending.first else int(position)
    visible = Visibility(key_mask=mask[:, : S + T])
    past = (k[:, :, :S], buffer[:, :, :S]) if S else None
    y = pending.commit(_prepare(k[:, :, S : S + T], v, visible, options, past))
    return readout(q, k[:, :, : S + T], y[:, :, : S + T], visible)


def _with_whole_buffers(
    q: Tensor, pending: PendingValues, mask: Tensor, options: dict[str, Any], readout: Readout
) -> Tensor:
    """Compute with the whole buffers, for graphs, whose shapes must not depend on the position."""
    k, v, buffer, position = pending.k, pending.v, pending.y_past, pending.position
    assert buffer is not None
    assert position is not None
    M = k.shape[2]
    places = torch.arange(q.shape[2], device=k.device) + position
    earlier = mask & (torch.arange(M, device=k.device) < position)
    key_mask = torch.cat([earlier, mask.index_select(1, places)], 1)
    y = _prepare(k.index_select(2, places), v, Visibility(key_mask=key_mask), options, (k, buffer))
    return readout.dense(q, k, pending.commit(y), Visibility(key_mask=mask), position)
