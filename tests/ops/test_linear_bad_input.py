"""A bad argument is explained by name, with what was expected and what came."""

from typing import Any

import pytest
import torch

from .linear_cases import FUNCTIONS, OPERATORS, SLOTS, Sizes

B, H, T, D, E, M = 2, 2, 6, 4, 3, SLOTS
GOOD = {operator: Sizes(T=T, B=B, D=D, E=E).tensors(operator, dtype=torch.float32) for operator in OPERATORS}
MASK, BORDERS = torch.ones(B, T, dtype=torch.bool), torch.tensor([0, 2, T], dtype=torch.int32)
STATE = torch.zeros(B, H, D, E)
SLOT_STATE = torch.zeros(B, H, D, M), torch.zeros(B, H, M, E)
X = GOOD["gla"]
SINGLE = ["delta", "gated_delta", "gla"]
DELTA = ["delta", "gated_delta"]

# What is wrong: the operators it is tried with, the changed arguments, the error, and words of its message.
CASES: dict[str, tuple[list[str], dict[str, Any], type[Exception], tuple[str, ...]]] = {
    "q is a list": (OPERATORS, {"q": [1.0]}, TypeError, ("q must be", "torch.Tensor", "got list")),
    "q too long": (OPERATORS, {"q": torch.rand(B, H, 7, D)}, ValueError, ("q must be", "[2, 2, 6, 4]", "[2, 2, 7, 4]")),
    "beta is [B, T, H]": (DELTA, {"beta": torch.rand(B, T, H)}, ValueError, ("beta", "[2, 2, 6]", "[2, 6, 2]")),
    "decay of values": (OPERATORS[1:], {"log_decay": X["v"]}, ValueError, ("log_decay must be", "[2, 2, 6, 3]")),
    "decay is missing": (["gla", "gsa"], {"log_decay": None}, TypeError, ("log_decay must be", "NoneType")),
    "slots of one row": (["gsa"], {"s": torch.rand(1, H, T, M)}, ValueError, ("s must be", "[2, 2, 6, 4]", "[1, 2,")),
    "state transposed": (SINGLE, {"state": STATE.mT}, ValueError, ("state must be", "[B, H, D, E]", "[2, 2, 3, 4]")),
    "state in 16 bits": (SINGLE, {"state": STATE.bfloat16()}, TypeError, ("state must be", "float32", "bfloat16")),
    "state of slots is a tensor": (["gsa"], {"state": STATE}, TypeError, ("state must be a pair", "Tensor")),
    "mask of 0 and 1": (OPERATORS, {"key_mask": MASK.long()}, TypeError, ("key_mask", "torch.bool", "int64")),
    "mask with a past": (
        OPERATORS,
        {"key_mask": MASK.repeat(1, 2)},
        ValueError,
        ("key_mask", "[B, T] = [2, 6]", "[2, 12]"),
    ),
    "impl of another operator": (OPERATORS, {"impl": "blockwise"}, ValueError, ("'reference', 'fla'", "'blockwise'")),
    "impl for CUDA": (OPERATORS, {"impl": "fla"}, ValueError, ("impl='fla'", "expects CUDA", "got cpu")),
}


@pytest.mark.parametrize(
    ("operator", "case"), [pytest.param(name, case, id=f"{name}: {case}") for case in CASES for name in CASES[case][0]]
)
def test_a_bad_argument_is_explained(operator, case):
    _, changes, error, words = CASES[case]
    arguments = GOOD[operator] | changes
    with pytest.raises(error) as caught:
        FUNCTIONS[operator](**arguments)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"the message lacks {missing}: {caught.value}"


@pytest.mark.parametrize("operator", OPERATORS)
def test_packing_excludes_a_state(operator):
    row = {name: x[:1] for name, x in GOOD[operator].items()}
    state = tuple(x[:1] for x in SLOT_STATE) if operator == "gsa" else STATE[:1]
    with pytest.raises(ValueError, match="cu_seqlens and state exclude each other"):
        FUNCTIONS[operator](**row, state=state, cu_seqlens=BORDERS)
    for impl in ("chunkwise", "reference"):
        with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to T = 6"):
            FUNCTIONS[operator](**row, cu_seqlens=BORDERS[:2], impl=impl)
