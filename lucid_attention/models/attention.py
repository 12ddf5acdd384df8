"""The attention function of LUCID models.

LUCID changes what is stored, not how it is read: y = P⁻¹v instead of v goes to the cache and to the read-out.
"""

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..ops.lucid.api import precondition
from ..ops.lucid.decode import lucid_decode
from ..ops.softmax.attention import softmax_attention
from .cache import LucidLayer, LucidStaticLayer
from .masks import Visibility, dense_mask, mask_of_places, one_row, read_mask, read_padding, separate_rows
from .preconditioner import NAME, heads_here

# The least strength to divide by: v − s·x is v in float32 and v/s does not overflow; or the gradient of s, a difference
# of terms of the size v/s, is exact to a ten-thousandth.
LEAST_FIXED, LEAST_LEARNED = 2.0**-60, 2.0**-10
# Arguments with which an architecture changes its scores.
SCORE_CHANGES = ("softcap", "s_aux", "position_bias")


class Pass(NamedTuple):
    """What the layers of one forward pass share. The model hands it to the attention function as an argument.

    cache: with layers of LUCID, or None. documents: borders of packed documents that the mask does not show, or None.
    """

    cache: Any = None
    documents: Tensor | None = None

    def layer(self, index: int) -> Any:
        """The cache layer that has got the keys of this pass; None without one, as in gradient checkpointing."""
        layer = None if self.cache is None else self.cache.layers[index]
        return layer if isinstance(layer, LucidLayer) and layer.pending is not None else None


