"""The public functions.

Shapes: B batch, H key/value heads, G query heads per key/value head, T new and S past positions, D key size, E value
size.
"""

from collections.abc import Mapping
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from .. import checks, packing
from ..blocks import Block
from ..custom_op import refuse_forward_mode
from ..dispatch import BLOCKWISE_AND_TRITON, choose
from ..keys import KeyMap, rms_normalize
from ..precision import no_autocast, readout_dtype
from ..softmax.attention import softmax_attention
from ..softmax.strips import clean_queries
from . import reference
from .solve_op import obstacle, precondition_op, precondition_triton_op
from .system import Options, Past, System, checked_system

# For users who call it as they call SDPA with a cache.
SHORTER = "For tokens after earlier ones, give those as past=(k_past, y_past), or use lucid_decode"


class SdpaNames(TypedDict, total=False):
    """Arguments of `scaled_dot_product_attention` that LUCID accepts only where they ask for nothing."""

    attn_mask: None
    dropout_p: float
    enable_gqa: bool


def lucid_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    past: Past | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    beta: Tensor | None = None,
    norm: str = "key",
    sharpness: float | Tensor | None = None,
    strength: float = 1.0,
    key_map: KeyMap | None = None,
    block: Block = 1,
    is_causal: bool | None = None,
    tolerance: float | None = None,
    scale: float | None = None,
    impl: str = "auto",
    **sdpa: Unpack[SdpaNames],
) -> Tensor:
    """LUCID attention: softmax(q kᵀ · scale) P⁻¹ v, where `scaled_dot_product_attention` reads v itself.

    Args:
        q: [B, H·G, T, D]. Query heads are a multiple of key/value heads; the solve is paid once per key/value head.
        k: [B, H, T, D], as the softmax sees them (after rotary embedding).
        v: [B, H, T, E].
        past: (k_past [B, H, S, D], y_past [B, H, S, E]), keys and *preconditioned* values of earlier positions, as
            `precondition` returned them.
        key_mask: [B, S + T] bool, True where a key takes part. A masked key leaves P and the softmax, whatever it
            holds. A query that sees no key reads zero.
        cu_seqlens: int32 [n + 1], borders of n documents packed into one row (B = 1); no document sees another.
        beta: [B, H, T], step size of each write: Y = (I + diag(β) stril P)⁻¹ diag(β) V. In [0, 1] ‖Y‖ ≤ 2‖V‖, up to
            b < 2 ‖Y‖ ≤ 2b/(2 − b) ‖V‖; at 2, where a write reverses what was stored, growth is linear in the length.
        norm: "key" (P of keys normalised to √D, the paper's), "qk" (gain-free RMS norm of q and k in the softmax as
            well), "row_max" (P of raw keys, causal row maximum subtracted).
        sharpness: c in P_ij = exp(c (cos θ_ij − 1)), a positive number or a tensor [H]. Default √D, the paper's matrix;
            c → ∞ is softmax attention.
        strength: s in P = I + s · stril exp(…), a number from 0 (softmax attention, no solve) to 1 (LUCID).
        key_map: P is made of (k − center) @ matrix instead of k; the softmax reads k. Gradients reach center and
            matrix. A past holds k itself. `calibrated_key_map` makes one of sample keys.
        block: 1 for causal attention. n: tokens see each other inside blocks of n (the last may be shorter) and all
            blocks before; P is block-triangular with ½(I + exp(…)) on the diagonal (at strength s, I + s (P − I)), so
            that ‖P⁻¹‖ ≤ 2. None: one block, as in an encoder. int32 or int64 [m + 1]: borders of m blocks, from 0 to
            T. Masked positions count, packed documents start anew, and a past must end at a border. Blocks beyond
            4096 tokens are solved by conjugate gradients.
        is_causal: True is block=1, False is block=None, by the name of `scaled_dot_product_attention`.
        tolerance: the residual, relative to each column of V, that conjugate gradients must reach; otherwise the call
            is refused. Y is at most twice as far off, and rounding comes on top. Default 1e-5, in float64 1e-12.
        scale: of the softmax scores, default 1/√D.
        impl: "auto", "blockwise" (linear memory), "reference" (the dense equation) or, on CUDA and ROCm devices,
            "triton" (kernels for bfloat16, float16 and float32; `docs/guides/gpu.md`).
        sdpa: attn_mask=None, dropout_p=0 and any enable_gqa of `scaled_dot_product_attention` are accepted; the error
            for other values names what to use.

    Returns:
        o: [B, H·G, T, E].
    """
    _check_sdpa_names(sdpa)
    system = checked_system(
        k,
        v,
        past=past,
        key_mask=key_mask,
        cu_seqlens=cu_seqlens,
        beta=beta,
        norm=norm,
        sharpness=sharpness,
        strength=strength,
        key_map=key_map,
        block=block,
        is_causal=is_causal,
        tolerance=tolerance,
    )
    checks.check_q(q, k, SHORTER)
    checks.check_scale(scale)
    impl = _chosen(impl, system, v)
    y = _precondition(system, v, impl)
    if past is not None:
        # The past of the arguments: the keys of the system may be mapped.
        k, y = torch.cat([past[0], k], 2), torch.cat([past[1], y.to(past[1].dtype)], 2)
    if norm == "qk":
        q, k = normalize_for_readout(q, k, key_mask)
    if impl == "reference":
        return reference.readout(q, k, y, key_mask, cu_seqlens, scale, system.block).to(readout_dtype(q))
    return softmax_attention(q, k, y, key_mask=key_mask, cu_seqlens=cu_seqlens, scale=scale, block=system.block)


