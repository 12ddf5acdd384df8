"""Operators registered with torch: opcheck, and saved tensors under activation checkpointing."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lucid_attention.ops.lucid.solve_op import precondition_op
from lucid_attention.ops.softmax.attention import softmax_attention_op
from tests.test_torch_integration import B, D, H, S, correlated, options, qkv


def solves() -> dict[str, tuple[Any, ...]]:
    """v, k, k_past, y_past, beta, sharpness [B, H], key_mask, cu_seqlens, strength, sharpness as a number,
    borders and length of blocks, norm."""
    _, k, v = qkv()
    past = options("past")["past"]
    beta, sharpness = options("learned")["beta"], torch.tensor([[1.0, 3.0], [2.0, 4.0]], dtype=torch.float64)
    mask = options("mask")["key_mask"]
    long_mask = torch.cat([torch.ones(B, S, dtype=torch.bool), mask], 1)
    borders = options("packed")["cu_seqlens"]
    one, half = slice(0, 1), torch.tensor(0.5, dtype=torch.float64)
    return {
        "plain": (v, k, None, None, None, None, None, None, None, 2.0, None, 1, "key"),
        "sharp": (v, k, None, None, None, None, None, None, None, 50.0, None, 1, "key"),
        "strength": (v, k, None, None, None, None, None, None, half, 2.0, None, 1, "key"),
        "past": (v, k, *past, None, None, None, None, None, 2.0, None, 1, "key"),
        "beta": (v, k, None, None, beta, None, None, None, None, 2.0, None, 1, "key"),
        "sharpness": (v, k, None, None, None, sharpness, None, None, None, 0.0, None, 1, "key"),
        "mask": (v, k, None, None, None, None, mask, None, None, 2.0, None, 1, "key"),
        "packed": (
            v[one],
            k[one],
            None,
            None,
            beta[one],
            sharpness[one],
            mask[one],
            borders,
            None,
            0.0,
            None,
            1,
            "key",
        ),
        "row_max": (v, k, None, None, None, None, None, None, None, 2.0, None, 1, "row_max"),
        "all": (v, k, *past, beta, sharpness, long_mask, None, None, 0.0, None, 1, "row_max"),
        "bfloat16": (
            v.bfloat16(),
            k.bfloat16(),
            None,
            None,
            beta.bfloat16(),
            None,
            mask,
            None,
            None,
            2.0,
            None,
            1,
            "key",
        ),
    }


def readouts() -> dict[str, tuple[Any, ...]]:
    """q, k, y, key_mask, cu_seqlens, scale, borders and length of blocks."""
    q, k, _ = qkv()
    y, mask = correlated(B, H, 7, D, seed=3), options("mask")["key_mask"]
    return {
        "mask": (q, k, y, mask, None, 0.5, None, 1),
        "past": (q[:, :, 3:], k, y, None, None, 0.5, None, 1),
        "past and mask": (q[:, :, 3:], k, y, mask, None, 0.5, None, 1),
        "packed": (q[:1], k[:1], y[:1], mask[:1], options("packed")["cu_seqlens"], 0.5, None, 1),
    }


def differentiable(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        x.clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments
    )


@pytest.mark.parametrize("name", solves())
def test_the_solve_and_its_backward_pass_opcheck(name: str) -> None:
    arguments = solves()[name]
    # opcheck would differentiate the strength, a setting that has no gradient.
    torch.library.opcheck(precondition_op.forward, (*differentiable(arguments[:8]), *arguments[8:]))
    y, z, winners = precondition_op.forward(*arguments)
    for needed in ([True] * 6, [True, False, False, True, True, False]):
        saved = (torch.ones_like(y), None, None, y, z, winners)
        torch.library.opcheck(precondition_op.backward, (*saved, *arguments, needed))


@pytest.mark.parametrize("name", readouts())
def test_the_readout_and_its_backward_pass_opcheck(name: str) -> None:
    arguments = readouts()[name]
    torch.library.opcheck(softmax_attention_op.forward, differentiable(arguments))
    o, lse = softmax_attention_op.forward(*arguments)
    torch.library.opcheck(softmax_attention_op.backward, (torch.ones_like(o), None, o, lse, *arguments, [True] * 3))
