"""What tokens see, as Transformers says it and as the operators want it.

Transformers describes a mask by a function of (row, head, query, key) and a padding mask. The operators want to know
which keys take part (`key_mask`) or where packed documents end (`cu_seqlens`), and never need a T × T mask. So the mask
of attn_implementation="lucid" is one of

    None            causal, nothing hidden
    [B, S + T]      bool: causal, False at padding (and behind the last token of a static cache)
    [n + 1]         int32: borders of documents in all rows, one behind the other; no past

and, for layers that stay as they are (sliding windows), what `sdpa` would get.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

from ...ops.softmax.attention import visible_keys
from .settings import check_config

# Rows of a dense mask looked at together, so that a long packed batch needs no T × T mask.
ROWS = 1024
# At or below this an additive mask hides a key. Every usual choice is: -1e9, the smallest float16, minus infinity.
HIDING = -1e4


class Visible(NamedTuple):
    """Who sees whom. key_mask: [B, S + T] bool or None; cu_seqlens: int32 [n + 1] over B·T tokens or None."""

    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None


def lucid_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask function of attn_implementation="lucid", called once per forward pass and kind of layer."""
    if config is not None and not torch.compiler.is_compiling():
        check_config(config)
    plain = mask_function is causal_mask_function
    causal = plain or _is_causal(mask_function, device)
    if not causal and hasattr(config, "vocab_size"):
        raise ValueError(
            f"LUCID is for causal attention: {config.model_type!r} asks for a mask that shows later tokens"
        )
    if local_size is not None or not causal:
        return sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            mask_function,
            attention_mask,
            local_size,
            device=device,
            **kwargs,
        )
    if plain:
        return _padding(batch_size, q_length, kv_length, q_offset, attention_mask, device)
    if torch.compiler.is_compiling() and kv_length == q_length and not kwargs.get("use_vmap"):
        return _borders_in_graph(mask_function, batch_size, q_length, device)

    def rows(start: int, stop: int) -> Tensor:
        sizes = (batch_size, stop - start, kv_length, q_offset + start, kv_offset, mask_function, attention_mask)
        options = {key: value for key, value in kwargs.items() if key == "use_vmap"}
        return sdpa_mask(*sizes, allow_is_causal_skip=False, device=device, **options)

    visible = _read_rows(rows, batch_size, q_length, kv_length)
    return visible.key_mask if visible.cu_seqlens is None else visible.cu_seqlens


def _is_causal(mask_function: Callable[..., Any], device: torch.device | str) -> bool:
    """Whether the second token is hidden from the first: an encoder's mask is not ours to read."""
    if torch.compiler.is_compiling():
        return True
    first, second = torch.zeros(1, dtype=torch.long, device=device), torch.ones(1, dtype=torch.long, device=device)
    try:
        return not bool(mask_function(first, first, first, second))
    except IndexError:  # one token: nothing to tell
        return True


def _padding(
    B: int, T: int, total: int, offset: int | Tensor, attention_mask: Tensor | None, device: torch.device | str
) -> Tensor | None:
    static = isinstance(offset, Tensor) or total > offset + T
    if attention_mask is None and not static:
        return None
    if attention_mask is None:
        key_mask = torch.ones(B, total, dtype=torch.bool, device=device)
    else:
        missing = max(0, total - attention_mask.shape[1])
        key_mask = F.pad(attention_mask.to(device=device, dtype=torch.bool), (0, missing))[:, :total]
    if static:
        # A static cache has room behind the newest token.
        return key_mask & (torch.arange(total, device=device) < offset + T)
    # Waits for the device once per pass, as `sdpa` does; what follows is much faster without a mask.
    return None if not torch.compiler.is_compiling() and bool(key_mask.all()) else key_mask


def read_mask(mask: Tensor | None, B: int, T: int, total: int) -> Visible:
    """What a layer gets as `attention_mask`, read. A dense mask of the caller's is understood or refused."""
    if mask is None:
        return Visible()
    if mask.ndim == 1:
        return Visible(cu_seqlens=mask)
    if mask.ndim == 2:
        return Visible(key_mask=mask)
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[2] != T or mask.shape[3] < total:
        raise ValueError(
            f"attention_mask must be [B, S + T] or [B, 1, T, S + T] = {[B, 1, T, total]} for LUCID attention, "
            f"got shape {list(mask.shape)}"
        )
    shown = mask if mask.dtype == torch.bool else _read_additive(mask)
    shown = shown.expand(B, 1, T, -1)[..., :total]
    return _read_rows(lambda start, stop: shown[:, :, start:stop], B, T, total)


def _read_additive(mask: Tensor) -> Tensor:
    hidden = mask <= HIDING
    if not bool((hidden | (mask == 0)).all()):
        raise ValueError(
            "attention_mask must be bool, or 0 where a key is seen and very negative where not: LUCID attention takes "
            "no additive bias, got other values in it"
        )
    return ~hidden


