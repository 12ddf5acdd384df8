"""`diff_attention` against its formula, written densely in float64 on the tokens that each query sees."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lucid_attention import diff_attention

from .cases import assert_exact, evaluate, widened
from .oracles import read_out

# B, H, G, T, S, D, E
SHAPES = {
    "one token": (2, 1, 1, 1, 0, 4, 8),
    "published sizes": (2, 3, 1, 9, 0, 4, 8),
    "grouped": (2, 2, 3, 9, 0, 5, 10),
    "narrow values": (1, 2, 2, 7, 0, 6, 3),
    "past": (2, 2, 2, 5, 4, 4, 8),
    "one token with a past": (2, 2, 2, 1, 6, 4, 8),
    "one feature": (1, 1, 2, 6, 0, 1, 1),
}


def tensors(shape: str, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    B, H, G, T, S, D, E = SHAPES[shape]
    made = {
        "q": torch.randn(B, 2 * H * G, T, D) + 0.5,
        "k": torch.randn(B, 2 * H, T, D) + 0.5,
        "v": torch.randn(B, H, T, E),
        "lam": torch.tensor(0.7),
    }
    if S:
        made |= {"k_past": torch.randn(B, 2 * H, S, D) + 0.5, "y_past": torch.randn(B, H, S, E)}
    return {name: x.to(dtype) for name, x in made.items()}


def formula(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, past: Any = None, **options: Any) -> Tensor:
    """One output head after the other: softmax of its first query minus λ softmax of its second."""
    if past is not None:
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    heads, H = q.shape[1] // 2, v.shape[1]
    outputs = []
    for head in range(heads):
        h = head // (heads // H)
        values = v[:, h : h + 1]
        read = [read_out(q[:, [2 * head + i]], k[:, [2 * h + i]], values, **options) for i in (0, 1)]
        outputs.append(read[0] - lam * read[1])
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_difference_of_two_softmax_attentions(shape: str) -> None:
    arguments, (B, H, G, T, S, _, E) = tensors(shape), SHAPES[shape]
    weight = torch.randn(B, H * G, T, E, dtype=torch.float64)
    assert_exact(evaluate(diff_attention, arguments, weight), evaluate(formula, arguments, weight))
    if B == 2 and T > 1:
        options: dict[str, Any] = {"key_mask": torch.ones(B, S + T, dtype=torch.bool), "scale": 3.0}
        options["key_mask"][0, :2] = options["key_mask"][1, [3, -1]] = False
        ours, expected = (evaluate(fn, arguments, weight, **options) for fn in (diff_attention, formula))
        assert_exact(ours, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrow_dtypes(dtype: torch.dtype) -> None:
    arguments, weight = tensors("grouped", dtype), torch.randn(2, 6, 9, 10).to(dtype)
    truth = evaluate(formula, widened(arguments), weight.double())
    # Two read-outs and their difference, each rounded once; measured: 2.1 roundings.
    for name, x in evaluate(diff_attention, arguments, weight).items():
        assert x.dtype == dtype
        off = (x.double() - truth[name]).abs().max() / truth[name].abs().max()
        assert off < 4 * torch.finfo(dtype).eps, name


def test_autocast_narrows_it_as_it_narrows_sdpa() -> None:
    arguments = tensors("published sizes", torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = diff_attention(**arguments)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), diff_attention(**arguments), rtol=0.05, atol=0.02)


def test_memory_is_linear() -> None:
    """16 heads × 8192² weights would be 4 GB; what autograd keeps is a few copies of the inputs."""
    q, k, v = (torch.randn(1, h, 8192, 4, requires_grad=True) for h in (16, 16, 8))
    kept = 0

    def pack(x: Tensor) -> Tensor:
        nonlocal kept
        kept += x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        o = diff_attention(q[..., :4], k, v, 0.5)
    assert o.shape == (1, 8, 8192, 4)
    assert kept < 20 * q.numel()


X = {name: x.float() for name, x in tensors("past").items()}
MASK = torch.ones(2, 9, dtype=torch.bool)
BAD: dict[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = {
    "q is a list": ({"q": [1.0]}, TypeError, ("q must be", "torch.Tensor", "list")),
    "odd heads of q": ({"q": X["q"][:, :6]}, ValueError, ("q must have a multiple", "got 6")),
    "v of other heads": ({"v": X["v"][:, :1]}, ValueError, ("k must be", "[2, 2, 5, 4]", "[2, 4, 5, 4]")),
    "lambda per head": ({"lam": torch.ones(4)}, ValueError, ("lam must be", "[]", "[4]")),
    "past of v's heads": (
        {"past": (X["k_past"][:, :2], X["y_past"])},
        ValueError,
        ("k_past must be", "[2, 4, 4, 4]", "[2, 2, 4, 4]"),
    ),
    "mask without past": ({"key_mask": MASK[:, :5]}, ValueError, ("key_mask must be", "[2, 9]", "[2, 5]")),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_argument_is_explained(case: str) -> None:
    changes, error, words = BAD[case]
    good = {"q": X["q"], "k": X["k"], "v": X["v"], "lam": 0.5, "past": (X["k_past"], X["y_past"]), "key_mask": MASK}
    diff_attention(**good)  # type: ignore[arg-type]
    with pytest.raises(error) as caught:
        diff_attention(**(good | changes))  # type: ignore[arg-type]
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"the message lacks {missing}: {caught.value}"
