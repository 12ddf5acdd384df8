"""A bad argument is explained by name, with what was expected and what came."""

from typing import Any

import pytest
import torch

from .linear_cases import FUNCTIONS, OPERATORS, SLOTS, Sizes, call

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
    "q of three heads": (OPERATORS, {"q": torch.rand(B, 3, T, D)}, ValueError, ("q must", "multiple of 2", "got 3")),
    "q too long": (OPERATORS, {"q": torch.rand(B, H, 7, D)}, ValueError, ("q must be", "[2, 2, 6, 4]", "[2, 2, 7, 4]")),
    "k in three dimensions": (OPERATORS, {"k": X["k"][0]}, ValueError, ("k must be", "4 dimensions", "[2, 6, 4]")),
    "v of one head": (OPERATORS, {"v": X["v"][:, :1]}, ValueError, ("v must match k", "[2, 2, 6]", "[2, 1, 6]")),
    "beta is missing": (DELTA, {"beta": None}, TypeError, ("beta must be", "torch.Tensor", "NoneType")),
    "beta is [B, T, H]": (DELTA, {"beta": torch.rand(B, T, H)}, ValueError, ("beta", "[2, 2, 6]", "[2, 6, 2]")),
    "decay of features": (["gated_delta"], {"log_decay": X["k"]}, ValueError, ("log_decay", "[B, H, T] = [2, 2, 6]")),
    "decay of tokens": (
        ["gla"],
        {"log_decay": torch.zeros(B, H, T)},
        ValueError,
        ("log_decay", "[B, H, T, D] = [2, 2, 6, 4]", "[2, 2, 6]"),
    ),
    "decay of values": (
        ["gsa"],
        {"log_decay": X["v"]},
        ValueError,
        ("log_decay", "[B, H, T, M] = [2, 2, 6, 4]", "[2, 2, 6, 3]"),
    ),
    "decay is missing": (["gla", "gsa"], {"log_decay": None}, TypeError, ("log_decay must be", "NoneType")),
    "decay elsewhere": (["gated_delta", "gla", "gsa"], {}, ValueError, ("log_decay", "expected cpu", "got meta")),
    "slots are missing": (["gsa"], {"s": None}, TypeError, ("s must be", "torch.Tensor", "NoneType")),
    "slots of one row": (["gsa"], {"s": torch.rand(1, H, T, M)}, ValueError, ("s must be", "[2, 2, 6, 4]", "[1, 2,")),
    "state transposed": (SINGLE, {"state": STATE.mT}, ValueError, ("state must be", "[B, H, D, E]", "[2, 2, 3, 4]")),
    "state is a pair": (SINGLE, {"state": SLOT_STATE}, TypeError, ("state must be", "torch.Tensor", "tuple")),
    "state in 16 bits": (SINGLE, {"state": STATE.bfloat16()}, TypeError, ("state must be", "float32", "bfloat16")),
    "state elsewhere": (SINGLE, {"state": STATE.to("meta")}, ValueError, ("state", "expected cpu", "got meta")),
    "state of slots is a tensor": (["gsa"], {"state": STATE}, TypeError, ("state must be a pair", "Tensor")),
    "state of slots is one": (["gsa"], {"state": SLOT_STATE[:1]}, TypeError, ("state must be a pair", "length 1")),
    "state of slots swapped": (
        ["gsa"],
        {"state": SLOT_STATE[::-1]},
        ValueError,
        ("state[0]", "[B, H, D, M]", "[2, 2, 4, 3]"),
    ),
    "values of slots in 16 bits": (
        ["gsa"],
        {"state": (SLOT_STATE[0], SLOT_STATE[1].half())},
        TypeError,
        ("state[1] must be", "float32", "float16"),
    ),
    "mask of 0 and 1": (OPERATORS, {"key_mask": MASK.long()}, TypeError, ("key_mask", "torch.bool", "int64")),
    "mask with a past": (
        OPERATORS,
        {"key_mask": MASK.repeat(1, 2)},
        ValueError,
        ("key_mask", "[B, T] = [2, 6]", "[2, 12]"),
    ),
    "packed in two rows": (OPERATORS, {"cu_seqlens": BORDERS}, ValueError, ("cu_seqlens", "batch size 1", "got 2")),
    "scale is text": (OPERATORS, {"scale": "1"}, TypeError, ("scale must be", "number", "str")),
    "impl unknown": (OPERATORS, {"impl": "flash"}, ValueError, ("impl must be", "'chunkwise'", "'fla'", "'flash'")),
    "impl of another operator": (OPERATORS, {"impl": "blockwise"}, ValueError, ("'reference', 'fla'", "'blockwise'")),
    "impl not there": (OPERATORS, {"impl": "triton"}, ValueError, ("impl='triton'", "Expected 'auto', 'reference'")),
    "impl for CUDA": (OPERATORS, {"impl": "fla"}, ValueError, ("impl='fla'", "expects CUDA", "got cpu")),
}


@pytest.mark.parametrize(
    ("operator", "case"), [pytest.param(name, case, id=f"{name}: {case}") for case in CASES for name in CASES[case][0]]
)
def test_a_bad_argument_is_explained(operator, case):
    _, changes, error, words = CASES[case]
    arguments = GOOD[operator] | changes
    if case == "decay elsewhere":
        arguments["log_decay"] = GOOD[operator]["log_decay"].to("meta")
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


@pytest.mark.parametrize("operator", OPERATORS)
def test_options_are_keywords_only(operator):
    arguments = dict(GOOD[operator])
    decay = [arguments.pop("log_decay")] if operator == "gated_delta" else []
    with pytest.raises(TypeError, match="positional"):
        FUNCTIONS[operator](*arguments.values(), *decay, *([] if decay else [STATE]))


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_is_unusual_but_right_is_accepted(operator):
    expected = call(operator, GOOD[operator])
    for options in ({"key_mask": MASK}, {"impl": "auto"}, {"scale": D**-0.5}, {"scale": None}):
        for a, b in zip(call(operator, GOOD[operator], **options), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    if operator == "gsa":
        o, _ = FUNCTIONS[operator](**GOOD[operator], state=list(SLOT_STATE))
        torch.testing.assert_close(o, expected[0], rtol=0, atol=0)
