"""A token and its cache, for the tests of decoding in one pass."""

from typing import Any

import torch
from torch import Tensor

from lucid_attention import inverse_key_norms, lucid_decode


def correlated(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) + 1.5


def cache(
    B: int = 2, H: int = 2, G: int = 3, S: int = 300, D: int = 12, E: int = 20, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """A token and its cache, in numbers that the dtype holds. One key is repeated, one is zero."""
    k = correlated(B, H, S + 1, D, seed=1)
    if S > 5:
        k[:, :, 3] = k[:, :, -1]
        k[:, :, 4] = 0
    tensors = {"q": correlated(B, H * G, 1, D), "k": k, "v": correlated(B, H, 1, E, seed=2)}
    tensors["y_past"] = correlated(B, H, S, E, seed=3) - 1.5
    return {name: x.to(dtype) for name, x in tensors.items()}


def step(tensors: dict[str, Tensor], impl: str, dtype: torch.dtype | None = None, **options: Any) -> Any:
    cast = {name: x if dtype is None else x.to(dtype) for name, x in tensors.items()}
    options = {
        name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and dtype else x
        for name, x in options.items()
    }
    return lucid_decode(**cast, inverse_norms=inverse_key_norms(cast["k"]), impl=impl, **options)


def masks(B: int, total: int) -> dict[str, Tensor]:
    left, holes, new = (torch.ones(B, total, dtype=torch.bool) for _ in range(3))
    left[0, : total // 2] = False
    holes[:, 1::3] = False
    holes[:, -1] = True
    new[0, -1] = False
    nothing = torch.zeros(B, total, dtype=torch.bool)
    return {"left": left, "holes": holes, "new": new, "nothing": nothing}
