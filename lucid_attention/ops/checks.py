"""Checks at the door: every message names the argument, what was expected and what it got.

Shapes only, never values: a value check would wait for the device. The values of `cu_seqlens` are checked where they
are read (`packing.py`).
"""

import math
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .keys import KeyMap
from .precision import autocast_enabled

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NORMS = ("key", "qk", "row_max")
CENTERS = ("none", "learned", "calibrated")
# P needs all keys before a token, and a shard lacks some. Heads may be split: every head is solved on its own.
SHARDING_HELP = (
    "LUCID solves with all keys of a sequence, and this process has a part of them. Leave "
    "context_parallel (accelerate: cp_size) out, and split the batch or the heads instead"
)
# The kernel that torch's newer form of context parallelism replaces.
CONTEXT_PARALLEL_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention.default


def described(x: Any) -> str:
    """The type of x and, if it has one, its length."""
    return f"{type(x).__name__} of length {len(x)}" if hasattr(x, "__len__") else type(x).__name__


def check_tensor(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {x.layout}")
    # A graph may run elsewhere than it was made. There our operators check when they run (`custom_op.py`).
    if not torch.compiler.is_compiling():
        refuse_sharded_sequence(x)


def check_float(name: str, x: Tensor) -> None:
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} must be float64, float32, bfloat16 or float16, got {x.dtype}")


def check_shape(name: str, x: Tensor, expected: tuple[int, ...], letters: str) -> None:
    if tuple(x.shape) != expected:
        raise ValueError(f"{name} must be {letters} = {list(expected)}, got shape {list(x.shape)}")


def check_device(name: str, x: Tensor, like: Tensor, like_name: str = "k") -> None:
    if x.device != like.device:
        raise ValueError(f"{name} must be on the device of {like_name}: expected {like.device}, got {x.device}")


def check_same_dtype(name: str, x: Tensor, like: Tensor, like_name: str = "k") -> None:
    # Under autocast the layers before may return a mixture.
    if x.dtype != like.dtype and not autocast_enabled(like):
        raise TypeError(f"{name} must have the dtype of {like_name}: expected {like.dtype}, got {x.dtype}")


def check_heads_first(name: str, x: Any, letters: str) -> None:
    """A floating point [B, H, T, *] tensor without empty batch, heads or features."""
    check_tensor(name, x)
    if x.ndim != 4:
        raise ValueError(f"{name} must be {letters} (4 dimensions), got {x.ndim} dimensions: shape {list(x.shape)}")
    check_float(name, x)
    if 0 in x.shape:
        raise ValueError(f"{name} must be {letters} with no empty dimension, got shape {list(x.shape)}")


def check_kv(k: Any, v: Any) -> None:
    check_heads_first("k", k, "[B, H, T, D]")
    check_heads_first("v", v, "[B, H, T, E]")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v must match k in [B, H, T]: expected {list(k.shape[:3])}, got {list(v.shape[:3])}")
    check_device("v", v, k)
    check_same_dtype("v", v, k)


def check_q(q: Any, k: Tensor, shorter: str = "") -> None:
    """shorter: what to do about a q with fewer tokens than k."""
    check_heads_first("q", q, "[B, H·G, T, D]")
    B, H, T, D = k.shape
    if q.shape[1] % H:
        raise ValueError(
            f"q must have a multiple of the heads of k and v: expected a multiple of {H}, got {q.shape[1]}"
        )
    expected = (B, q.shape[1], T, D)
    if shorter and q.shape[2] < T:
        raise ValueError(f"q must be [B, H·G, T, D] = {list(expected)}, got shape {list(q.shape)}. {shorter}")
    check_shape("q", q, expected, "[B, H·G, T, D]")
    check_device("q", q, k)
    check_same_dtype("q", q, k)


