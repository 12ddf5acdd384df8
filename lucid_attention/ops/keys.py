"""Normalised keys, k̂ = k/‖k‖ (the paper's K_RN is √D · k̂), and the defaults that depend on the size of a key.

There is no eps: it would pull the diagonal of P away from 1 for small keys and make prefill and decoding disagree.
A zero key has no direction; k̂ = 0 there, so it has cosine 0 to every key, and its gradient is 0.
"""

import math

import torch
from torch import Tensor


def inverse_norms(k: Tensor) -> Tensor:
    """1/‖k‖ along the last dimension, kept: [..., D] -> [..., 1]; 0 for a zero key.

    Squares are summed in float64 where the device has it, so that those of float32 keys neither overflow nor vanish.
    """
    wide = k.dtype if k.device.type == "mps" else torch.float64
    norm = torch.linalg.vector_norm(k, dim=-1, keepdim=True, dtype=wide)
    zero = norm < torch.finfo(k.dtype).tiny
    # A zero key needs the inverse 0 and the gradient 0: those of infinity.
    return norm.masked_fill(zero, torch.inf).reciprocal().to(k.dtype)


def rms_normalize(x: Tensor) -> Tensor:
    """√D · x/‖x‖: the gain-free RMS norm of the `"qk"` variant, in at least float32, returned in the dtype of x."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * inverse_norms(wide) * x.shape[-1] ** 0.5).to(x.dtype)


def resolved_sharpness(sharpness: float | Tensor | None, k: Tensor) -> float | Tensor:
    """c for keys [B, H, T, D]: a number, √D if `sharpness` is None, or [B, H] for a tensor [H]."""
    if sharpness is None:
        return math.sqrt(k.shape[-1])
    return sharpness.expand(k.shape[0], -1) if isinstance(sharpness, Tensor) else float(sharpness)


def resolved_scale(scale: float | None, k: Tensor) -> float:
    """The factor of the scores, 1/√D if `scale` is None."""
    return k.shape[-1] ** -0.5 if scale is None else float(scale)
