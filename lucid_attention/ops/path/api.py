"""The public operators on PaTH scores.

A_ij = k_jᵀ (H_{j+1} … H_i) q_i with H_s = I − β_s w_s w_sᵀ: a key is moved by the Householder factors of all later
positions, so the past is kept with its keys at its end (`factors.keys_at_end`).

Shapes: B batch, H key/value heads, G query heads per key/value head, T new and S past positions, D key size, E value
size.
"""

from dataclasses import replace

from torch import Tensor

from .. import checks, packing
from ..custom_op import refuse_forward_mode
from ..dispatch import BLOCKWISE_AND_TRITON, choose
from ..precision import readout_dtype
from . import reference
from .system import LucidPast, Past, PathSystem, checked_path_system
from .torch_op import path_op
from .triton_op import obstacle, path_triton_op


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
        q: [B, H·G, T, D]. No rotary embedding: w and beta say where a token is.
        k: [B, H, T, D].
        v: [B, H, T, E].
        w: [B, H, T, D], directions of the Householder factors, used as they come (PaTH normalises them to length 1). In
            float32 beside 16-bit q, k, v they keep that length.
        beta: [B, H, T], their strengths, in [0, 2] for length 1: nothing can grow then. 0 leaves everything as it is.
        past: (k_past [B, H, S, D], v_past [B, H, S, E]) of earlier positions, keys moved to the end of the past, as
            `keys_at_end` returns them.
        key_mask: [B, S + T] bool, True where a position takes part. A masked position is as if it were not there
            (its w and beta, too) and reads zero.
        cu_seqlens: int32 [n + 1], borders of n documents packed into one row (B = 1): none sees another.
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
    o, _ = lucid_path_pass(
        q,
        k,
        v,
        w,
        beta,
        past=past,
        key_mask=key_mask,
        cu_seqlens=cu_seqlens,
        sharpness=sharpness,
        scale=scale,
        impl=impl,
    )
    return o


def lucid_path_pass(
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
) -> tuple[Tensor, Tensor]:
    """o of `lucid_path_attention` and y of `path_precondition`, on one tree: what a module with a cache needs."""
    checks.check_tensor("q", q)
    system = checked_path_system(
        q,
        k,
        v,
        w,
        beta,
        solves=True,
        past=past,
        key_mask=key_mask,
        cu_seqlens=cu_seqlens,
        sharpness=sharpness,
        scale=scale,
    )
    return _run(system, impl)


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
    """Y = P⁻¹ V with P_ij = exp(c (k̂_jᵀ (∏_{s=j+1..i} H_s) k̂_i − 1)), k̂ = k/‖k‖: what LUCID-PaTH reads and caches.

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
        None,
        k,
        v,
        w,
        beta,
        solves=True,
        past=past,
        key_mask=key_mask,
        cu_seqlens=cu_seqlens,
        sharpness=sharpness,
    )
    return _run(system, impl)[1]


def _run(system: PathSystem, impl: str) -> tuple[Tensor, Tensor]:
    """o and y. Without a q there is no o, without a solve no y: what is returned in its place must not be used."""
    impl = choose(impl, BLOCKWISE_AND_TRITON, system.k, obstacle(system))
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
