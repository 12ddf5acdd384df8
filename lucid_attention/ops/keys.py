"""Normalised keys, k̂ = k/‖k‖ (the paper's K_RN is √D · k̂), and the defaults that depend on the size of a key.

There is no eps: it would pull the diagonal of P away from 1 for small keys and make prefill and decoding disagree.
A zero key has no direction; k̂ = 0 there, so it has cosine 0 to every key, and its gradient is 0.

P may be made of mapped keys (`KeyMap`), while the softmax reads k: `docs/mathematics.md` says why.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .precision import no_autocast, working_dtype


class KeyMap(NamedTuple):
    """The keys that P is made of, u = (k − center) @ matrix, per key/value head; the softmax reads k.

    center: [H, D], or None for zero; matrix: [H, D, D], or None for the identity. Of any floating point dtype.
    """

    center: Tensor | None = None
    matrix: Tensor | None = None


def map_keys(k: Tensor, key_map: KeyMap | None, key_mask: Tensor | None = None) -> Tensor:
    """u: [B, H, T, D] in at least float32; k itself without a map. A key that key_mask: [B, T] hides counts as zero."""
    if key_map is None:
        return k
    u = k.to(working_dtype(k))
    if key_mask is not None:
        # The gradient of a masked NaN is NaN, not zero.
        u = u.masked_fill(~key_mask[:, None, :, None], 0)
    with no_autocast(k):
        if key_map.center is not None:
            u = u - key_map.center[:, None].to(u.dtype)
        return u if key_map.matrix is None else u @ key_map.matrix.to(u.dtype)


@torch.no_grad()
def calibrated_key_map(k: Tensor, key_mask: Tensor | None = None, *, whiten: bool = True) -> KeyMap:
    """The map that centres sample keys and, with `whiten`, gives them the covariance I. float32.

    center is the mean μ of the n keys of a head, matrix is Σ^(−½) of their covariance, to which D keys of the mean
    variance in every direction are added: Σ = (Σ_i (k_i − μ)(k_i − μ)ᵀ + D σ² I)/(n + D). So Σ is never singular, also
    for n < D, and no direction is enlarged more than √(1 + n/D) times beyond the mean one.

    k: [B, H, T, D], as the softmax sees them; key_mask: [B, T] bool, True where a key counts.
    """
    B, H, T, D = k.shape
    # On the CPU: not every device has float64.
    keys = k.detach().cpu().double().transpose(1, 2).reshape(B * T, H, D)
    if key_mask is not None:
        keys = keys[key_mask.cpu().flatten()]
    if not len(keys):
        raise ValueError("k must have keys that key_mask does not hide, got none")
    center = keys.mean(0)
    matrix = None
    if whiten:
        deviation = (keys - center).transpose(0, 1)
        scatter = deviation.mT @ deviation
        variance = scatter.diagonal(dim1=1, dim2=2).sum(1) / (D * len(keys))
        # Equal keys have no covariance: their map is the identity.
        variance = torch.where(variance > 0, variance, 1.0)
        scatter = scatter + D * variance[:, None, None] * torch.eye(D, dtype=scatter.dtype)
        values, vectors = torch.linalg.eigh(scatter / (len(keys) + D))
        matrix = ((vectors * values.rsqrt()[:, None]) @ vectors.mT).float().to(k.device)
    return KeyMap(center.float().to(k.device), matrix)


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
