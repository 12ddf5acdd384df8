"""Masks: from the form that Transformers gives them to the form that the operators take.

Transformers describes a mask by a function of (row, head, query, key) and a padding mask. The operators take the keys
that take part (`key_mask`) or the borders of packed documents (`cu_seqlens`), and never need a T × T mask. So the mask
of LUCID is one of

    None            causal, nothing hidden
    [B, S + T]      bool: causal, False at padding (and behind the last token of a static cache)
    [n + 1]         int32: borders of documents in all rows, one behind the other; no past
    [B, 1, 1, T]    bool: an encoder's, all tokens see each other, False at padding

Layers that keep their own attention (sliding windows) get the mask of `sdpa`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from ..ops.packing import document_numbers
from ..ops.softmax.attention import visible_keys
from .preconditioner import uses_lucid

# Rows of a dense mask that are read together, so that a long packed batch needs no T × T mask.
ROWS = 1024
# An additive mask hides a key by a value at or below this: -1e9, the smallest float16 and minus infinity all do.
HIDDEN = -1e4

MaskRows = Callable[[int, int], Tensor]


class Visibility(NamedTuple):
    """Which keys the queries see, besides causality.

    key_mask: [B, S + T] bool or None; cu_seqlens: int32 [n + 1] over B·T tokens or None.
    """

    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None

    def with_documents(self, cu_seqlens: Tensor | None, T: int) -> "Visibility":
        """Add packed documents, if the mask does not show any.

        Transformers makes no mask of documents if a cache is in use, which is its default in training.
        """
        known = self.key_mask is not None or self.cu_seqlens is not None or T == 1
        return self if known else Visibility(cu_seqlens=cu_seqlens)


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
    if mask_function is bidirectional_mask_function and uses_lucid(config):
        shown = torch.ones(batch_size, kv_length, device=device) if attention_mask is None else attention_mask
        return shown[:, None, None, :kv_length].bool()
    plain = mask_function is causal_mask_function
    causal = plain or _is_causal(mask_function)
    if not causal and local_size is None and hasattr(config, "vocab_size"):
        raise ValueError(
            f"LUCID is for causal attention: {config.model_type!r} asks for a mask that shows later tokens"
        )
    if local_size is not None or not causal:
        shape = (batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, local_size)
        return sdpa_mask(*shape, device=device, **kwargs)
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


def _is_causal(mask_function: Callable[..., Any]) -> bool:
    """Whether the first token does not see the second. An encoder's mask is left to `sdpa_mask`."""
    if torch.compiler.is_compiling():
        return True
    # On the CPU: most functions are made of numbers only, and then nothing waits for the device.
    first, second = torch.tensor(0), torch.tensor(1)
    try:
        return not bool(mask_function(first, first, first, second))
    except IndexError:
        # The mask function knows one token only, which has no later one to see.
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
    return None if hides_nothing(key_mask, T) else key_mask


def hides_nothing(key_mask: Tensor, T: int) -> bool:
    """Whether all keys are known to take part in a pass of T tokens: operators are much faster without a mask.

    A compiled graph cannot read values. On an accelerator the answer is a wait for the device, as in `sdpa`: worth it
    for many tokens, but not for one.
    """
    if torch.compiler.is_compiling() or (T == 1 and key_mask.device.type != "cpu"):
        return False
    return bool(key_mask.all())


def read_mask(mask: Tensor | None, B: int, T: int, total: int) -> Visibility:
    """The visibility in the `attention_mask` of a layer. A dense mask that operators cannot express is refused."""
    if mask is None:
        return Visibility()
    if mask.ndim == 1:
        return Visibility(cu_seqlens=mask)
    if mask.ndim == 2:
        return Visibility(key_mask=mask)
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[2] != T or mask.shape[3] < total:
        raise ValueError(
            f"attention_mask must be [B, S + T] or [B, 1, T, S + T] = {[B, 1, T, total]} for LUCID attention, "
            f"got shape {list(mask.shape)}"
        )
    shown = mask if mask.dtype == torch.bool else _read_additive(mask)
    shown = shown.expand(B, 1, T, -1)[..., :total]
    return _read_rows(lambda start, stop: shown[:, :, start:stop], B, T, total)


