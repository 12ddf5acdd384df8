"""PaTH, LUCID's solve on PaTH scores, or both on one tree, by Triton kernels.

The tree is that of `blockwise`: leaves of 64 positions, their products, all levels of joins. Masked positions and
packed documents stay where they are. A masked position has w = 0, β = 0 and no key. Between two neighbouring nodes at
most one document goes on, and the factors between its rows and its keys are its own, so a rectangle needs a comparison
of documents and nothing else. The launches of a pass therefore depend on shapes only, never on data.

What a tree needs exists for the heads in flight only: as many as fit into `BYTES`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import packing
from ..precision import no_autocast
from ..triangular import Schedule
from ..triton_tiles import architecture, on_device, padded_size, precisions
from . import scores
from .heads import Group, Outputs, PathHeads, by_kv_head, flat, heads_of, store
from .system import DIFFERENTIABLE, PathSystem
from .tiles import BLOCK_LEAVES
from .triton_configs import path_tiles
from .triton_heads import backward_heads, forward_heads
from .triton_tree import Kernels, Places

# Memory that the trees of the heads in flight may take.
BYTES = 4 * 1024**3


def forward(system: PathSystem) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """o: [B, H·G, T, E] in the dtype of q and lse: [B, H·G, T], if there is a q; y: [B, H, T, E], if it solves."""
    q, v = system.q, system.v
    o = lse = None
    if q is not None:
        o, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=system.dtype)
    y = v.new_empty(v.shape) if system.solves else None
    with no_autocast(v), on_device(v):
        for group, part, kernels in _groups(system):
            made = forward_heads(_padded(heads_of(part, group, reads=True)), kernels)
            for whole, value in zip((o, lse, y), made, strict=True):
                if whole is not None and value is not None:
                    value = value if whole is lse else value[..., : v.shape[3]]
                    store(by_kv_head(whole, system), group, value)
    return o, lse, y


def backward(
    system: PathSystem, made: Sequence[Tensor | None], do: Tensor | None, dy: Tensor | None
) -> list[Tensor | None]:
    """Gradients of `DIFFERENTIABLE`. made: what `forward` gave; do, dy: gradients of o and y."""
    inputs = [x if isinstance(x := getattr(system, name), Tensor) else None for name in DIFFERENTIABLE]
    grads = [None if x is None else x.new_empty(x.shape) for x in inputs]
    if system.q is not None and do is None:
        grads[0] = torch.zeros_like(system.q)
    with no_autocast(system.v), on_device(system.v):
        do, dy = (None if x is None else _without_masked(x, system) for x in (do, dy))
        for group, part, kernels in _groups(system):
            o, lse, y, row_grads, value_grads = (
                None if x is None else flat(by_kv_head(x, system), group, system) for x in (*made, do, dy)
            )
            outputs = Outputs(_wide(o), lse, None if y is None else _wide(y[:, 0]))
            heads = _padded(heads_of(part, group, reads=do is not None))
            value_grads = None if value_grads is None else _wide(value_grads[:, 0])
            found = backward_heads(heads, kernels, outputs, _wide(row_grads), value_grads)
            if found.q is not None:
                found.q.mul_(system.scale)
            for name, whole in zip(DIFFERENTIABLE, grads, strict=True):
                value = getattr(found, name)
                if whole is not None and value is not None:
                    _store(whole, group, value, name, system)
    return grads


def _store(whole: Tensor, group: Group, value: Tensor, name: str, system: PathSystem) -> None:
    if name in ("q", "k", "v", "w", "k_past", "y_past"):
        value = value[..., : whole.shape[3]]
    if name in ("k_past", "y_past", "inverse_norms"):
        value = value[:, : system.past_length]
    store(by_kv_head(whole, system) if name == "q" else whole, group, value)


def _groups(system: PathSystem) -> Iterator[tuple[Group, PathSystem, Kernels]]:
    """Heads that are computed together, the system without what is masked, and what launches their kernels."""
    (B, H, T, D), E = system.k.shape, system.v.shape[3]
    G = 0 if system.q is None else system.q.shape[1] // H
    sizes = padded_size(D), padded_size(E)
    levels = max(1, (T // scores.LEAF).bit_length())
    per_head = 4 * (T + scores.LEAF) * ((G + 3) * (sizes[0] * (levels + 6) + 4 * scores.LEAF) + 4 * sizes[1])
    clean, places = _clean(system), _places(system)
    where = architecture(system.k.device)
    dtype = torch.promote_types(system.k.dtype, system.v.dtype)
    dtype = dtype if system.q is None else torch.promote_types(dtype, system.q.dtype)
    tiles, multiply = path_tiles(where, *sizes), precisions(where, dtype)
    for group in Schedule(max(1, min(B * H, BYTES // per_head)), scores.LEAF, 1).groups(B, H):
        heads = len(range(*group[1].indices(H)))
        yield group, clean, Kernels(tiles, multiply, heads, places.rows(group[0]), scores.LEAF)


def _clean(system: PathSystem) -> PathSystem:
    """The system with zeros at masked positions."""
    if system.key_mask is None:
        return system
    found: dict[str, Any] = {}
    for name in DIFFERENTIABLE[:-1]:
        x = getattr(system, name)
        if x is not None:
            found[name] = _without_masked(x, system, past=name in ("k_past", "y_past", "inverse_norms"))
    return replace(system, **found)


def _without_masked(x: Tensor, system: PathSystem, past: bool = False) -> Tensor:
    """x: [B, H, T, *] with zeros at masked positions."""
    if system.key_mask is None:
        return x
    S = system.past_length
    hidden = ~(system.key_mask[:, :S] if past else system.key_mask[:, S:])
    return x.masked_fill(hidden.view(hidden.shape[0], 1, -1, *[1] * (x.ndim - 3)), 0)


def _places(system: PathSystem) -> Places:
    (B, _, T, _), S, mask = system.k.shape, system.past_length, system.key_mask
    if mask is None and system.cu_seqlens is None and S == 0:
        return Places(None, None, None)
    past, block = -(-S // scores.LEAF) * scores.LEAF, BLOCK_LEAVES * scores.LEAF
    padded, device, documents = -(-T // block) * block, system.k.device, None
    if system.cu_seqlens is not None:
        documents = packing.document_bounds(system.cu_seqlens, T, padded, system.k.device)
    new = torch.zeros(B, padded, dtype=torch.int32, device=device) if documents is None else documents[:1].repeat(B, 1)
    old = torch.zeros(B, past, dtype=torch.int32, device=device)
    old[:, S:] = -1
    if mask is not None:
        new[:, :T].masked_fill_(~mask[:, S:], -1)
        old[:, :S].masked_fill_(~mask[:, :S], -1)
    return Places(new, old, documents, only_past=mask is None and documents is None)


def _padded(heads: PathHeads) -> PathHeads:
    """The heads with padded head sizes, and a past of whole leaves."""
    wide: dict[str, Any] = {name: _wide(getattr(heads, name)) for name in ("q", "k", "v", "w", "k_past", "y_past")}
    if heads.k_past is not None and (missing := -heads.k_past.shape[1] % scores.LEAF):
        for name in ("k_past", "y_past"):
            wide[name] = F.pad(wide[name], (0, 0, 0, missing))
        if heads.inverse_norms is not None:
            wide["inverse_norms"] = F.pad(heads.inverse_norms, (0, 0, 0, missing))
    return replace(heads, **wide)


def _wide(x: Tensor | None) -> Tensor | None:
    """x: [*, D], contiguous, with D padded by zeros."""
    return None if x is None else F.pad(x, (0, padded_size(x.shape[-1]) - x.shape[-1])).contiguous()
