"""Condition numbers κ₂(P) = σ_max/σ_min against the length of a prefix: how far P is from the identity.

P of a prefix is the leading block of P. Short prefixes get a singular value decomposition; long ones an iteration with
products and solves, which needs no N × N matrix. ‖P⁻¹‖ = 1/σ_min is at most 2 for all normalised keys.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .capture import Inputs, visit_layers
from .layer import KeyMatrix, Layer, LikeKeys

Record = dict[str, Any]
# Longest prefix that is decomposed. Twice the length takes eight times the time.
EXACT_UP_TO = 1024
# The iteration for longer prefixes stops at this relative error of a squared singular value.
TOLERANCE = 4e-3


def condition_numbers(
    model: nn.Module,
    inputs: Inputs,
    lengths: Sequence[int],
    *,
    layers: Sequence[int] | None = None,
    exact_up_to: int = EXACT_UP_TO,
) -> list[Record]:
    """κ of every layer and key/value head, for prefixes of these lengths.

    For a softmax model: κ of the P that LUCID would have.

    Args:
        model, inputs, layers: as in `visit_layers`.
        lengths: of prefixes in tokens, without padding. Rows shorter than a length have no record for it.
        exact_up_to: longest prefix whose singular values are computed exactly.

    Returns:
        {"layer", "row", "head", "length", "kappa", "largest": ‖P‖, "inverse_norm": ‖P⁻¹‖, "exact"}. Values that are not
        exact are lower bounds, seldom 1e-3 below.
    """
    _check_lengths(lengths)
    records: list[Record] = []

    def measure(layer: Layer) -> None:
        H = layer.k.shape[1] // (1 if layer.lam is None else 2)
        # One query head of every key/value head.
        for head in layer.heads(range(0, layer.query_heads, layer.query_heads // H)):
            labels = {"layer": layer.index, "row": head.row, "head": head.head}
            fitting = [length for length in lengths if length <= head.P.size]
            records.extend(labels | record for record in _measure(head.P, fitting, exact_up_to))

    visit_layers(model, inputs, measure, layers=layers)
    if not records:
        raise ValueError(f"lengths must hold one up to that of the input, got {list(lengths)} for a shorter input")
    return records


def key_condition_numbers(
    k: Tensor,
    lengths: Sequence[int],
    *,
    norm: str = "key",
    sharpness: float | None = None,
    strength: float = 1.0,
    beta: Tensor | None = None,
    exact_up_to: int = EXACT_UP_TO,
) -> list[Record]:
    """`condition_numbers` for keys without a model. k: [N, D]; beta: [N]; other arguments as in `lucid_attention`."""
    _check_lengths(lengths)
    if k.ndim != 2 or max(lengths) > k.shape[0]:
        raise ValueError(f"k must be [N, D] with N of at least {max(lengths)}, got shape {list(k.shape)}")
    wide = None if beta is None else beta.double()
    P = KeyMatrix(LikeKeys(k.double(), norm, sharpness), k.shape[0], strength, wide)
    return _measure(P, lengths, exact_up_to)


def _check_lengths(lengths: Sequence[int]) -> None:
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths must hold at least one number of tokens, each from 1 on, got {list(lengths)}")


def _measure(P: KeyMatrix, lengths: Sequence[int], exact_up_to: int) -> list[Record]:
    exact = [length for length in lengths if length <= exact_up_to]
    dense = P.dense(max(exact)) if exact else None
    device = P.rows(0, 1).device
    records = []
    for n in lengths:
        if n <= exact_up_to:
            assert dense is not None
            sizes = torch.linalg.svdvals(dense[:n, :n])
            largest, inverse = sizes[0].item(), 1 / sizes[-1].item()
        else:
            start = torch.ones(n, 1, dtype=torch.float64, device=device)
            largest = largest_singular_value(P.gram, start)
            # For equal keys the direction of σ_min alternates: 1, −1, 1, ...
            start[1::2] = -1
            inverse = largest_singular_value(lambda x: P.solve_transposed(P.solve(x)), start)
        norms = {"kappa": largest * inverse, "largest": largest, "inverse_norm": inverse}
        records.append({"length": n, **norms, "exact": n <= exact_up_to})
    return records


def largest_singular_value(gram: Callable[[Tensor], Tensor], start: Tensor) -> float:
    """σ_max of a matrix M from gram(x) = Mᵀ M x, by Lanczos' iteration.

    start: [n, 1], not orthogonal to the singular vector of σ_max. Noise is added to it, in case it is.
    """
    from scipy.sparse.linalg import LinearOperator, eigsh

    def product(x: np.ndarray) -> np.ndarray:
        return gram(torch.from_numpy(x.reshape(-1, 1)).to(start.device)).cpu().numpy().ravel()

    n = start.shape[0]
    noise = torch.randn(n, dtype=start.dtype, generator=torch.Generator().manual_seed(0))
    first = (start[:, 0].cpu() + 0.1 * noise).numpy()
    operator = LinearOperator((n, n), matvec=product, dtype=first.dtype)
    (square,) = eigsh(operator, k=1, v0=first, tol=TOLERANCE, return_eigenvectors=False)
    return math.sqrt(square)
