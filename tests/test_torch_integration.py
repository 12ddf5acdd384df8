"""The operators inside torch: vmap, autocast. Others are in ops/test_in_torch.py."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lucid_attention import lucid_attention, lucid_decode, precondition, preconditioner
from lucid_attention.ops.lucid.decode import inverse_key_norms

B, H, G, S, D, E = 2, 2, 2, 5, 4, 3


def correlated(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)) + 1


def qkv(length: int = 7, batch: int = B, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    sizes = ((H * G, D), (H, D), (H, E))
    q, k, v = (correlated(batch, h, length, d, dtype=dtype, seed=d + h) for h, d in sizes)
    return q, k, v


def options(kind: str, length: int = 7, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Keyword arguments of `lucid_attention` for the kinds of input there are."""
    past = correlated(B, H, S, D, dtype=dtype, seed=7), correlated(B, H, S, E, dtype=dtype, seed=8)
    key_mask = torch.arange(length) >= torch.tensor([[0], [length // 3]])
    beta = correlated(B, H, length, dtype=dtype, seed=9).sigmoid()
    return {
        "plain": {},
        "mask": {"key_mask": key_mask},
        "past": {"past": past},
        "packed": {"cu_seqlens": torch.tensor([0, length // 3, length], dtype=torch.int32)},
        "learned": {"beta": beta, "sharpness": torch.tensor([1.0, 3.0], dtype=dtype), "norm": "qk"},
        "row_max": {"norm": "row_max", "key_mask": key_mask},
    }[kind]


# Torch maps its own softmax kernel in a loop, and says so.
mapped = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


def problem(kind: str, length: int = 7, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k, v that require gradients, with the options of a kind."""
    tensors = qkv(length, 1 if kind == "packed" else B, dtype)
    return [x.requires_grad_() for x in tensors], options(kind, length, dtype)


def gradients(output: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(output, inputs, correlated(*output.shape, dtype=output.dtype, seed=11))


@mapped
def test_vmap_over_masks_equals_a_loop() -> None:
    q, k, v = qkv()
    masks = torch.rand(4, B, 7, generator=torch.Generator().manual_seed(0)) > 0.4

    def function(mask: Tensor) -> Tensor:
        return lucid_attention(q, k, v, key_mask=mask)

    torch.testing.assert_close(torch.vmap(function)(masks), torch.stack([function(mask) for mask in masks]))


def test_many_gradients_at_once_equal_one_by_one() -> None:
    inputs, options = problem("row_max")
    y = precondition(*inputs[1:], **options)
    dy = correlated(3, *y.shape, seed=4)
    at_once = torch.autograd.grad(y, inputs[1:], dy, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(y, inputs[1:], each, retain_graph=True) for each in dy]
    torch.testing.assert_close(at_once, tuple(torch.stack(each) for each in zip(*one_by_one, strict=True)))


@mapped
def test_the_reference_works_under_function_transforms() -> None:
    q, k, v = qkv()
    keys = torch.stack([k, k - 1])

    def loss(k: Tensor) -> Tensor:
        return lucid_attention(q, k, v, impl="reference").square().sum()

    one_by_one = torch.stack([torch.autograd.grad(loss(x), x)[0] for x in keys.clone().requires_grad_()])
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(keys), one_by_one)


@pytest.mark.parametrize("norm", ["key", "qk", "row_max"])
@pytest.mark.parametrize("function", ["lucid_decode", "preconditioner"])
def test_autocast_does_not_reach_into_other_functions(function: str, norm: str) -> None:
    q, k, v = qkv(dtype=torch.float32)
    arguments = (q[:, :, -1:], k, v[:, :, -1:], precondition(k, v)[:, :, :-1], inverse_key_norms(k))

    def compute() -> Any:
        return preconditioner(k, norm=norm) if function == "preconditioner" else lucid_decode(*arguments, norm=norm)

    expected = compute()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(compute(), expected)


def test_autocast_takes_a_mixture_of_dtypes() -> None:
    q, k, v = qkv(dtype=torch.float32)
    expected = lucid_attention(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(
            lucid_attention(q.bfloat16(), k, v.bfloat16()).float(), expected, rtol=0.05, atol=0.05
        )
