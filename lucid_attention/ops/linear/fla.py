"""flash-linear-attention's kernels behind our signatures: run only when asked for by name, on CUDA, or refused.

Arguments are those of our operators after their checks, with masked tokens zeroed; results are o and the state. This
has not been run on a GPU: `tests/ops/test_linear_fla.py` compares the names of the kernels' arguments with the
installed version, and runs the plumbing on a CPU with naive code in place of the kernels.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..packing import on_device
from ..precision import readout_dtype

Memory = tuple[Tensor, Tensor]


def delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """[B, H·G, T, D], [B, H, T, D], [B, H, T, E], [B, H, T], [B, H, T], [B, H, D, E]."""
    refuse_what_cannot_run(k)
    dtype = readout_dtype(q)
    if log_decay is None:
        if dtype == torch.float32:
            raise TypeError(
                "impl='fla' without log_decay expects bfloat16 or float16, got torch.float32, which its kernel lacks. "
                "impl='chunkwise' takes float32"
            )
        path, tensors = "delta_rule.chunk_delta_rule", {}
    else:
        path, tensors = "gated_delta_rule.chunk_gated_delta_rule", {"g": log_decay.float()}
    tensors |= {"k": k.to(dtype), "v": v.to(dtype), "beta": beta.to(dtype)}
    o, states = _run(path, q.to(dtype), tensors, None if state is None else (state,), cu_seqlens, scale)
    return o, states[0]


def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """[B, H·G, T, D], [B, H, T, D], [B, H, T, E], [B, H, T, D], [B, H, D, E]."""
    refuse_what_cannot_run(k)
    dtype = readout_dtype(q)
    tensors = {"k": k.to(dtype), "v": v.to(dtype), "g": log_decay.float()}
    o, states = _run("gla.chunk_gla", q.to(dtype), tensors, None if state is None else (state,), cu_seqlens, scale)
    return o, states[0]


def gsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    log_decay: Tensor,
    state: Memory | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Memory]:
    """[B, H·G, T, D], [B, H, T, D], [B, H, T, E], [B, H, T, M] twice, ([B, H, D, M], [B, H, M, E])."""
    refuse_what_cannot_run(k)
    dtype = readout_dtype(q)
    tensors = {"k": k.to(dtype), "v": v.to(dtype), "s": s.to(dtype), "g": log_decay.float()}
    o, states = _run("gsa.chunk_gsa", q.to(dtype), tensors, state, cu_seqlens, scale)
    return o, (states[0], states[1])


def refuse_what_cannot_run(k: Tensor) -> None:
    if k.device.type != "cuda":
        raise ValueError(f"impl='fla' expects CUDA tensors, got {k.device}: impl='chunkwise' runs on every device")
    if k.dtype == torch.float64:
        raise TypeError("impl='fla' expects float32, bfloat16 or float16, got torch.float64")


def _kernel(path: str) -> Any:
    module, name = path.rsplit(".", 1)
    try:
        # Imported by name here, because the package itself needs torch alone.
        return getattr(import_module(f"fla.ops.{module}"), name)
    except ImportError as error:
        raise ImportError(
            f"impl='fla' expects fla.ops.{path} of flash-linear-attention (pip install flash-linear-attention), "
            f"got {error}"
        ) from error


def _run(
    path: str,
    q: Tensor,
    tensors: dict[str, Tensor],
    state: tuple[Tensor, ...] | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Call a kernel in its layout, [B, T, H, D], with every tensor repeated to the heads of q."""
    H = tensors["k"].shape[1]
    G = q.shape[1] // H
    repeated = {name: x.repeat_interleave(G, 1).transpose(1, 2) for name, x in tensors.items()}
    initial = None if state is None else tuple(x.repeat_interleave(G, 1) for x in state)
    o, final = _kernel(path)(
        q=q.transpose(1, 2),
        **repeated,
        scale=scale,
        initial_state=initial[0] if initial is not None and len(initial) == 1 else initial,
        output_final_state=True,
        # A document without tokens has no state, and the last state is asked for.
        cu_seqlens=None if cu_seqlens is None else on_device(cu_seqlens.long().unique_consecutive(), q.device),
    )
    final = (final,) if isinstance(final, Tensor) else final
    last = slice(None) if cu_seqlens is None else slice(-1, None)
    return o.transpose(1, 2), tuple(x[last, ::G].float() for x in final)