def _check_sdpa_names(names: Mapping[str, Any]) -> None:
    for name, value in names.items():
        if name not in SdpaNames.__annotations__:
            from ...messages import did_you_mean

            near = did_you_mean(name, [*Options.__annotations__, *SdpaNames.__annotations__, "scale", "impl"])
            raise TypeError(f"lucid_attention() got an unexpected keyword argument {name!r}{near}")
        if name == "attn_mask" and value is not None:
            raise ValueError(
                "attn_mask must be None: a hidden key must leave P as well as the softmax. Use key_mask [B, S + T] for "
                "padding, cu_seqlens for packed documents, block for tokens that see each other"
            )
        if name == "dropout_p" and value != 0:
            raise ValueError(
                f"dropout_p must be 0, got {value}: LUCID has no attention dropout; drop out elements of o"
            )


def normalize_for_readout(q: Tensor, k: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """q and k as the softmax of norm="qk" sees them: gain-free RMS norm. q: [B, H·G, T, D], k: [B, H, S + T, D]."""
    if key_mask is not None:
        # Before the norm: the gradient of a masked NaN is NaN, not zero.
        q, k = clean_queries(q, key_mask), k.masked_fill(~key_mask[:, None, :, None], 0)
    return rms_normalize(q), rms_normalize(k)


def precondition(k: Tensor, v: Tensor, *, impl: str = "auto", **options: Unpack[Options]) -> Tensor:
    """Y = P⁻¹ V: the values that softmax attention reads in LUCID, and what a cache keeps instead of V.

    k: [B, H, T, D], v: [B, H, T, E] -> y: [B, H, T, E], zero at masked keys. Options past, key_mask, cu_seqlens, beta,
    norm, sharpness, strength, key_map, block, is_causal and tolerance as in `lucid_attention`.

    With block=n or None it is a product of its own: values in which similar keys of a block share what they hold, the
    ridge regression of V on the keys, for any read-out.
    """
    system = checked_system(k, v, **options)
    return _precondition(system, v, _chosen(impl, system, v))


def preconditioner(k: Tensor, **options: Unpack[Options]) -> Tensor:
    """The matrix P = I + s · diag(β) stril exp(…) itself: [B, H, T, T] for k: [B, H, T, D]. For analysis and teaching.

    With `block` it has symmetric blocks on its diagonal. A masked key has a row and a column of the identity. Options
    as in `lucid_attention`, but for past.
    """
    if options.get("past") is not None:
        raise TypeError("preconditioner() got an unexpected keyword argument 'past': P belongs to a whole sequence")
    system = checked_system(k, k, **options)
    _check_borders(system)
    with no_autocast(k):
        return reference.dense_matrix(system.widened()).to(k.dtype)


def _precondition(system: System, v: Tensor, impl: str) -> Tensor:
    if impl == "reference":
        _check_borders(system)
        return reference.precondition(system, v)
    inputs = system.operator_inputs()
    refuse_forward_mode(v, *inputs)
    op = precondition_triton_op if impl == "triton" else precondition_op
    return op.forward(v, *inputs)[0]


def _chosen(impl: str, system: System, v: Tensor) -> str:
    return choose(impl, BLOCKWISE_AND_TRITON, system.k, obstacle(system, v))


def _check_borders(system: System) -> None:
    """Check the values of `cu_seqlens`, as the block-wise solve does where it reads them."""
    if system.cu_seqlens is not None:
        packing.offsets(system.cu_seqlens, system.k.shape[2])