def read_padding(mask: Tensor | None, B: int, T: int) -> Tensor | None:
    """The keys that all T queries of an encoder see, [B, T] bool, or None for all. Refuses masks that differ by row."""
    if mask is None:
        return None
    shown = mask if mask.dtype == torch.bool else _read_additive(mask)
    if shown.shape[2] > 1 and bool((shown != shown[:, :, :1]).any()):
        raise ValueError(
            "attention_mask of an encoder must be padding, [B, T]: LUCID solves for the values of a whole sequence, "
            "got queries that see different keys (causal, packed documents, blocks?)"
        )
    key_mask = shown[:, 0, 0].expand(B, T)
    return None if hides_nothing(key_mask, T) else key_mask


def _read_additive(mask: Tensor) -> Tensor:
    hidden = mask <= HIDDEN
    if not bool((hidden | (mask == 0)).all()):
        raise ValueError(
            "attention_mask must be bool, or 0 where a key is seen and very negative where not: LUCID attention takes "
            "no additive bias, got other values in it"
        )
    return ~hidden


def _read_rows(rows: MaskRows, B: int, T: int, total: int) -> Visibility:
    """Padding or documents of a dense mask. rows(start, stop) gives its rows: [B, 1, stop − start, S + T]."""
    seen_keys = [rows(start, min(start + ROWS, T))[:, 0].any(1) for start in range(0, T, ROWS)]
    visible = Visibility(key_mask=torch.stack(seen_keys).any(0))
    if _is_mask_of(visible, rows, B, T, total):
        return visible
    if total == T and _is_mask_of(documents := Visibility(cu_seqlens=_borders(rows, B, T)), rows, B, T, total):
        return documents
    raise ValueError(
        "attention_mask must be causal, with padding or packed documents: LUCID solves for the values in the order of "
        "the sequence, got another order (a tree, a window, blocks, a prefix?)"
    )


def _is_mask_of(visible: Visibility, rows: MaskRows, B: int, T: int, total: int) -> bool:
    """Whether the mask of `rows` is the causal mask of `visible`."""
    past = total - T
    device = rows(0, 1).device
    document = None
    if visible.cu_seqlens is not None:
        token = torch.arange(B * T, device=device)
        document = document_numbers(visible.cu_seqlens, token).view(B, T)
    key = torch.arange(total, device=device)
    for start in range(0, T, ROWS):
        stop = min(start + ROWS, T)
        expected = (key <= key[past + start : past + stop, None]).expand(B, 1, stop - start, total)
        if visible.key_mask is not None:
            expected = expected & visible.key_mask[:, None, None]
        if document is not None:
            expected = expected & (document[:, None, start:stop, None] == document[:, None, None])
        shown = rows(start, stop)
        # A row that sees nothing belongs to padding, whose output is not used.
        if not bool(((expected == shown) | ~shown.any(-1, keepdim=True)).all()):
            return False
    return True


def _borders(rows: MaskRows, B: int, T: int) -> Tensor:
    """Documents begin at tokens that do not see the token before them. Padding becomes documents of one token."""
    blocks = []
    for start in range(0, T, ROWS):
        stop = min(start + ROWS, T)
        before = (torch.arange(start, stop, device=rows(0, 1).device) - 1).clamp(min=0)
        sees_before = rows(start, stop)[:, 0].gather(2, before.expand(B, -1)[..., None])[..., 0]
        blocks.append(~sees_before)
    # Operators do not wait for borders on the CPU.
    return borders(torch.cat(blocks, 1).cpu())


def _borders_in_graph(mask_function: Callable[..., Any], B: int, T: int, device: torch.device | str) -> Tensor:
    """Borders for graphs, in which Transformers cannot ask whether positions restart and takes all rows for packed."""
    row, token = torch.arange(B, device=device)[:, None], torch.arange(T, device=device)[None]
    # Every token but the first, and not an index clamped at 0: Inductor's C++ for AVX2 does not compile with one.
    sees_before = mask_function(row, torch.zeros_like(row), token[:, 1:], token[:, :-1]).expand(B, T - 1)
    return borders(F.pad(~sees_before, (1, 0)))


