"""Operators registered with torch: opcheck, and saved tensors under activation checkpointing."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lucid_attention.ops.lucid.solve_op import precondition_op
from lucid_attention.ops.softmax.attention import softmax_attention_op
from tests.test_torch_integration import B, D, H, S, correlated, options, qkv

# Arguments of `precondition_op`. fixed: the sharpness as a number; borders, length: of blocks.
NAMES = (
    *("v", "k", "k_past", "y_past", "beta", "sharpness", "key_mask", "cu_seqlens", "strength"),
    *("fixed", "borders", "length", "tolerance", "norm"),
)


def solves() -> dict[str, tuple[Any, ...]]:
    """Arguments of the solve, by name; with a learned sharpness the fixed one is 0."""
    _, k, v = qkv()
    past = dict(zip(("k_past", "y_past"), options("past")["past"], strict=True))
    beta, sharpness = options("learned")["beta"], torch.tensor([[1.0, 3.0], [2.0, 4.0]], dtype=torch.float64)
    mask, borders = options("mask")["key_mask"], options("packed")["cu_seqlens"]
    long_mask = torch.cat([torch.ones(B, S, dtype=torch.bool), mask], 1)
    row = {"v": v[:1], "k": k[:1], "beta": beta[:1], "sharpness": sharpness[:1], "key_mask": mask[:1]}
    narrow = {"v": v.bfloat16(), "k": k.bfloat16(), "beta": beta.bfloat16(), "key_mask": mask}
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "sharp": {"fixed": 50.0},
        "strength": {"strength": torch.tensor(0.5, dtype=torch.float64)},
        "past": past,
        "beta": {"beta": beta},
        "sharpness": {"sharpness": sharpness, "fixed": 0.0},
        "mask": {"key_mask": mask},
        "packed": row | {"cu_seqlens": borders, "fixed": 0.0},
        "row_max": {"norm": "row_max"},
        "all": past | {"beta": beta, "sharpness": sharpness, "key_mask": long_mask, "fixed": 0.0, "norm": "row_max"},
        "bfloat16": narrow,
    }
    usual = dict.fromkeys(NAMES) | {"v": v, "k": k, "fixed": 2.0, "length": 1, "norm": "key"}
    return {name: tuple((usual | case)[key] for key in NAMES) for name, case in cases.items()}


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