class Readout(NamedTuple):
    """The softmax of one layer. others: further arguments that the architecture passes to its attention function.

    lucid: arguments of LUCID's operators, or None for a layer that was not chosen.
    """

    module: nn.Module
    scale: float | None
    dropout: float
    others: dict[str, Any]
    lucid: dict[str, Any] | None = None

    @property
    def plain(self) -> bool:
        """Whether this is softmax(q kᵀ · scale) and nothing else."""
        return not self.dropout and all(self.others.get(name) is None for name in SCORE_CHANGES)

    def __call__(self, q: Tensor, k: Tensor, y: Tensor, visible: Visibility) -> Tensor:
        """Read y for the last T of S + T tokens.

        q: [B, H·G, T, D]; k: [B, H, S + T, D]; y: [B, H, S + T, E] -> [B, H·G, T, E].
        """
        B = q.shape[0]
        if not self.plain:
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
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    lucid_pass: Pass | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend, with the arguments of an attention function of Transformers.

    query: [B, H·G, T, D]; key: [B, H, S + T, D], value: [B, H, T, E], as the cache returned them; lucid_pass: from
    `LucidModel` -> ([B, T, H·G, E], None).
    """
    chosen: Any = getattr(module, NAME, None)
    options = None if chosen is None else chosen(key, heads_here(module, key))
    readout = Readout(module, scaling, dropout, kwargs, options)
    if not sees_whole_past(module, kwargs):
        if options is not None and not module.is_causal:
            # An encoder: one block of tokens that see each other.
            _check_no_cache(query, key)
            key_mask = read_padding(attention_mask, query.shape[0], query.shape[2])
            value = _prepare(options, key, value, Visibility(key_mask), block=None)
            attention_mask = None if key_mask is None else key_mask[:, None, None]
        return readout.stock(query, key, value, attention_mask).transpose(1, 2).contiguous(), None
    if lucid_pass is None:
        raise ValueError(
            f"{type(module).__name__} got no argument lucid_pass, which LUCID's models hand to their layers: this "
            "architecture does not pass it on, or the model was not switched over by enable_lucid(model)"
        )
    layer = lucid_pass.layer(module.layer_idx)
    if layer is not None and options is not None:
        layer.add_norms(options["key_map"])
    if layer is None:
        B, T = query.shape[0], query.shape[2]
        _check_no_cache(query, key)
        visible = read_mask(attention_mask, B, T, T).with_documents(lucid_pass.documents, T)
        o = readout(query, key, _prepare(options, key, value, visible), visible)
    elif isinstance(layer, LucidStaticLayer):
        o = _with_static_cache(query, value, layer, attention_mask, readout)
    else:
        o = _with_growing_cache(query, value, layer, attention_mask, readout, lucid_pass)
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


def _check_no_cache(q: Tensor, k: Tensor) -> None:
    if k.shape[2] != q.shape[2]:
        raise ValueError(
            f"LUCID got {k.shape[2]} keys for {q.shape[2]} queries from a cache that keeps no preconditioned values: "
            "past_key_values must be a fresh cache, or one that this model filled"
        )


def _prepare(
    options: dict[str, Any] | None,
    k: Tensor,
    v: Tensor,
    visible: Visibility,
    past: tuple[Tensor, Tensor] | None = None,
    block: int | None = 1,
) -> Tensor:
    """y of new keys and values: [B, H, T, E]. A layer that was not chosen keeps v."""
    if options is None:
        return v
    strength = options.get("strength")
    least = LEAST_LEARNED if isinstance(strength, Tensor) and strength.requires_grad else LEAST_FIXED
    x, options = gated(v, options, least)
    if visible.cu_seqlens is None:
        y = precondition(k, x, past=past, key_mask=visible.key_mask, block=block, **options)
    else:
        if "beta" in options:
            options["beta"] = one_row(options["beta"][..., None])[..., 0]
        y = precondition(one_row(k), one_row(x), cu_seqlens=visible.cu_seqlens, **options)
        y = separate_rows(y, k.shape[0])
    if isinstance(strength, Tensor):
        # The straight line from v, for strengths that are too small to divide by.
        share = (strength / least)[:, None, None]
        y = torch.where(share < 1, v + share * (y - v), y)
    return y.to(k.dtype)


def gated(v: Tensor, options: dict[str, Any], least: float = LEAST_FIXED) -> tuple[Tensor, dict[str, Any]]:
    """v and options with β for a strength s: [H]: y = v − s Σ P y is β (v/s − Σ P y) with β = s, which operators do."""
    s = options.get("strength")
    if not isinstance(s, Tensor):
        return v, options
    s = s.clamp(min=least)[None, :, None].expand(v.shape[:3])
    wide = torch.promote_types(v.dtype, torch.float32)
    others = {name: option for name, option in options.items() if name != "strength"}
    return v.to(wide) / s[..., None].to(wide), {**others, "beta": s}


def _step(q: Tensor, layer: Any, v: Tensor, readout: Readout, **places: Any) -> Tensor:
    """One new token in one pass over keys and y."""
    k = layer.keys
    v, options = gated(v, readout.lucid or {})
    step = lucid_decode(q, k, v, layer.values, layer.inverse_norms, scale=readout.scale, **options, **places)
    layer.store(step.y.to(k.dtype))
    return step.o.to(q.dtype)


def _can_decode_in_one_step(q: Tensor, readout: Readout) -> bool:
    return readout.lucid is not None and q.shape[2] == 1 and readout.plain and not torch.is_grad_enabled()


def _with_growing_cache(
    q: Tensor, v: Tensor, layer: Any, mask: Tensor | None, readout: Readout, shared: Pass
) -> Tensor:
    """With a cache whose keys and y are as long as the past."""
    k, y_past = layer.keys, layer.values
    T, total = q.shape[2], k.shape[2]
    visible = read_mask(mask, q.shape[0], T, total)
    if y_past is None:
        visible = visible.with_documents(shared.documents, T)
    elif _can_decode_in_one_step(q, readout):
        return _step(q, layer, v, readout, key_mask=visible.key_mask)
    past = None if y_past is None else (k[:, :, : total - T], y_past)
    y = layer.store(_prepare(readout.lucid, k[:, :, total - T :], v, visible, past))
    return readout(q, k, y, visible)


def _with_static_cache(q: Tensor, v: Tensor, layer: LucidStaticLayer, mask: Tensor | None, readout: Readout) -> Tensor:
    """With a cache whose keys and y are whole buffers."""
    k, T = layer.keys, q.shape[2]
    M = k.shape[2]
    if mask is None and T == M:
        # The prompt fills the cache.
        mask = torch.ones(q.shape[0], M, dtype=torch.bool, device=q.device)
    if mask is None or mask.ndim != 2 or mask.shape[1] != M:
        form = "None" if mask is None else f"shape {list(mask.shape)}"
        raise ValueError(f"the mask of a static cache must be [B, {M}], one bit per place in it, got {form}")
    position = layer.position(T)
    if _can_decode_in_one_step(q, readout):
        return _step(q, layer, v, readout, key_mask=mask, position=position)
    if T == 1 or torch.compiler.is_compiling():
        return _with_whole_buffers(q, v, layer, mask, position, readout)
    S = layer.past_length(T)
    visible = Visibility(key_mask=mask[:, : S + T])
    past = (k[:, :, :S], layer.values[:, :, :S]) if S else None
    y = layer.store(_prepare(readout.lucid, k[:, :, S : S + T], v, visible, past))
    return readout(q, k[:, :, : S + T], y[:, :, : S + T], visible)


def _with_whole_buffers(
    q: Tensor, v: Tensor, layer: LucidStaticLayer, mask: Tensor, position: Tensor, readout: Readout
) -> Tensor:
    """Compute with the whole buffers, for graphs, whose shapes must not depend on the position."""
    k, T = layer.keys, q.shape[2]
    k_new = k.index_select(2, torch.arange(T, device=k.device) + position)
    new = Visibility(key_mask=mask_of_places(mask, position, T))
    y = _prepare(readout.lucid, k_new, v, new, (k, layer.values))
    return readout.dense(q, k, layer.store(y), Visibility(key_mask=mask), position)
