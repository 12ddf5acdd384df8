"""The decoding step of `numba_step.py` for tensors: when it runs, its arguments and its threads."""

import gc
import importlib
import logging
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..threads import in_threads
from .one_token import Decoded, Token, put_at_position_

logger = logging.getLogger(__name__)

IMPLEMENTATIONS = ("auto", "torch", "numba")
# Numba has no 16-bit floats: integers hold their bits.
DTYPES = {torch.float32: torch.float32, torch.bfloat16: torch.uint16, torch.float16: torch.int16}
# Keys of a head below which dividing them costs more than it saves.
LEAST_KEYS = 512
# Elements of a cache below which waking a second thread costs more than it saves.
LEAST_ELEMENTS = 512 * 1024
# Reason why compiled code is disabled in this process.
_off: list[str] = []


def switch_off(reason: str) -> None:
    """Disable compiled code in this process: Numba is never imported."""
    _off[:] = [reason]


@cache
def kernels(dtype: torch.dtype) -> Any:
    """The module `numba_step`, compiled for a dtype, or the reason why it cannot be."""
    try:
        module = importlib.import_module("..numba_step", __name__)
    except ImportError as missing:
        return f"{missing.name or missing} is not installed: in a checkout of lucid-attention, pip install '.[cpu]'"
    x = torch.zeros(1, 1, 2, 2, dtype=dtype, device="cpu")
    token = Token(x[:, :, :1], x, x[:, :, :1], x[:, :, :1], None, None, None, "key", 1.0, 1.0, 1.0, None)
    # A compiler makes many objects that live on; looking for garbage among them is a tenth of its time.
    collecting = gc.isenabled()
    gc.disable()
    # Errors of a compiler have no common base class.
    try:
        _run(module, token, 1)
    except Exception as error:
        logger.warning("lucid_attention continues with torch, because Numba failed: %s", error)
        return f"Numba failed: {error}"
    finally:
        if collecting:
            gc.enable()
    return module


def chosen(impl: str, token: Token) -> bool:
    """Whether the step runs for this token. "auto" takes it where it can; "numba" is obeyed or refused."""
    if impl not in IMPLEMENTATIONS:
        known = ", ".join(map(repr, (*IMPLEMENTATIONS, "triton")))
        raise ValueError(f"impl must be one of {known}, got {impl!r}")
    if impl == "torch":
        return False
    reason = _obstacle(token)
    if reason and impl == "numba":
        raise ValueError(f"impl='numba' cannot run: {reason}. Expected 'auto' or 'torch'")
    return not reason


def _obstacle(token: Token) -> str:
    """Why the step cannot run; empty if it can."""
    if _off:
        return _off[0]
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack() > 0:
        return "it is not part of graphs"
    if torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0:
        return "it is not part of transforms"
    for x in token:
        # A wrapper has no memory of its own, and that of a negative view has the wrong sign.
        if isinstance(x, Tensor) and (type(x) is not Tensor or x.is_neg()):
            return "it is for plain tensors"
    k, y = token.k, token.y_past
    if not k.is_cpu:
        return f"it is for CPUs, got tensors on {k.device.type}"
    if k.dtype not in DTYPES:
        return f"it is for float32, bfloat16 and float16, got {k.dtype}"
    if not token.q.dtype == token.v.dtype == y.dtype == k.dtype:
        return f"all must have the dtype of the keys, {k.dtype}: q has {token.q.dtype}, v {token.v.dtype}, y {y.dtype}"
    for x in (k, y):
        if x.stride(-1) != 1 or any(stride % x.shape[-1] for stride in x.stride()[:-1]):
            return "keys and values must be contiguous in the last dimension, and whole rows of it apart"
    found = kernels(k.dtype)
    return found if isinstance(found, str) else ""


def run(
    token: Token,
    pending: int | None = None,
    rows: tuple[Tensor, Tensor] | None = None,
    recent: Tensor | None = None,
    *,
    norm_known: bool = True,
) -> Decoded:
    """The step for a token that `chosen` has accepted.

    PaTH has rows of its own, [n, R, D] for the first `pending` keys and for the recent ones: [n, live + 1, D], float32,
    with the new key at the end. norm_known: False to write 1/‖k‖ of the new key into `token.inverse_norms`.
    """
    with torch.no_grad():
        return _run(kernels(token.k.dtype), token, torch.get_num_threads(), pending, rows, recent, norm_known)


