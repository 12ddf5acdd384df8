"""`diff_attention` against its formula, written densely in float64 on the tokens that each query sees."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lucid_attention import diff_attention

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
        made |= {"k_past": torch.randn(B, 2 * H, S, D) + 0.5, "v_past": torch.randn(B, H, S, E)}
    return {name: x.to(dtype) for name, x in made.items()}


def ours(
    q: Tensor, k: Tensor, v: Tensor, lam: Tensor, k_past: Any = None, v_past: Any = None, **options: Any
) -> Tensor:
    return diff_attention(q, k, v, lam, past=None if k_past is None else (k_past, v_past), **options)


def formula(
    q: Tensor, k: Tensor, v: Tensor, lam: Tensor, k_past: Any = None, v_past: Any = None, **options: Any
) -> Tensor:
    """One output head after the other: softmax of its first query minus λ softmax of its second."""
    if k_past is not None:
        k, v = torch.cat([k_past, k], 2), torch.cat([v_past, v], 2)
    heads, H = q.shape[1] // 2, v.shape[1]
    outputs = []
    for head in range(heads):
        h = head // (heads // H)
        values = v[:, h : h + 1]
        read = [read_out(q[:, [2 * head + i]], k[:, [2 * h + i]], values, **options) for i in (0, 1)]
        outputs.append(read[0] - lam * read[1])
    return torch.cat(outputs, 1)


def with_gradients(fn: Any, arguments: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    leaves = {name: x.detach().clone().requires_grad_() for name, x in arguments.items()}
    out = fn(**leaves, **options)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out))
    return {"out": out.detach()} | {f"d{name}": x.grad for name, x in leaves.items() if x.grad is not None}


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_difference_of_two_softmax_attentions(shape: str) -> None:
    arguments = tensors(shape)
    result = with_gradients(ours, arguments)
    assert result.keys() == {"out", *(f"d{name}" for name in arguments)}
    B, H, G, T, _, _, E = SHAPES[shape]
    assert result["out"].shape == (B, H * G, T, E)
    torch.testing.assert_close(result, with_gradients(formula, arguments))


@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_the_scale_is_that_of_both_softmaxes(scale: float) -> None:
    arguments = tensors("grouped")
    torch.testing.assert_close(
        with_gradients(ours, arguments, scale=scale), with_gradients(formula, arguments, scale=scale)
    )


@pytest.mark.parametrize("shape", ["grouped", "past"])
def test_padding(shape: str) -> None:
    B, _, _, T, S, _, _ = SHAPES[shape]
    arguments = tensors(shape)
    key_mask = torch.ones(B, S + T, dtype=torch.bool)
    key_mask[0, :2] = False
    key_mask[1, 3] = key_mask[1, -1] = False
    result, expected = (with_gradients(fn, arguments, key_mask=key_mask) for fn in (ours, formula))
    torch.testing.assert_close(result, expected)


def test_packed_documents() -> None:
    arguments = {name: x[:1] if x.ndim else x for name, x in tensors("grouped").items()}
    borders = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
    result, expected = (with_gradients(fn, arguments, cu_seqlens=borders) for fn in (ours, formula))
    torch.testing.assert_close(result, expected)


def test_lambda_one_and_equal_pairs_leave_nothing() -> None:
    q, k, v, _ = tensors("grouped").values()
    q, k = q[:, ::2].repeat_interleave(2, 1), k[:, ::2].repeat_interleave(2, 1)
    torch.testing.assert_close(diff_attention(q, k, v, 1.0), torch.zeros(2, 6, 9, 10, dtype=q.dtype))


def test_lambda_zero_is_softmax_attention_of_the_first_of_each_pair() -> None:
    q, k, v, _ = tensors("grouped").values()
    torch.testing.assert_close(diff_attention(q, k, v, 0), read_out(q[:, ::2], k[:, ::2], v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrow_dtypes(dtype: torch.dtype) -> None:
    arguments = tensors("grouped", dtype)
    truth = with_gradients(formula, {name: x.double() for name, x in arguments.items()})
    # Two read-outs and their difference, each rounded once; measured: 2.1 roundings.
    for name, x in with_gradients(ours, arguments).items():
        assert x.dtype == dtype
        off = (x.double() - truth[name]).abs().max() / truth[name].abs().max()
        assert off < 4 * torch.finfo(dtype).eps, name


def test_autocast_narrows_it_as_it_narrows_sdpa() -> None:
    arguments = tensors("published sizes", torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = ours(**arguments)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), ours(**arguments), rtol=0.05, atol=0.02)


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
    "odd heads of k": ({"k": X["k"][:, :3]}, ValueError, ("k must be", "[2, 4, 5, 4]", "[2, 3, 5, 4]")),
    "odd heads of q": ({"q": X["q"][:, :6]}, ValueError, ("q must have a multiple", "got 6")),
    "v of other heads": ({"v": X["v"][:, :1]}, ValueError, ("k must be", "[2, 2, 5, 4]", "[2, 4, 5, 4]")),
    "v is short": ({"v": X["v"][:, :, 1:]}, ValueError, ("k must be", "[2, 4, 4, 4]", "[2, 4, 5, 4]")),
    "q is double": ({"q": X["q"].double()}, TypeError, ("q must have the dtype of k", "float32", "float64")),
    "v elsewhere": ({"v": X["v"].to("meta")}, ValueError, ("v must be on the device", "cpu", "meta")),
    "no lambda": ({"lam": None}, TypeError, ("lam must be a number or a tensor []", "NoneType")),
    "lambda is bool": ({"lam": True}, TypeError, ("lam must be a number", "bool")),
    "lambda per head": ({"lam": torch.ones(4)}, ValueError, ("lam must be", "[]", "[4]")),
    "lambda is integer": ({"lam": torch.tensor(1)}, TypeError, ("lam must be", "int64")),
    "past is a tensor": ({"past": X["k"]}, TypeError, ("past must be a pair", "Tensor")),
    "past of v's heads": (
        {"past": (X["k_past"][:, :2], X["v_past"])},
        ValueError,
        ("k_past must be", "[2, 4, 4, 4]", "[2, 2, 4, 4]"),
    ),
    "mask without past": ({"key_mask": MASK[:, :5]}, ValueError, ("key_mask must be", "[2, 9]", "[2, 5]")),
    "mask of numbers": ({"key_mask": MASK.long()}, TypeError, ("key_mask must be torch.bool", "int64")),
    "packed": ({"cu_seqlens": torch.tensor([0, 5])}, ValueError, ("cu_seqlens", "batch size 1", "got 2")),
    "scale is text": ({"scale": "1"}, TypeError, ("scale must be a number", "str")),
    "scale is infinite": ({"scale": math.inf}, ValueError, ("scale must be a finite number", "inf")),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_argument_is_explained(case: str) -> None:
    changes, error, words = BAD[case]
    good = {"q": X["q"], "k": X["k"], "v": X["v"], "lam": 0.5, "past": (X["k_past"], X["v_past"]), "key_mask": MASK}
    diff_attention(**good)  # type: ignore[arg-type]
    with pytest.raises(error) as caught:
        diff_attention(**(good | changes))  # type: ignore[arg-type]
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"the message lacks {missing}: {caught.value}"