def given_documents(B: int, T: int, kwargs: dict[str, Any], *, cached: bool = False) -> Tensor | None:
    """Borders of documents, int32 [n + 1], from position_ids that restart or from borders for flash attention.

    On the CPU, so that operators do not wait for the device; in a graph where they are given. cached: whether the
    answer decides about a cache.
    """
    given, positions = kwargs.get("cu_seq_lens_q"), kwargs.get("position_ids")
    if given is not None:
        return (given if torch.compiler.is_compiling() else given.cpu()).to(torch.int32)
    if positions is None or positions.ndim != 2 or T == 1:
        return None
    return document_borders(positions.expand(B, T), cached=cached)


def mask_of_places(mask: Tensor, position: Tensor, T: int) -> Tensor:
    """key_mask: [B, M + T] of all M places of a static cache, of which those before `position` count, and T new keys.

    mask: [B, M] bool. position: of the first new key. For graphs, whose shapes must not depend on the position.
    """
    place = torch.arange(mask.shape[1], device=mask.device)
    return torch.cat([mask & (place < position), mask.index_select(1, place[:T] + position)], 1)


def dense_mask(visible: Visibility, B: int, T: int, total: int, position: int | Tensor, device: torch.device) -> Tensor:
    """[B, 1, T, total] bool, for read-outs that take no other form. position: of the first query among the keys."""
    if visible.cu_seqlens is not None:
        token = torch.arange(B * T, device=device)
        document = document_numbers(visible.cu_seqlens, token).view(B, 1, T)
        return visible_keys(B, T, T, None, None, device) & (document[..., None] == document[:, :, None])
    key = torch.arange(total, device=device)
    shown = (key <= (torch.arange(T, device=device) + position)[:, None]).expand(B, 1, T, total)
    return shown if visible.key_mask is None else shown & visible.key_mask[:, None, None]


def document_borders(positions: Tensor, *, cached: bool = False) -> Tensor | None:
    """Where documents begin and end, counted over all rows one behind the other: int32 [n + 1], on the CPU.

    positions: [B, T]. A token begins a document if its position is not above that of the token before it. None if
    every row is one document. In a graph the answer is never None, unless it decides about a cache (`cached`), and it
    is on the device of the positions.
    """
    begins = F.pad(positions[:, 1:] <= positions[:, :-1], (1, 0))
    if torch.compiler.is_compiling() and not cached:
        return borders(begins)
    if not torch.compiler.is_compiling():
        # The only wait for the device in a pass: operators do not wait for borders on the CPU.
        begins = begins.cpu()
    return borders(begins) if _any(begins) else None


# A compiled graph cannot read values: torch.compile leaves the graph here, with fullgraph=True it stops with an error.
@torch.compiler.disable
def _any(x: Tensor) -> bool:
    return bool(x.any())


def borders(begins: Tensor) -> Tensor:
    """int32 [n + 1] for n tokens that begin a document, with every row's first. begins: [B, T] bool.

    In a graph, whose shapes must not depend on values: [B·T + 1], with empty documents at the end.
    """
    row_starts = torch.arange(begins.shape[1], device=begins.device) == 0
    begins = (begins | row_starts).flatten()
    index = torch.arange(begins.shape[0] + 1, device=begins.device)
    if torch.compiler.is_compiling():
        # The end as a tensor: a number would fix B·T for the whole graph.
        starts = torch.where(begins, index[:-1], index[-1:]).sort().values
    else:
        starts = index[:-1][begins]
    return torch.cat([starts, index[-1:]]).to(torch.int32)


def one_row(x: Tensor) -> Tensor:
    """[B, H, T, D] -> [1, H, B·T, D]: the rows of a batch one behind the other."""
    return x.transpose(0, 1).flatten(1, 2)[None]


def separate_rows(x: Tensor, B: int) -> Tensor:
    """[1, H, B·T, D] -> [B, H, T, D]."""
    return x[0].unflatten(1, (B, -1)).transpose(0, 1)
