"""PaTH's gradients: by finite differences, one at a time, of second order, and of leaves and trees by themselves."""

import pytest
import torch
from torch.autograd import gradgradcheck

from lucid_attention.ops.path.tree import (
    KeySideGradients,
    climb,
    descend,
    key_side,
    key_side_backward,
    row_side,
    row_side_backward,
)

from .cases import along_random_directions, assert_exact, error
from .path_cases import OPERATORS, PathCase, call, evaluate, factor

MASK = torch.tensor([[1, 1, 0, 1, 1, 0, 1, 1], [0, 0, 0, 0, 1, 1, 1, 0]]).bool()
KINDS = {
    "plain": (PathCase(T=6, G=2, D=3, E=2), {}),
    "past and mask": (PathCase(T=5, S=3, B=2, G=2, H=1, D=3, E=2), {"key_mask": MASK}),
    "packed": (
        PathCase(T=9, D=3, E=2),
        {"cu_seqlens": torch.tensor([0, 1, 5, 5, 9]), "key_mask": torch.arange(9)[None] != 3},
    ),
}


def positional(operator, tensors, **options):
    def function(*values: torch.Tensor) -> torch.Tensor:
        return call(operator, dict(zip(tensors, values, strict=True)), **options)

    return function, [x.clone().requires_grad_() for x in tensors.values()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operator", ["path", "precondition"])
def test_gradcheck_of_all_inputs(operator, kind):
    case, options = KINDS[kind]
    assert along_random_directions(*positional(operator, case.tensors(operator, sharpness=True), **options))


@pytest.mark.parametrize("operator", OPERATORS)
def test_gradcheck_where_w_has_any_length_and_beta_any_size(operator):
    """Gradients do not assume ‖w‖ = 1: a learned w is normalised outside."""
    tensors = PathCase(T=6, D=3, E=2).tensors(operator)
    tensors["w"] *= torch.rand_like(tensors["beta"])[..., None] + 0.5
    tensors["beta"] -= 0.7
    assert along_random_directions(*positional(operator, tensors))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_the_reference_has_second_derivatives(operator, kind):
    case, options = KINDS[kind]
    tensors = case.tensors(operator, sharpness=True)
    assert gradgradcheck(*positional(operator, tensors, **options, impl="reference"), atol=1e-4, fast_mode=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_double_backward_is_refused_and_the_message_says_what_to_use(operator, kind):
    case, options = KINDS[kind]
    function, inputs = positional(operator, case.tensors(operator, sharpness=True), **options)
    for x in inputs:
        (dx,) = torch.autograd.grad(function(*inputs).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match=r"no second derivative.*impl='reference'"):
            dx.sum().backward()


@pytest.mark.parametrize("operator", OPERATORS)
def test_forward_mode_is_right_in_the_reference_and_refused_elsewhere(operator):
    tensors = PathCase(T=7, S=3, D=3).tensors(operator, sharpness=True)
    for name, x in tensors.items():
        tangent = torch.randn_like(x)

        def of(x: torch.Tensor, impl: str, name: str = name) -> torch.Tensor:
            return call(operator, tensors | {name: x}, impl=impl)

        _, forward = torch.func.jvp(lambda x, of=of: of(x, "reference"), (x,), (tangent,))
        difference = (of(x + 1e-6 * tangent, "blockwise") - of(x - 1e-6 * tangent, "blockwise")) / 2e-6
        assert error(forward, difference) < 1e-6, name
        with pytest.raises(RuntimeError, match=r"no forward-mode derivative.*impl='reference'"):
            torch.func.jvp(lambda x, of=of: of(x, "blockwise"), (x,), (tangent,))


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_gradient_asked_for_alone_is_the_one_asked_for_with_the_others(operator):
    case = PathCase(T=70, G=2, S=7, D=4)
    tensors, weight = case.tensors(operator, sharpness=True), case.weight(operator)
    together = evaluate(call, operator, tensors, weight)
    for alone in tensors:
        only = {name: x.clone().requires_grad_(name == alone) for name, x in tensors.items()}
        call(operator, only).backward(weight)
        torch.testing.assert_close(only[alone].grad, together[f"d{alone}"], rtol=1e-12, atol=1e-12)
        assert all(x.grad is None for name, x in only.items() if name != alone)


@pytest.mark.parametrize("operator", OPERATORS)
def test_an_expanded_or_strided_upstream_gradient_is_read_rightly(operator):
    case = PathCase(T=300, B=2, G=2, S=3, D=3)
    tensors, shape = case.tensors(operator), case.weight(operator).shape
    dense = evaluate(call, operator, tensors, torch.ones(shape))
    assert_exact(evaluate(call, operator, tensors, torch.ones(1, dtype=torch.float64).expand(shape)), dense)
    weight = case.weight(operator)
    across = weight.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0)
    assert_exact(evaluate(call, operator, tensors, across), evaluate(call, operator, tensors, weight))


def explicit_leaf(q, k, w, beta):
    """One leaf by products of its factors."""
    C, D = k.shape
    factors = factor(w, beta)
    eye = torch.eye(D, dtype=k.dtype)

    def product(first: int, last: int) -> torch.Tensor:
        """H_last … H_first."""
        out = eye
        for s in range(first, last + 1):
            out = factors[s] @ out
        return out

    scores = torch.stack([
        torch.stack([q[i] @ product(j + 1, i) @ k[j] if j <= i else q.new_zeros(()) for j in range(C)])
        for i in range(C)
    ])  # fmt: skip
    rows = torch.stack([q[i] @ product(0, i) for i in range(C)])
    keys = torch.stack([product(j + 1, C - 1) @ k[j] for j in range(C)])
    return scores, rows, keys, product(0, C - 1)


@pytest.mark.parametrize("C", [1, 2, 7])
def test_a_leaf_is_its_explicit_products_with_all_gradients(C):
    q, k, w = (torch.randn(1, C, 3, dtype=torch.float64).requires_grad_() for _ in range(3))
    beta = (2 * torch.rand(1, C, 1, dtype=torch.float64)).requires_grad_()
    values = [x.detach() for x in (q, k, w, beta)]
    keys = key_side(*values[1:])
    rows = row_side(*values[:3], keys)
    made = rows.scores, rows.rows, keys.k, keys.product
    expected = explicit_leaf(q[0], k[0], w[0], beta[0, :, 0])
    for ours, truly in zip(made, expected, strict=True):
        torch.testing.assert_close(ours[0], truly.detach())
    grads = [torch.randn_like(x) for x in made]
    grads[0].tril_()
    truly = torch.autograd.grad(expected, (q, k, w, beta), [g[0] for g in grads], allow_unused=True)
    into = KeySideGradients(values[1])
    dq = row_side_backward(*grads[:2], *values[:3], keys, rows.x, into)
    ours = dq, *key_side_backward(*grads[2:], *values[1:], keys, into)
    for x, y in zip(ours, truly, strict=True):
        torch.testing.assert_close(x, torch.zeros_like(x) if y is None else y)


@pytest.mark.parametrize("to_the_root", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, 11, 13])
def test_a_tree_of_any_number_of_leaves_visits_every_pair_once_with_all_gradients(count, to_the_root):
    """Leaves of one row and one key: A_ba = q_b M_{b−1} … M_{a+1} k_a, for products M that do not commute."""
    D = 3
    q, k = (torch.randn(2, count, 1, D, dtype=torch.float64).requires_grad_() for _ in range(2))
    product = (torch.randn(2, count, D, D, dtype=torch.float64) / 2).requires_grad_()
    cells = {}
    for b in range(count):
        between = torch.eye(D, dtype=torch.float64).expand(2, D, D)
        for a in reversed(range(b)):
            cells[b, a] = ((q[:, b] @ between) @ k[:, a].mT)[:, 0, 0]
            between = between @ product[:, a]
        cells[b, -1] = (q[:, b] @ between)[:, 0]
    rows, keys = q.detach().clone(), k.detach().clone()
    joins, seen = [], torch.zeros(count, count)
    for join in climb([rows], keys, product.detach(), keep_below=count, to_the_root=to_the_root):
        joins.append(join)
        index = torch.arange(count)[None, :, None, None]
        right, left = join.right_of(index)[0, :, :, 0], join.left_of(index)[0, :, :, 0]
        scores = join.rows[0] @ join.k.mT
        for pair in range(join.pairs):
            for i, b in enumerate(right[pair].tolist()):
                for j, a in enumerate(left[pair].tolist()):
                    seen[b, a] += 1
                    torch.testing.assert_close(scores[:, pair, i, j], cells[b, a].detach())
    torch.testing.assert_close(seen, torch.ones(count, count).tril(-1))
    upstream = torch.randn(2, count, count, dtype=torch.float64)
    droot = torch.randn(2, count, 1, D, dtype=torch.float64) if to_the_root else None
    loss = sum((cells[b, a] * upstream[:, b, a]).sum() for b, a in cells if a >= 0)
    if droot is not None:
        root = torch.stack([cells[b, -1] for b in range(count)], 1)
        torch.testing.assert_close(rows[:, :, 0], root.detach())
        loss = loss + (root * droot[:, :, 0]).sum()
    for join in joins:
        index = torch.arange(count)[None, :, None, None]
        right, left = join.right_of(index)[0, :, :, 0], join.left_of(index)[0, :, :, 0]
        ds = upstream[:, right[:, :, None], left[:, None, :]]
        join.drows, join.dk = [ds @ join.k], ds.mT @ join.rows[0]
    dq = torch.zeros_like(rows) if droot is None else droot.clone()
    dk = torch.zeros_like(keys)
    ours = dq, dk, descend(joins, [dq], dk, from_the_root=to_the_root)
    truly = (
        torch.autograd.grad(loss, (q, k, product), allow_unused=True) if torch.is_tensor(loss) else (None, None, None)
    )
    for name, x, y in zip(("dq", "dk", "dproduct"), ours, truly, strict=True):
        torch.testing.assert_close(x, torch.zeros_like(x) if y is None else y, msg=lambda m, n=name: f"{n}: {m}")
