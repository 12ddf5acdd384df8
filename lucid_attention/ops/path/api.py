"""The public operators on PaTH scores, and their `torch.library` operators.

A_ij = k_jᵀ (H_{j+1} … H_i) q_i with H_s = I − β_s w_s w_sᵀ: a key is moved by the Householder factors of all later
positions, so the past is kept with its keys moved to its end (`decode.keys_at_end`).

Shapes: B batch, H key/value heads, G query heads per key/value head, T new and S past positions, D key size, E value
size.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from .. import checks, custom_op, packing
from ..custom_op import refuse_forward_mode
from ..dispatch import BLOCKWISE_AND_TRITON, choose, kernel_obstacle
from ..precision import readout_dtype
from . import blockwise, reference
from .system import DIFFERENTIABLE, INPUTS, LucidPast, Past, PathSystem, checked_path_system, from_operator


def path_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    *,
    past: Past | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """Causal PaTH attention: softmax(A · scale) v with A_ij = k_jᵀ (∏_{s=j+1..i} (I − β_s w_s w_sᵀ)) q_i.

    Args:
        q: [B, H·G, T, D]. No rotary embedding: w and beta encode positions.
        k: [B, H, T, D].
        v: [B, H, T, E].
        w: [B, H, T, D], directions of the Householder factors, used without normalisation (PaTH's have length 1).
            In float32 with 16-bit q, k, v they keep that length.
        beta: [B, H, T], their strengths; in [0, 2] for w of length 1, so that no factor expands. 0 is the identity.
        past: (k_past [B, H, S, D], v_past [B, H, S, E]) of earlier positions, keys moved to the end of the past, as
            `keys_at_end` returns them.
        key_mask: [B, S + T] bool, True where a position takes part. A masked position is ignored, with its w and beta,
            and reads zero.
        cu_seqlens: int32 [n + 1], borders of n documents packed into one row (B = 1); documents do not see each other.
        scale: of the scores, default 1/√D.
        impl: "auto", "blockwise" (a binary tree, linear memory), "reference" (the dense formula) or, on CUDA and ROCm
            devices, "triton" (kernels for bfloat16, float16 and float32; `docs/guides/gpu.md`).

    Returns:
        o: [B, H·G, T, E].
    """
    checks.check_tensor("q", q)
    system = checked_path_system(
        q, k, v, w, beta, solves=False, past=past, key_mask=key_mask, cu_seqlens=cu_seqlens, scale=scale
    )
    return _run(system, impl)[0]


def lucid_path_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    *,
    past: LucidPast | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sharpness: float | Tensor | None = None,
    scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """Causal LUCID-PaTH attention: the read-out of `path_attention` over y of `path_precondition`.

    past: (k_past, y_past, inverse_norms), as in `path_precondition`. Other arguments as in `path_attention`.

    Returns:
        o: [B, H·G, T, E].
    """
    return lucid_path_pass(
        q, k, v, w, beta, past=past, key_mask=key_mask, cu_seqlens=cu_seqlens, sharpness=sharpness, scale=scale,
        impl=impl,
    )[0]  # fmt: skip


def lucid_path_pass(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, *, impl: str = "auto", **options: Any
) -> tuple[Tensor, Tensor]:
    """o of `lucid_path_attention`, with its options, and y of `path_precondition`, on one tree, for a cache."""
    checks.check_tensor("q", q)
    return _run(checked_path_system(q, k, v, w, beta, solves=True, **options), impl)


def path_precondition(
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    *,
    past: LucidPast | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sharpness: float | Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Y = P⁻¹ V with P_ij = exp(c (k̂_jᵀ (∏_{s=j+1..i} H_s) k̂_i − 1)), k̂ = k/‖k‖: the values of LUCID-PaTH.

    With w of length 1 and beta in [0, 2], ‖P⁻¹‖ ≤ 2 for any keys and any length.

    Args:
        k, v, w, beta, key_mask, cu_seqlens, impl: as in `path_attention`.
        past: (k_past, y_past, inverse_norms): keys moved to the end of the past, their y, and `inverse_key_norms` of
            the keys before they were moved, [B, H, S].
        sharpness: c, a positive number or a tensor [H]; default √D, the paper's matrix.

    Returns:
        y: [B, H, T, E], zero at masked positions.
    """
    system = checked_path_system(
        None, k, v, w, beta, solves=True, past=past, key_mask=key_mask, cu_seqlens=cu_seqlens, sharpness=sharpness
    )
    return _run(system, impl)[1]


def _run(system: PathSystem, impl: str) -> tuple[Tensor, Tensor]:
    """o and y. Without a q there is no o, without a solve no y: the tensor in its place must not be used."""
    impl = choose(impl, BLOCKWISE_AND_TRITON, system.k, _triton_obstacle(system))
    if impl == "reference":
        return _run_reference(system)
    inputs = system.operator_inputs()
    refuse_forward_mode(*inputs)
    op = path_triton_op if impl == "triton" else path_op
    o, _, y = op.forward(*inputs)
    return o if system.q is None else o.to(readout_dtype(system.q)), y


def _run_reference(system: PathSystem) -> tuple[Tensor, Tensor]:
    if system.cu_seqlens is not None:
        packing.offsets(system.cu_seqlens, system.k.shape[2])
    y = reference.precondition(system) if system.solves else system.v
    if system.q is None:
        return y, y
    return reference.attention(replace(system, v=y)).to(readout_dtype(system.q)), y


def _triton_obstacle(system: PathSystem) -> str | None:
    """Reason why the kernels cannot compute this system on any device; None if they can."""
    tensors = {name: x for name in DIFFERENTIABLE if isinstance(x := getattr(system, name), Tensor)}
    return kernel_obstacle(system.k.shape[3], system.v.shape[3], **tensors)


Tensors = Sequence[Tensor | None]


def _register(name: str, impl: str, forward: Callable[..., Tensors], backward: Callable[..., Tensors]) -> Any:
    """An operator (inputs) -> (o, lse, y), o and lse if there is a q, y if it solves."""
    return custom_op.register(
        name,
        INPUTS,
        3,
        forward=forward,
        backward=backward,
        shapes=_uninitialised_outputs,
        differentiable=len(DIFFERENTIABLE),
        auxiliary=(1,),
        unbatched=("cu_seqlens",),
        about=f"impl='{impl}'",
    )


def _uninitialised_outputs(*inputs: Any) -> Tensors:
    system = from_operator(*inputs)
    q, v = system.q, system.v
    y = v.new_empty(v.shape) if system.solves else None
    if q is None:
        return None, None, y
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=system.dtype), y


def _forward(*inputs: Any) -> Tensors:
    return blockwise.forward(from_operator(*inputs))


def _backward(douts: Tensors, outs: Tensors, inputs: Sequence[Any], needed: Sequence[bool]) -> Tensors:
    do, _, dy = douts
    return blockwise.backward(from_operator(*inputs), outs, do, dy)


path_op = _register("path", "blockwise", _forward, _backward)


def _triton_forward(*inputs: Any) -> Tensors:
    from . import triton_pass

    return triton_pass.forward(from_operator(*inputs))


def _triton_backward(douts: Tensors, outs: Tensors, inputs: Sequence[Any], needed: Sequence[bool]) -> Tensors:
    from . import triton_pass

    do, _, dy = douts
    return triton_pass.backward(from_operator(*inputs), outs, do, dy)


path_triton_op = _register("path_triton", "triton", _triton_forward, _triton_backward)