def _read_rows(rows: Callable[[int, int], Tensor], B: int, T: int, total: int) -> Visible:
    """Padding or documents behind a mask of which `rows(start, stop)` gives [B, 1, stop − start, S + T]."""
    past = total - T
    taking_part = [rows(start, min(start + ROWS, T))[:, 0].any(1) for start in range(0, T, ROWS)]
    found = Visible(key_mask=torch.stack(taking_part).any(0))
    if past == 0 and not _same(rows, found, B, T, total):
        found = Visible(cu_seqlens=_borders(rows, B, T))
    if found.cu_seqlens is None and past == 0:
        return found
    if not _same(rows, found, B, T, total):
        raise ValueError(
            "attention_mask must be causal, with padding or packed documents: LUCID solves for the values in the order "
            "in which tokens see each other, got a mask of another form (bidirectional tokens, a prefix, a window?)"
        )
    return found


def _same(rows: Callable[[int, int], Tensor], found: Visible, B: int, T: int, total: int) -> bool:
    past = total - T
    device = rows(0, 1).device
    document = None
    if found.cu_seqlens is not None:
        token = torch.arange(B * T, device=device)
        document = torch.searchsorted(found.cu_seqlens[1:].contiguous(), token, right=True).view(B, T)
    key = torch.arange(total, device=device)
    for start in range(0, T, ROWS):
        stop = min(start + ROWS, T)
        expected = (key <= key[past + start : past + stop, None]).expand(B, 1, stop - start, total)
        if found.key_mask is not None:
            expected = expected & found.key_mask[:, None, None]
        if document is not None:
            expected = expected & (document[:, None, start:stop, None] == document[:, None, None])
        shown = rows(start, stop)
        # A row that sees nothing is one of padding, and nobody reads it.
        if not bool(((expected == shown) | ~shown.any(-1, keepdim=True)).all()):
            return False
    return True


def _borders(rows: Callable[[int, int], Tensor], B: int, T: int) -> Tensor:
    """Where documents begin: at tokens that do not see the one before them. Padding falls into pieces of one token."""
    begins = []
    for start in range(0, T, ROWS):
        stop = min(start + ROWS, T)
        before = (torch.arange(start, stop, device=rows(0, 1).device) - 1).clamp(min=0)
        sees_before = rows(start, stop)[:, 0].gather(2, before.expand(B, -1)[..., None])[..., 0]
        begins.append(~sees_before)
    begin = torch.cat(begins, 1)
    begin[:, 0] = True
    starts = begin.flatten().nonzero()[:, 0]
    return F.pad(starts, (0, 1), value=B * T).to(torch.int32)


def _borders_in_graph(mask_function: Callable[..., Any], B: int, T: int, device: torch.device | str) -> Tensor:
    """The same of a mask function, for graphs: [B·T + 1], with empty documents at the end to keep the shape.

    In a graph Transformers cannot ask whether positions restart, and calls every batch packed.
    """
    row, token = torch.arange(B, device=device)[:, None], torch.arange(T, device=device)[None]
    sees_before = mask_function(row, torch.zeros_like(row), token, (token - 1).clamp(min=0)).expand(B, T)
    begins = (~sees_before | (token == 0)).flatten()
    starts = torch.where(begins, torch.arange(B * T, device=device), B * T).sort().values
    return F.pad(starts, (0, 1), value=B * T).to(torch.int32)


@torch.compiler.disable
def documents(positions: Tensor) -> Tensor | None:
    """Borders of packed documents, the rows one behind the other: int32 [n + 1], or None where every row is one.

    positions: [B, T]. A token begins a document if its position is not above that of the token before it.
    """
    begins = F.pad(positions[:, 1:] <= positions[:, :-1], (1, 0))
    if not bool(begins.any()):
        return None
    begins[:, 0] = True
    return F.pad(begins.flatten().nonzero()[:, 0], (0, 1), value=begins.numel()).to(torch.int32)


def find_documents(visible: Visible, B: int, T: int, kwargs: dict[str, Any]) -> Visible:
    """Packing that no mask shows: Transformers makes none where a cache is in use, which is its default in training.

    kwargs: what else the layer gets: position_ids that start again, or the borders that are meant for flash attention.
    """
    if visible.key_mask is not None or visible.cu_seqlens is not None or T == 1:
        return visible
    given, positions = kwargs.get("cu_seq_lens_q"), kwargs.get("position_ids")
    if given is not None:
        return Visible(cu_seqlens=given.to(torch.int32))
    if positions is None or positions.ndim != 2 or torch.compiler.is_compiling():
        return visible
    return Visible(cu_seqlens=documents(positions.expand(B, T)))


def dense_mask(visible: Visible, B: int, T: int, total: int, position: int | Tensor, device: torch.device) -> Tensor:
    """[B, 1, T, total] bool, for read-outs that know no other form. `position`: of the first query among the keys."""
    if visible.cu_seqlens is not None:
        document = torch.searchsorted(
            visible.cu_seqlens[1:].contiguous(), torch.arange(B * T, device=device), right=True
        )
        document = document.view(B, 1, T)
        return visible_keys(B, T, T, None, None, device) & (document[..., None] == document[:, :, None])
    key = torch.arange(total, device=device)
    shown = (key <= (torch.arange(T, device=device) + position)[:, None]).expand(B, 1, T, total)
    return shown if visible.key_mask is None else shown & visible.key_mask[:, None, None]
