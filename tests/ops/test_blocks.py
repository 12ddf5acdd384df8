"""Blocks of tokens that see each other: against the equation, written out densely in float64 without the package."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lucid_attention import LucidAttention, lucid_attention, precondition, preconditioner
from lucid_attention.nn.causal import Past
from lucid_attention.ops import blocks
from lucid_attention.ops.lucid.solve_op import precondition_op
from lucid_attention.ops.lucid.system import checked_system
from lucid_attention.ops.softmax.attention import softmax_attention_op

from .cases import keys_of

ORDER = ("o", "dq", "dk", "dv", "dc")


def who_sees(block: Any, T: int, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """[T, T] bool: who is in the same block as whom, and who is in an earlier block of the same document."""
    documents = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    same, before = torch.zeros(T, T, dtype=torch.bool), torch.zeros(T, T, dtype=torch.bool)
    for a, b in pairwise(documents):
        cuts = block.tolist() if isinstance(block, Tensor) else [*range(a, b, block or T + 1), b]
        for start, stop in pairwise(cuts):
            same[start:stop, start:stop] = True
            before[start:stop, a:start] = True
    return same, before


def true_matrix(k: Tensor, block: Any, c: Tensor, s: float, mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """P: [B, H, T, T]."""
    T = k.shape[2]
    same, before = who_sees(block, T, cu_seqlens)
    zero = (k == 0).all(-1, keepdim=True)
    unit = torch.where(zero, 0, F.normalize(torch.where(zero, 1, k), dim=-1))
    G = torch.exp(c[:, None, None] * (torch.einsum("bhid,bhjd->bhij", unit, unit) - 1))
    kept = mask[:, None, :, None] & mask[:, None, None, :] & ~torch.eye(T, dtype=torch.bool)
    return torch.eye(T, dtype=k.dtype) + s * torch.where(kept, before * G + 0.5 * same * G, 0)


def truth(q: Tensor, k: Tensor, v: Tensor, c: Tensor, block: Any, **options: Any) -> Tensor:
    T = k.shape[2]
    mask = options.get("key_mask")
    mask = torch.ones(k.shape[0], T, dtype=torch.bool) if mask is None else mask
    k, v = (x.masked_fill(~mask[:, None, :, None], 0) for x in (k, v))
    P = true_matrix(k, block, c, options.get("strength", 1.0), mask, options.get("cu_seqlens"))
    y = torch.linalg.inv(P) @ v
    groups = q.shape[1] // k.shape[1]
    k, y = k.repeat_interleave(groups, 1), y.repeat_interleave(groups, 1)
    same, before = who_sees(block, T, options.get("cu_seqlens"))
    visible = (same | before) & mask[:, None, None, :]
    none = ~visible.any(-1, keepdim=True)
    scores = (q @ k.mT / math.sqrt(q.shape[3])).masked_fill(~(visible | none), -math.inf)
    return scores.softmax(-1).masked_fill(none, 0) @ y


def with_gradients(function: Any, tensors: list[Tensor]) -> list[Tensor]:
    tensors = [x.detach().requires_grad_() for x in tensors]
    o = function(*tensors)
    return [o, *torch.autograd.grad((o * torch.linspace(-1, 1, o.numel()).view_as(o)).sum(), tensors)]


def inputs(T: int, keys: str = "shifted", B: int = 1, D: int = 5, E: int = 3) -> list[Tensor]:
    torch.manual_seed(0)
    k = keys_of(keys, B, 2, T, D)
    k[:, 1, T // 2] = 0
    q, v = torch.randn(B, 4, T, D).double(), torch.randn(B, 2, T, E).double()
    return [q, k, v, torch.tensor([1.3, 3.0], dtype=torch.float64)]


def masked(*shape: int) -> Tensor:
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(1)) > 0.3
    mask[:, :2] = False
    return mask


# Those of 5 to 8 tokens run as one padded batch.
DOCUMENTS = torch.tensor([0, 5, 5, 12, 20, 150])
CASES: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "one-token": (1, None, {}),
    "two-tokens-of-a-block": (2, 4, {}),
    "blocks-in-a-tile": (300, 5, {}),
    "blocks-of-64-over-tiles": (330, 64, {}),
    "longer-blocks": (330, 100, {}),
    "an-encoder": (150, None, {}),
    "borders": (150, torch.tensor([0, 1, 4, 4, 9, 100, 150]), {}),
    "blocks-masked": (150, 8, {"key_mask": masked(2, 150)}),
    "longer-blocks-masked": (150, 70, {"key_mask": masked(2, 150)}),
    "an-encoder-masked": (150, None, {"key_mask": masked(2, 150)}),
    "documents": (150, 4, {"cu_seqlens": DOCUMENTS}),
    "documents-of-an-encoder": (150, None, {"cu_seqlens": DOCUMENTS, "key_mask": masked(1, 150)}),
    "half-strength": (150, 70, {"strength": 0.5}),
    "half-strength-in-a-tile": (150, 6, {"strength": 0.5}),
}


@pytest.mark.parametrize("solver", ["reference", "factor", "gradients"])
@pytest.mark.parametrize("name", CASES)
def test_attention_and_gradients_are_those_of_the_dense_equation(monkeypatch, name: str, solver: str) -> None:
    T, block, options = CASES[name]
    monkeypatch.setattr(blocks, "LONGEST_FACTOR", blocks.SMALL if solver == "gradients" else 4096)
    mask = options.get("key_mask")
    tensors = inputs(T, "repeated" if T == 150 else "shifted", B=1 if mask is None else mask.shape[0])
    impl = "reference" if solver == "reference" else "blockwise"
    # Whatever masked positions hold is ignored.
    broken = [*tensors]
    if mask is not None:
        broken[1], broken[2] = (x.masked_fill(~mask[:, None, :, None], math.nan) for x in tensors[1:3])
    ours = with_gradients(
        lambda q, k, v, c: lucid_attention(q, k, v, sharpness=c, block=block, impl=impl, **options), broken
    )
    for what, a, b in zip(ORDER, ours, with_gradients(lambda *x: truth(*x, block, **options), tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda text, what=what: f"{what}: {text}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [8, 100, None])
def test_low_precision_is_as_near_as_the_plain_formula(block: Any, dtype: torch.dtype) -> None:
    tensors = [x.to(dtype) for x in inputs(260, "close")[:3]]
    y = precondition(*tensors[1:], block=block)
    exact = precondition(*(x.double() for x in tensors[1:]), block=block)
    plain = precondition(*tensors[1:], block=block, impl="reference")
    assert y.dtype == dtype
    assert (y - exact).norm() <= 3 * (plain - exact).norm()


def test_blocks_of_one_token_are_causal_lucid() -> None:
    q, k, v, c = inputs(150)
    expected = with_gradients(lambda *x: lucid_attention(*x[:3], sharpness=x[3]), [q, k, v, c])
    for block in (1, torch.arange(151)):
        ours = with_gradients(
            lambda *x, block=block: lucid_attention(*x[:3], sharpness=x[3], block=block), [q, k, v, c]
        )
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    assert torch.equal(lucid_attention(q, k, v, block=1), lucid_attention(q, k, v))
    assert torch.equal(lucid_attention(q, k, v, is_causal=False), lucid_attention(q, k, v, block=None))


@pytest.mark.parametrize("strength", [1.0, 0.5])
@pytest.mark.parametrize("keys", ["equal", "repeated", "closest"])
def test_the_inverse_is_bounded_for_any_blocks_and_the_bound_is_tight(keys: str, strength: float) -> None:
    k = keys_of(keys, 1, 2, 60, 4)
    bound = 2 / (2 - strength)
    for block in (2, 7, 60, None, torch.tensor([0, 3, 50, 60])):
        P = preconditioner(k, block=block, strength=strength)
        norms = torch.linalg.matrix_norm(torch.linalg.inv(P), 2)
        assert (norms <= bound + 1e-9).all()
        if keys == "equal" and block is None:
            torch.testing.assert_close(norms, torch.full_like(norms, bound))


def test_a_block_is_denoised_on_a_fixed_prefix_and_committed() -> None:
    """The decoding loop of block diffusion: the last visit of every block is what one pass over everything computes."""
    q, k, v, _ = inputs(26)
    n, full = 8, lucid_attention(q, k, v, block=8)
    past: tuple[Tensor, Tensor] | None = None
    for start in range(0, 26, n):
        here = slice(start, start + n)
        for noise in (1.0, 0.3, 0.0):
            new = [(x + noise * torch.randn_like(x))[:, :, here] for x in (q, k, v)]
            o = lucid_attention(*new, past=past, block=n)
        torch.testing.assert_close(o, full[:, :, here], rtol=1e-11, atol=1e-11)
        y = precondition(new[1], new[2], past=past, block=n)
        past = (new[1], y) if past is None else (torch.cat([past[0], new[1]], 2), torch.cat([past[1], y], 2))


def test_gradients_through_a_past_are_those_of_one_call() -> None:
    mask = masked(2, 140)

    def in_two(q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Tensor:
        y = precondition(k[:, :, :70], v[:, :, :70], sharpness=c, block=70, key_mask=mask[:, :70])
        first = lucid_attention(q[:, :, :70], k[:, :, :70], v[:, :, :70], sharpness=c, block=70, key_mask=mask[:, :70])
        options: dict[str, Any] = {"past": (k[:, :, :70], y), "key_mask": mask, "sharpness": c, "block": 70}
        return torch.cat([first, lucid_attention(q[:, :, 70:], k[:, :, 70:], v[:, :, 70:], **options)], 2)

    tensors = inputs(140, B=2)
    whole = with_gradients(lambda q, k, v, c: lucid_attention(q, k, v, sharpness=c, block=70, key_mask=mask), tensors)
    for a, b in zip(with_gradients(in_two, tensors), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_operators_pass_opcheck_and_compile_whole() -> None:
    q, k, v, c = inputs(20)
    past = (k[:, :, :8], v[:, :, :8])
    new = [x[:, :, 8:].detach().requires_grad_() for x in (q, k, v)]
    for block in (4, torch.tensor([0, 5, 12])):
        system = checked_system(new[1], new[2], past=past, sharpness=c, block=block)
        torch.library.opcheck(precondition_op.forward, (new[2], *system.operator_inputs()))
        given = blocks.as_inputs(block)
        q_wide, y_wide = new[0][..., :5], F.pad(v, (0, 2))
        torch.library.opcheck(softmax_attention_op.forward, (q_wide, k, y_wide, None, None, 0.4, *given))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return lucid_attention(q, k, v, past=past, block=4)

    torch.testing.assert_close(torch.compile(attend, fullgraph=True, backend="aot_eager")(*new), attend(*new))


def test_tolerances_are_reached_or_refused(monkeypatch) -> None:
    monkeypatch.setattr(blocks, "LONGEST_FACTOR", 100)
    _, k, v, _ = inputs(150)
    y = precondition(k, v, block=None, tolerance=1e-3)
    residual = (preconditioner(k, block=None) @ y - v).norm(dim=2) / v.norm(dim=2)
    assert 1e-9 < residual.max() <= 1e-3
    monkeypatch.setattr(blocks, "MOST_STEPS", 3)
    with pytest.raises(
        RuntimeError, match=r"block of 150 tokens must reach a relative residual of 1e-12, got .* after 3"
    ):
        precondition(k, v, block=None)


def test_what_blocks_cannot_do_is_refused() -> None:
    q, k, v, _ = inputs(12)
    past, beta = (k[:, :, :6], v[:, :, :6]), torch.ones(1, 2, 12)
    refused: list[tuple[str, dict[str, Any]]] = [
        ("beta needs block=1", {"block": 4, "beta": beta}),
        ("norm='row_max' needs block=1", {"block": None, "norm": "row_max"}),
        ("past must end at a border .* multiple of block = 4 .* got 6", {"block": 4, "past": past}),
        ("expected no past, got 6", {"block": None, "past": past}),
        ("block must be a positive integer, got 0", {"block": 0}),
        ("int32 or int64 borders", {"block": torch.tensor([0.0, 12.0])}),
        (r"expected block\[-1\] = 12, got 10", {"block": torch.tensor([0, 10])}),
        ("exclude each other", {"block": torch.tensor([0, 12]), "cu_seqlens": torch.tensor([0, 12])}),
        ("is_causal=False is block=None", {"block": 4, "is_causal": False}),
        ("is_causal=True is block=1", {"block": None, "is_causal": True}),
        ("kernels solve causal systems", {"block": 4, "impl": "triton"}),
        ("tolerance must be a positive finite number", {"block": None, "tolerance": 0.0}),
    ]
    for message, options in refused:
        with pytest.raises(ValueError, match=message):
            lucid_attention(q, k, v, **options)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@torch.no_grad()
def test_the_module_reads_whole_blocks_with_and_without_a_cache(impl: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 20, 16, dtype=torch.float64)
    layer = LucidAttention(16, 4, num_kv_heads=2, block=8, impl=impl).double()
    whole, _ = layer(x)
    past: Past | None = None
    for here in (slice(0, 8), slice(8, 16), slice(16, 20)):
        out, past = layer(x[:, here], past=past)
        torch.testing.assert_close(out, whole[:, here])
    changed = x.clone()
    changed[:, 7] += 1
    assert not torch.allclose(layer(changed)[0][:, 0], whole[:, 0])
    changed = x.clone()
    changed[:, 8] += 1
    assert torch.equal(layer(changed)[0][:, :8], whole[:, :8])
    with pytest.raises(ValueError, match="past must end at a border"):
        layer(x[:, :1], past=past)
    with pytest.raises(ValueError, match="learn_beta=True needs block=1"):
        LucidAttention(16, 4, block=8, learn_beta=True)
