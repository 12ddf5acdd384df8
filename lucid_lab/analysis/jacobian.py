"""How much an attention can still learn: the softmax Jacobian diag(a) − a aᵀ, and ∂o/∂q of the paper's theorem.

No query needs an N × N matrix: sums over pairs have closed forms, and products with the Jacobian are

    (diag(a) − a aᵀ) x = a ∘ (x − a·x)
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .capture import Inputs, visit_layers
from .layer import Difference, Head, Layer, PathHead

Record = dict[str, Any]
# Queries whose ∂o/∂q is computed by default.
ROWS = 64


def _pair_sums(weights: Tensor) -> Tensor:
    """Σ_{j≠k} a_j a_k of every row: [.., n].

    Computed without cancellation: in nearly one-hot rows (Σa)² − Σa² would be a difference of two ones. The sum over
    the other weights leaves the largest one out, instead of subtracting it from one.
    """
    top, top_index = weights.max(-1, keepdim=True)
    others = weights.scatter(-1, top_index, 0)
    others_sum = others.sum(-1)
    # Pairs with the largest weight, in both orders, and pairs of the other weights.
    return 2 * top[..., 0] * others_sum + (others * (others_sum[..., None] - others)).sum(-1)


def jacobians(
    model: nn.Module,
    inputs: Inputs,
    *,
    rows: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
) -> list[Record]:
    """The mean off-diagonal entry and ‖∂o/∂q‖, for every layer and head.

    Args:
        model, inputs, layers: as in `visit_layers`.
        rows: positions of the queries whose ∂o/∂q is computed; None for at most 64, evenly spread.

    Returns:
        {"layer", "row", "head", "off_diagonal", "query_jacobian"}: `head_off_diagonal`, and the mean of ‖∂o/∂q‖ over
        `rows`. The latter is None for PaTH and differential attention: the theorem does not cover them.
    """
    records: list[Record] = []

    def measure(layer: Layer) -> None:
        for head in layer.heads():
            off_diagonal = head_off_diagonal(head)
            norms = None
            if not isinstance(head, PathHead | Difference):
                norms = query_jacobian_norms(head, _chosen(head, rows)).mean(1)
            for g, name in enumerate(head.query_heads):
                labels = {"layer": head.layer, "row": head.row, "head": name}
                norm = None if norms is None else norms[g].item()
                records.append(labels | {"off_diagonal": off_diagonal[g].item(), "query_jacobian": norm})

    visit_layers(model, inputs, measure, layers=layers)
    return records


def _chosen(head: Head, positions: Sequence[int] | None) -> Tensor:
    if positions is not None:
        return head.rows_of(positions)
    N = len(head.positions)
    return torch.linspace(0, N - 1, min(N, ROWS)).long()


def head_off_diagonal(head: Head) -> Tensor:
    """The mean of a_j a_k over all queries and the pairs j ≠ k of keys that a query sees: [G]."""
    N = len(head.positions)
    total: Tensor | float = 0.0
    pairs = 0
    for rows in head.row_blocks(torch.arange(N)):
        key_counts = head.visible(rows).sum(-1)
        total = total + _pair_sums(head.weights(rows)).sum(-1)
        pairs += int((key_counts * (key_counts - 1)).sum())
    if pairs == 0:
        raise ValueError(f"row {head.row} must have at least two tokens, got {N}")
    assert isinstance(total, Tensor)
    return total / pairs


def query_jacobian_norms(head: Head, rows: Tensor) -> Tensor:
    """‖∂o/∂q‖ (Frobenius) of o = softmax(q Kᵀ · scale) P⁻¹, the weights of the values, for these rows: [G, n].

    ∂o/∂q = scale · Kᵀ (diag(a) − a aᵀ) P⁻¹, [D, N]; without P⁻¹ if the layer does not precondition its values.
    """
    if isinstance(head, PathHead | Difference):
        raise ValueError(f"layer {head.layer}: ∂o/∂q is defined for softmax and LUCID attention only")
    norms = []
    for block in head.row_blocks(rows, head.k.shape[-1]):
        slope = head.scores(block)[1]
        a = head.weights(block)
        # Scaled keys as columns, for every row: [G, n, D, N].
        k = slope[:, :, None] * head.k.mT
        J = a[:, :, None] * (k - k @ a[..., None])
        norms.append(torch.linalg.matrix_norm(head.through(J) if head.preconditioned else J))
    return torch.cat(norms, 1)
