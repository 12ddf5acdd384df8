"""Some heads by Triton kernels, forward and backward: read-out, solve, or both on one tree."""

import torch
from torch import Tensor

from .heads import Outputs, PathHeads, through_the_norm
from .triton_readout import attend, attend_backward
from .triton_solve import Solve
from .triton_tree import Kernels, TritonTree


def forward_heads(heads: PathHeads, kernels: Kernels) -> Outputs:
    tree = TritonTree(heads, kernels, keep=False)
    layout = tree.layout
    values = layout.cut(heads.v).clone()
    if heads.sharpness is not None:
        Solve(tree).run_(values)
    y = layout.join(values) if heads.sharpness is not None else None
    if heads.q is None:
        return Outputs(None, None, y)
    o, lse = attend(tree, values)
    return Outputs(layout.join_rows(o), layout.join_rows(lse[..., None])[..., 0], y)


def backward_heads(
    heads: PathHeads, kernels: Kernels, made: Outputs, do: Tensor | None, dy: Tensor | None
) -> PathHeads:
    """Gradients of the heads; of the sharpness [n], if it is a tensor. do, dy: those of o and y, do if there is a q."""
    tree = TritonTree(heads, kernels, keep=True)
    layout, scores = tree.layout, tree.scores
    scores.collect_gradients()
    g = torch.zeros_like(layout.cut(heads.v)) if dy is None else layout.cut(dy).clone()
    values = layout.cut(heads.v if made.y is None else made.y).contiguous()
    dk_past = dy_past = dinverse_norms = dsharpness = None
    if do is not None and made.o is not None and made.lse is not None:
        rows = (layout.cut_rows(x).contiguous() for x in (do, made.o, made.lse[..., None]))
        do, o, lse = rows
        dvalues, dpast = attend_backward(tree, values, do, o, lse[..., 0].contiguous())
        g += dvalues
        dk_past, dy_past = (None, None) if dpast is None else dpast
    found = None
    if heads.sharpness is not None:
        solve = Solve(tree)
        solve.run_adjoint_(g)
        if dy_past is None and heads.y_past is not None:
            dy_past = torch.zeros_like(heads.y_past)
        found = solve.pull_back(values, g, dy_past, isinstance(heads.sharpness, Tensor))
    drows, dk, dw, dbeta = scores.pull_back()
    if found is not None and heads.sharpness is not None:
        dsharpness = through_the_norm(
            heads.sharpness, tree.k, tree.inverse, drows[tree.last], found.inverse, found.row_sums, dk
        )
        if found.past is not None and heads.k_past is not None and heads.inverse_norms is not None:
            dinverse_norms = (found.past * heads.k_past).sum(-1, keepdim=True)
            dk_past = found.past.mul_(heads.inverse_norms).add_(0 if dk_past is None else dk_past)
    dq = None if heads.q is None else layout.join_rows(drows[0])
    dk, dw, dbeta, dv = (layout.join(x) for x in (dk, dw, dbeta, g))
    return PathHeads(dq, dk, dv, dw, dbeta, dk_past, dy_past, dinverse_norms, dsharpness)