def check_past(past: Any, k: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Return `(k_past, y_past)`, or None where nothing is in the past yet."""
    if past is None:
        return None
    if not isinstance(past, (tuple, list)) or len(past) != 2:
        raise TypeError(f"past must be a pair (k_past, y_past), got {described(past)}")
    k_past, y_past = past
    for name, x, like in (("k_past", k_past, k), ("y_past", y_past, k if v is None else v)):
        check_tensor(name, x)
        if x.ndim != 4:
            raise ValueError(f"{name} must be [B, H, S, *] (4 dimensions), got shape {list(x.shape)}")
        B, H, _, size = like.shape
        check_shape(name, x, (B, H, k_past.shape[2], size), "[B, H, S, " + ("D]" if name == "k_past" else "E]"))
        check_float(name, x)
        check_device(name, x, k)
        check_same_dtype(name, x, like, "k" if name == "k_past" else "v")
    return None if k_past.shape[2] == 0 else (k_past, y_past)


def check_inverse_norms(inverse_norms: Any, k: Tensor, letters: str) -> None:
    """1/‖k‖ of every key of k: [B, H, N, D], in any floating point dtype."""
    check_tensor("inverse_norms", inverse_norms)
    check_float("inverse_norms", inverse_norms)
    check_shape("inverse_norms", inverse_norms, tuple(k.shape[:3]), letters)
    check_device("inverse_norms", inverse_norms, k)


def check_key_mask(key_mask: Any, k: Tensor, past_length: int, letters: str = "[B, S + T]") -> None:
    if key_mask is None:
        return
    check_tensor("key_mask", key_mask)
    if key_mask.dtype != torch.bool:
        raise TypeError(
            f"key_mask must be torch.bool (True where a key takes part), got {key_mask.dtype}: give key_mask.bool()"
        )
    check_shape("key_mask", key_mask, (k.shape[0], past_length + k.shape[2]), letters)
    check_device("key_mask", key_mask, k)


def check_cu_seqlens(cu_seqlens: Any, k: Tensor, past: Any, past_name: str = "past") -> None:
    if cu_seqlens is None:
        return
    check_tensor("cu_seqlens", cu_seqlens)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens must be [n + 1] offsets of n >= 1 documents, got shape {list(cu_seqlens.shape)}")
    if k.shape[0] != 1:
        raise ValueError(f"cu_seqlens packs documents into one row: expected batch size 1, got {k.shape[0]}")
    if cu_seqlens.device.type != "cpu":
        check_device("cu_seqlens", cu_seqlens, k)
    if past is not None:
        raise ValueError(f"cu_seqlens and {past_name} exclude each other: expected one of them, got both")


def check_block(block: Any, k: Tensor, past_length: int, cu_seqlens: Any, beta: Any, norm: str) -> None:
    """Blocks of tokens that see each other: a length, None for one block, or borders."""
    if isinstance(block, Tensor):
        if block.dtype not in (torch.int32, torch.int64) or block.ndim != 1 or block.shape[0] < 2:
            expected = "block must be a length, None, or int32 or int64 borders [n + 1] of n >= 1 blocks"
            raise ValueError(f"{expected}, got {block.dtype} of shape {list(block.shape)}")
        if block.device.type != "cpu":
            check_device("block", block, k)
        if cu_seqlens is not None:
            raise ValueError("block as borders and cu_seqlens exclude each other: expected a length, got a tensor")
    elif block is not None:
        check_size("block", block)
        if block == 1:
            return
        if past_length % block:
            raise ValueError(
                f"past must end at a border of blocks: expected a multiple of block = {block} positions, got "
                f"{past_length}. The values of an unfinished block are not final: solve it again as a whole"
            )
    elif past_length:
        raise ValueError(
            "block=None is one block of all positions, whose values are final with the last of them: expected no past, "
            f"got {past_length} positions. For new positions that see each other, give their number as block"
        )
    if beta is not None:
        raise ValueError(
            "beta needs block=1: β is the size of one write after another, and the tokens of a block write at the same "
            "time, in a symmetric system that diag(β) would not leave symmetric; expected beta=None"
        )
    if norm == "row_max":
        raise ValueError(
            "norm='row_max' needs block=1: row maxima make the blocks on the diagonal of P unsymmetric, and P may be "
            "singular; expected 'key' or 'qk'"
        )


def check_beta(beta: Any, k: Tensor) -> None:
    if beta is None:
        return
    check_tensor("beta", beta)
    check_float("beta", beta)
    check_shape("beta", beta, tuple(k.shape[:3]), "[B, H, T]")
    check_device("beta", beta, k)


def check_factors(k: Tensor, w: Any, beta: Any) -> None:
    """The Householder factors of PaTH. In any dtype: rounded to 16 bits, w would no longer have length 1."""
    check_heads_first("w", w, "[B, H, T, D]")
    check_shape("w", w, tuple(k.shape), "[B, H, T, D]")
    check_device("w", w, k)
    if beta is None:
        raise TypeError("beta must be a torch.Tensor, got None")
    check_beta(beta, k)


def check_norm(norm: Any) -> None:
    if norm not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(map(repr, NORMS))}, got {norm!r}")


def check_positive(name: str, x: Any, *, optional: bool = False) -> None:
    """A positive finite number; None if it is optional."""
    if x is None and optional:
        return
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise TypeError(f"{name} must be a positive number{' or None' * optional}, got {type(x).__name__}")
    # Kernels compute in float32.
    if not 0 < x <= torch.finfo(torch.float32).max:
        raise ValueError(f"{name} must be a positive finite number in float32, got {x}")


def check_sharpness(sharpness: Any, k: Tensor) -> None:
    if sharpness is None:
        return
    if isinstance(sharpness, Tensor):
        check_float("sharpness", sharpness)
        check_shape("sharpness", sharpness, (k.shape[1],), "[H]")
        check_device("sharpness", sharpness, k)
    elif isinstance(sharpness, bool) or not isinstance(sharpness, (int, float)):
        raise TypeError(f"sharpness must be a positive number or a tensor [H], got {type(sharpness).__name__}")
    else:
        check_positive("sharpness", sharpness)


def check_center(center: str, whiten: bool) -> None:
    """Check the settings of a module that has a key map of its own."""
    if center not in CENTERS:
        raise ValueError(f"center must be one of {', '.join(map(repr, CENTERS))}, got {center!r}")
    if whiten and center == "none":
        raise ValueError("whiten=True needs center='learned' or center='calibrated', got center='none'")


def check_key_map(key_map: Any, k: Tensor) -> None:
    if key_map is None:
        return
    if not isinstance(key_map, KeyMap):
        raise TypeError(f"key_map must be a KeyMap(center, matrix) or None, got {described(key_map)}")
    (_, H, _, D), shapes = k.shape, {"center": "[H, D]", "matrix": "[H, D, D]"}
    for (field, letters), x in zip(shapes.items(), key_map, strict=True):
        if x is not None:
            name = f"key_map.{field}"
            check_tensor(name, x)
            check_float(name, x)
            check_shape(name, x, (H, D) if field == "center" else (H, D, D), letters)
            check_device(name, x, k)


def check_strength(strength: Any) -> None:
    if isinstance(strength, bool) or not isinstance(strength, (int, float)):
        raise TypeError(f"strength must be a number from 0 to 1, got {type(strength).__name__}")
    if not 0 <= strength <= 1:
        raise ValueError(f"strength must be a number from 0 to 1, got {strength}")


def check_size(name: str, x: Any) -> None:
    if not isinstance(x, int) or isinstance(x, bool) or x < 1:
        raise ValueError(f"{name} must be a positive integer, got {x!r}")


def check_scale(scale: Any) -> None:
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (int, float))):
        raise TypeError(f"scale must be a number or None (1/√D), got {type(scale).__name__}")
    if scale is not None and not -math.inf < scale < math.inf:
        raise ValueError(f"scale must be a finite number, got {scale}")


def refuse_sharded_sequence(x: Any = None) -> None:
    """Raise inside torch's context parallelism, and for a DTensor [B, H, T, *] whose T is sharded."""
    if context_parallel_is_active():
        raise RuntimeError(
            f"the sequence is split over processes (torch's context parallelism is active): {SHARDING_HELP}"
        )
    placements = getattr(x, "placements", None)
    if placements is not None and x.ndim == 4 and any(getattr(placement, "dim", None) == 2 for placement in placements):
        raise RuntimeError(
            f"the sequence is split over processes, as a DTensor with placements {placements}: {SHARDING_HELP}"
        )


def context_parallel_is_active() -> bool:
    """Whether torch gives `scaled_dot_product_attention` to processes that hold parts of a sequence."""
    # `context_parallel` replaces the function. Other tools replace it too, and leave sequences whole.
    if F.scaled_dot_product_attention.__module__.startswith("torch.distributed."):
        return True
    dtensor = sys.modules.get("torch.distributed.tensor")
    if dtensor is None:
        return False
    dispatcher = getattr(dtensor.DTensor, "_op_dispatcher", None)
    return CONTEXT_PARALLEL_KERNEL in getattr(dispatcher, "_custom_op_handlers", ())
