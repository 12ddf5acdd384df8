"""Condition numbers: how far P is from the identity, κ₂(P) = σ_max/σ_min, against the length of a prefix.

P of a prefix is the leading block of P. Short ones are decomposed; long ones are only multiplied with and solved, so
that no N × N matrix is made. ‖P⁻¹‖ = 1/σ_min is at most 2 for normalised keys, whatever they are.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .capture import Inputs, visit_layers
from .layer import Layer
from .matrix import KeyMatrix, LikeKeys

Record = dict[str, Any]
# Longest prefix that is decomposed. Twice as long takes eight times as long.
EXACT_UP_TO = 1024
# How well the square of a singular value of a longer one must be known, relative to it; and steps to get there.
TOLERANCE, STEPS = 4e-3, 200


def condition_number(P: Tensor) -> float:
    """κ₂ of a matrix [N, N], in float64."""
    sizes = torch.linalg.svdvals(P.double())
    return (sizes[0] / sizes[-1]).item()


def condition_numbers(
    model: nn.Module,
    inputs: Inputs,
    lengths: Sequence[int],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    exact_up_to: int = EXACT_UP_TO,
) -> list[Record]:
    """κ of every layer and key/value head, for prefixes of these lengths. For a softmax model: of the P that LUCID has.

    Args:
        model, inputs, layers: as in `visit_layers`.
        lengths: of prefixes, in tokens, without padding. A row that is shorter is left out.
        heads: key/value heads, None for all.
        exact_up_to: longest prefix whose singular values are computed exactly.

    Returns:
        {"layer", "row", "head", "length", "kappa", "largest": ‖P‖, "inverse_norm": ‖P⁻¹‖, "exact"}. Values that are not
        exact are lower bounds, seldom 1e-3 below.
    """
    _check_lengths(lengths)
    records: list[Record] = []

    def measure(layer: Layer) -> None:
        H = layer.k.shape[1] // (1 if layer.lam is None else 2)
        G = layer.query_heads // H
        for chosen in heads or ():
            if not 0 <= chosen < H:
                raise ValueError(f"heads must be key/value heads of layer {layer.index}, 0 to {H - 1}, got {chosen}")
        for head in layer.heads([G * each for each in (range(H) if heads is None else heads)]):
            place = {"layer": layer.index, "row": head.row, "head": head.head}
            fitting = [length for length in lengths if length <= head.P.size]
            records.extend(place | each for each in _measure(head.P, fitting, exact_up_to))

    visit_layers(model, inputs, measure, layers=layers)
    if not records:
        raise ValueError(f"lengths must hold one that the input has, got {list(lengths)} for a shorter input")
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
    """The same for keys alone, k: [N, D]; beta: [N]. Other arguments as in `lucid_attention`."""
    _check_lengths(lengths)
    if k.ndim != 2 or max(lengths) > k.shape[0]:
        raise ValueError(f"k must be [N, D] with N of at least {max(lengths)}, got shape {list(k.shape)}")
    wide = None if beta is None else beta.double()
    P = KeyMatrix(LikeKeys(k.double(), norm, sharpness), k.shape[0], strength, wide)
    return _measure(P, lengths, exact_up_to)


def _check_lengths(lengths: Sequence[int]) -> None:
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths must be numbers of tokens, at least one of them, got {list(lengths)}")


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
            # The least singular direction alternates where keys are alike: 1, −1, 1, ...
            start[1::2] = -1
            inverse = largest_singular_value(lambda x: P.solve_transposed(P.solve(x)), start)
        found = {"kappa": largest * inverse, "largest": largest, "inverse_norm": inverse}
        records.append({"length": n, **found, "exact": n <= exact_up_to})
    return records


def largest_singular_value(
    gram: Callable[[Tensor], Tensor],
    start: Tensor,
    *,
    tolerance: float = TOLERANCE,
    steps: int = STEPS,
) -> float:
    """σ_max of a matrix M from x -> Mᵀ M x, by Lanczos' iteration with full orthogonalisation.

    start: [n, 1], not at right angles to what is looked for. A little noise is added to it.
    """
    noise = torch.randn(start.shape, dtype=start.dtype, generator=torch.Generator().manual_seed(0)).to(start.device)
    v = start + 0.1 * noise
    basis = (v / v.norm()).expand(-1, 1)
    diagonal: list[float] = []
    beside: list[float] = []
    value = 0.0
    for _ in range(min(steps, start.shape[0])):
        w = gram(basis[:, -1:])
        diagonal.append((basis[:, -1:] * w).sum().item())
        # Twice is enough (Kahan and Parlett).
        for _ in range(2):
            w = w - basis @ (basis.mT @ w)
        rest = w.norm().item()
        T = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
        for i, each in enumerate(beside):
            T[i, i + 1] = T[i + 1, i] = each
        values, vectors = torch.linalg.eigh(T)
        value = values[-1].item()
        # The eigenvalue of Mᵀ M is no further away than this.
        if rest * vectors[-1, -1].abs().item() <= tolerance * value:
            break
        beside.append(rest)
        basis = torch.cat([basis, w / rest], 1)
    return value**0.5
