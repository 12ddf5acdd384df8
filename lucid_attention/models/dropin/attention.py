"""The attention function behind attn_implementation="lucid".

LUCID changes what is stored, not how it is read: y = P⁻¹v instead of v goes to the cache and to the read-out.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ...ops.lucid.api import precondition
from ...ops.lucid.decode import lucid_decode
from .cache import Pending, pending_of
from .masks import Visible, find_documents, read_mask
from .read_out import ReadOut, one_row, separate_rows
from .settings import NAME


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
    """Attend as Transformers asks for it.

    query: [B, H·G, T, D]; key, value: [B, H, S + T, *], as the cache returned them -> ([B, T, H·G, E], None).
    """
    read = ReadOut(module, scaling, dropout, kwargs)
    pending = pending_of(value)
    if not sees_whole_past(module, kwargs):
        o = read.stock(query, key, value, attention_mask)
    elif kwargs.get("cache") is not None:
        raise ValueError("LUCID attention has no paged cache: continuous batching keeps values, LUCID needs P⁻¹v")
    elif pending is None:
        _check_no_cache(query, key)
        B, T = query.shape[0], query.shape[2]
        visible = find_documents(read_mask(attention_mask, B, T, T), B, T, kwargs)
        o = read(query, key, _prepare(key, value, visible, _options(module)), visible)
    else:
        options = _options(module)
        pending.check(options)
        attend = _with_growing_cache if pending.position is None else _with_static_cache
        o = attend(query, pending, attention_mask, options, read)
    return o.transpose(1, 2).contiguous(), None


def sees_whole_past(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether this is a layer of causal full attention. Others stay as they are."""
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
            f"window of {window}: set config.sliding_window to None, or mend layer_types"
        )
    return kinds[index] == "full_attention"


def _options(module: nn.Module) -> dict[str, Any]:
    """Arguments of the operators. A layer that was not chosen is one of strength 0: it keeps v."""
    written = getattr(module.config, NAME, None) or {}
    layers = written.get("layers")
    chosen = layers is None or module.layer_idx in layers
    return {"strength": written.get("strength", 1.0) if chosen else 0.0, "sharpness": written.get("sharpness")}


def _check_no_cache(q: Tensor, k: Tensor) -> None:
    if k.shape[2] != q.shape[2]:
        raise ValueError(
            "The cache of a LUCID model keeps preconditioned values: expected one that generate() made, or "
            f"DynamicCache(config=model.config), got {k.shape[2]} keys for {q.shape[2]} queries from a cache that "
            "knows nothing of LUCID (DynamicCache() without config, or made before LUCID was switched on?)"
        )


def _prepare(
    k: Tensor, v: Tensor, visible: Visible, options: dict[str, Any], past: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """y of new keys and values: [B, H, T, E]."""
    if visible.cu_seqlens is None:
        return precondition(k, v, past=past, key_mask=visible.key_mask, **options)
    return separate_rows(precondition(one_row(k), one_row(v), cu_seqlens=visible.cu_seqlens, **options), k.shape[0])


def _one_step(q: Tensor, read: ReadOut, options: dict[str, Any]) -> bool:
    return q.shape[2] == 1 and read.plain and options["strength"] > 0 and not torch.is_grad_enabled()


def _with_growing_cache(
    q: Tensor, pending: Pending, mask: Tensor | None, options: dict[str, Any], read: ReadOut
) -> Tensor:
    """Keys and y of the past are as long as the past."""
    k, v, y_past = pending.k, pending.v, pending.y_past
    T, total = q.shape[2], k.shape[2]
    visible = read_mask(mask, q.shape[0], T, total)
    if y_past is None:
        visible = find_documents(visible, q.shape[0], T, read.others)
    if y_past is not None and _one_step(q, read, options):
        step = lucid_decode(q, k, v, y_past, pending.scalars, key_mask=visible.key_mask, scale=read.scale, **options)
        pending.commit(step.y)
        return step.o
    past = None if y_past is None else (k[:, :, : total - T], y_past)
    y = pending.commit(_prepare(k[:, :, total - T :], v, visible, options, past))
    return read(q, k, y, visible)


def _with_static_cache(
    q: Tensor, pending: Pending, mask: Tensor | None, options: dict[str, Any], read: ReadOut
) -> Tensor:
    """Keys and y are whole buffers, with the new tokens at `pending.position`."""
    k, v, buffer, position = pending.k, pending.v, pending.y_past, pending.position
    assert buffer is not None
    assert position is not None
    T, M = q.shape[2], k.shape[2]
    if mask is None and T == M:
        # The prompt fills the cache.
        mask = torch.ones(q.shape[0], M, dtype=torch.bool, device=q.device)
    if mask is None or mask.ndim != 2 or mask.shape[1] != M:
        came = "None" if mask is None else f"shape {list(mask.shape)}"
        raise ValueError(f"the mask of a static cache must be [B, {M}], one bit per place in it, got {came}")
    if _one_step(q, read, options):
        step = lucid_decode(
            q, k, v, buffer, pending.scalars, key_mask=mask, scale=read.scale, position=position, **options
        )
        pending.commit(step.y)
        return step.o
    if T == 1 or torch.compiler.is_compiling():
        return _with_whole_buffers(q, pending, mask, options, read)
    past = int(position)
    seen, visible = slice(0, past + T), Visible(key_mask=mask[:, : past + T])
    before = (k[:, :, :past], buffer[:, :, :past]) if past else None
    y = pending.commit(_prepare(k[:, :, past : past + T], v, visible, options, before))
    return read(q, k[:, :, seen], y[:, :, seen], visible)


def _with_whole_buffers(q: Tensor, pending: Pending, mask: Tensor, options: dict[str, Any], read: ReadOut) -> Tensor:
    """Without asking where in the buffers we are: for graphs, whose shapes must not depend on it."""
    k, v, buffer, position = pending.k, pending.v, pending.y_past, pending.position
    assert buffer is not None
    assert position is not None
    M = k.shape[2]
    where = torch.arange(q.shape[2], device=k.device) + position
    earlier = mask & (torch.arange(M, device=k.device) < position)
    takes_part = torch.cat([earlier, mask.index_select(1, where)], 1)
    new = _prepare(k.index_select(2, where), v, Visible(key_mask=takes_part), options, (k, buffer))
    return read.dense(q, k, pending.commit(new), Visible(key_mask=mask), position)
