"""flash-linear-attention's kernels with our signatures: run only by name, on CUDA, or refused.

This has not been run on a GPU: `tests/ops/test_linear_fla.py` compares the names of the kernels' arguments with the
installed version, and runs the plumbing on a CPU with naive code in place of the kernels.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..packing import on_device
from ..precision import readout_dtype
from .recurrent import Recurrent


def run(
    path: str,
    q: Tensor,
    tensors: dict[str, Tensor],
    gates: dict[str, Tensor],
    state: Any,
    cu_seqlens: Tensor | None,
    scale: float,
) -> Recurrent[Any]:
    """Call the kernel fla.ops.`path` in its layout, [B, T, H, D], with every tensor repeated to the heads of q.

    q: [B, H·G, T, D]; tensors, k among them, and gates: [B, H, T] or [B, H, T, *], by the names of the kernel, with
    masked tokens zeroed; state: a tensor, a pair, or None.
    """
    k, dtype = tensors["k"], readout_dtype(q)
    refuse_what_cannot_run(k)
    if path == "delta_rule.chunk_delta_rule" and dtype == torch.float32:
        raise TypeError(
            "impl='fla' without log_decay expects bfloat16 or float16, got torch.float32, which its kernel lacks. "
            "impl='chunkwise' takes float32"
        )
    G = q.shape[1] // k.shape[1]
    arguments = {name: x.to(dtype) for name, x in tensors.items()} | {name: x.float() for name, x in gates.items()}
    repeated = {name: x.repeat_interleave(G, 1).transpose(1, 2) for name, x in arguments.items()}
    initial = None if state is None else tuple(x.repeat_interleave(G, 1) for x in _as_tuple(state))
    o, final = _kernel(path)(
        q=q.to(dtype).transpose(1, 2),
        **repeated,
        scale=scale,
        initial_state=initial[0] if initial is not None and len(initial) == 1 else initial,
        output_final_state=True,
        # A document without tokens has no state, and the last state is returned.
        cu_seqlens=None if cu_seqlens is None else on_device(cu_seqlens.long().unique_consecutive(), q.device),
    )
    last = slice(None) if cu_seqlens is None else slice(-1, None)
    states = tuple(x[last, ::G].float() for x in _as_tuple(final))
    return Recurrent(o.transpose(1, 2), states[0] if len(states) == 1 else states)


def _as_tuple(state: Any) -> tuple[Tensor, ...]:
    return (state,) if isinstance(state, Tensor) else tuple(state)


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