def _run(
    module: Any,
    token: Token,
    threads: int,
    pending: int | None = None,
    rows: tuple[Tensor, Tensor] | None = None,
    recent: Tensor | None = None,
    norm_known: bool = True,
) -> Decoded:
    q, k, v, position, inverse = token.q, token.k, token.v, token.position, token.inverse_norms
    (B, H, total, D), E = k.shape, v.shape[3]
    n, G = B * H, q.shape[1] // H
    R = G if inverse is None else G + 1
    place = total - 1 if position is None else int(position)
    if not 0 <= place < total:
        raise IndexError(f"position must be in [0, M) = [0, {total}), got {place}")
    # In a buffer, places after the new key are masked.
    cached = place if pending is None else pending
    threads = threads if n * cached * (D + E) >= LEAST_ELEMENTS else 1
    pieces = 1 if n % threads == 0 else max(1, min(threads, cached // LEAST_KEYS))
    tasks, even = n * pieces, R + R % 2

    keys, key_strides = _memory(k)
    values, value_strides = _memory(token.y_past)
    used = None if token.norm == "row_max" else inverse
    norms, norm_strides = (_empty(), (0, 0)) if used is None else _memory(used.float())
    mask, mask_strides = (_empty(dtype=torch.bool), (0,)) if token.key_mask is None else _memory(token.key_mask)
    moved, recent_rows, recent_keys, live = _empty(0, 0, D), _empty(0, 0, D), _empty(0, D), 0
    if rows is not None and recent is not None:
        moved, recent_rows = (torch.nn.functional.pad(x, (0, 0, 0, even - R)).numpy() for x in rows)
        recent_keys, live = recent.numpy().reshape(-1, D), recent.shape[1] - 1
    in_rows = *(x // D for x in key_strides), *(x // E for x in value_strides)
    empty, float32 = module.np.empty, module.np.float32
    o, y, state = empty((n, G, E), float32), empty((n, E), float32), empty((tasks, R, 4), float32)
    # By torch, because its memory starts where a line of the processor's cache does.
    sums = torch.empty(tasks, even, E, dtype=torch.float32, device="cpu")
    inputs = (
        *(o, y, state, sums.numpy(), q.float().reshape(n, G, D).numpy(), keys.reshape(-1, D), values.reshape(-1, E)),
        *(v.float().reshape(n, E).numpy(), norms, mask, _per_head(token.sharpness, n)),
        *(_per_head(1.0 if token.beta is None else token.beta, n), moved, recent_rows, recent_keys),
        *((*in_rows, *norm_strides, *mask_strides), (H, pieces, -(-cached // pieces), cached, place, live)),
        *(token.scale, token.strength, (token.norm != "row_max", token.norm == "qk")),
    )
    count = min(threads, tasks)

    def run(tasks: tuple[int, int], heads: tuple[int, int]) -> None:
        widened, scores = (module.BLOCK if k.element_size() == 2 else 0), empty((even, module.BLOCK), float32)
        room = empty((widened, D), float32), empty((widened, E), float32), scores, scores.view("int32")
        module.step(tasks, heads, *inputs, *room, empty((even, D), float32))

    def part(i: int) -> None:
        some = tasks * i // count, tasks * (i + 1) // count
        run(some, some if pieces == 1 else (0, 0))

    in_threads(part, range(count), count)
    if pieces > 1:
        _join(torch.from_numpy(state).view(n, pieces, R, 4), sums.view(n, pieces, even, E)[:, :, :R])
        run((0, 0), (0, n))
    if not norm_known and inverse is not None:
        new = torch.from_numpy(state[::pieces, 0, 3]).view(B, H, 1)
        put_at_position_(inverse, position, new.to(inverse.dtype))
    outputs = torch.from_numpy(o).view(B, H * G, 1, E), torch.from_numpy(y).view(B, H, 1, E)
    return Decoded(*(x.to(v.dtype) for x in outputs))


def _join(state: Tensor, sums: Tensor) -> None:
    """Join the pieces of each head in the first one. state: [n, pieces, R, 4]; sums: [n, pieces, R, E]."""
    top = state[..., 0].amax(1, keepdim=True)
    factor = torch.where(state[..., 0] == top, 1.0, (state[..., 0] - top).exp())
    state[:, 0, :, 1] = (state[..., 1] * factor).sum(1)
    sums[:, 0] = (sums * factor[..., None]).sum(1)
    state[:, 0, :, 0] = top[:, 0]


@lru_cache(maxsize=64)
def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
    """An array without elements, for what a step does not have."""
    return torch.empty(shape or 0, dtype=dtype, device="cpu").numpy()


def _per_head(x: Tensor | float, n: int) -> Any:
    """A number for all heads, or one of each, as an array [n]."""
    return x.reshape(n).float().numpy() if isinstance(x, Tensor) else _constant(x, n)


@lru_cache(maxsize=64)
def _constant(x: float, n: int) -> Any:
    return torch.full((n,), x, dtype=torch.float32, device="cpu").numpy()


def _memory(x: Tensor) -> tuple[Any, tuple[int, ...]]:
    """The elements of x and those between them as one array, and the strides of all dimensions but the last."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    strides, size = x.stride(), 1
    for length, stride in zip(x.shape, strides, strict=True):
        size += (length - 1) * stride
    flat = x.as_strided((size if x.numel() else 0,), (1,))
    return (flat if x.element_size() != 2 else flat.view(DTYPES[x.dtype])).numpy(), strides[:-1]
