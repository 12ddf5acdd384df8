"""Bad arguments of `LucidAttention`: every error names the argument, what was expected and what it got."""

import copy
from typing import Any, NamedTuple

import pytest
import torch

from lucid_attention import LucidAttention
from lucid_attention.nn.causal import Past

B, T, S, HIDDEN = 2, 6, 5, 16


class Case(NamedTuple):
    id: str
    changes: dict[str, Any]
    error: type[Exception]
    words: tuple[str, ...]


CONSTRUCTIONS = [
    Case("no hidden size", {"hidden_size": 0}, ValueError, ("hidden_size must be", "positive integer", "got 0")),
    Case("hidden size not divided", {"num_heads": 3}, ValueError, ("hidden_size 16", "multiple of num_heads 3")),
    Case("odd head_dim turned", {"head_dim": 5}, ValueError, ("head_dim must be even", "got 5", "rope_base=None")),
    Case("rope_base is 0", {"rope_base": 0.0}, ValueError, ("rope_base must be", "positive", "got 0.0")),
    Case("norm unknown", {"norm": "l2"}, ValueError, ("norm must be", "'key', 'qk', 'row_max'", "got 'l2'")),
    Case("impl unknown", {"impl": "cuda"}, ValueError, ("impl must be", "'auto', 'reference'", "got 'cuda'")),
]


@pytest.mark.parametrize("case", CONSTRUCTIONS, ids=lambda case: case.id)
def test_a_bad_setting_is_explained(case: Case) -> None:
    with pytest.raises(case.error) as caught:
        LucidAttention(**({"hidden_size": HIDDEN, "num_heads": 4} | case.changes))
    missing = [word for word in case.words if word not in str(caught.value)]
    assert not missing, f"the message lacks {missing}: {caught.value}"


X = torch.randn(B, T, HIDDEN, generator=torch.Generator().manual_seed(0))
MASK = torch.ones(B, T, dtype=torch.bool)
BORDERS = torch.tensor([0, 2, T], dtype=torch.int32)
MODULE = LucidAttention(HIDDEN, 4, num_kv_heads=2, learn_beta=True)
with torch.no_grad():
    PAST = MODULE(X[:, :S])[1]
PAIR = PAST.k, PAST.y
ONE_ROW = Past(PAST.k[:1], PAST.y[:1], PAST.inverse_norms)

CALLS = [
    Case("x is a list", {"x": [1.0]}, TypeError, ("x must be", "torch.Tensor", "got list")),
    Case("mask too short", {"key_mask": MASK[:, 1:]}, ValueError, ("key_mask", "[2, 6]", "[2, 5]")),
    Case("packed in two rows", {"cu_seqlens": BORDERS}, ValueError, ("cu_seqlens", "batch size 1", "got 2")),
    Case("positions in a list", {"positions": [*range(T)]}, TypeError, ("positions must be", "torch.Tensor", "list")),
    Case("positions of three rows", {"positions": torch.zeros(3, T)}, ValueError, ("positions", "[2, 6]", "[3, 6]")),
]
# Called with the number of new tokens: a chunk with gradients, one token with gradients, one token without.
CONTINUATIONS = [
    Case("past of another batch", {"past": ONE_ROW}, ValueError, ("k_past", "[2, 2, 5, 4]", "[1, 2, 5, 4]")),
    Case("mask without the past", {"past": PAST, "key_mask": MASK}, ValueError, ("key_mask", "[B, S + T]")),
    Case("packed with past", {"past": PAST, "cu_seqlens": BORDERS}, ValueError, ("cu_seqlens", "past", "exclude")),
]
WAYS = {"chunk": (T, True), "token": (1, True), "token without gradients": (1, False)}


def refused(case: Case, arguments: dict[str, Any]) -> None:
    """The call raises as the case says; the module, its past and its next call are as before."""
    state, past = copy.deepcopy(MODULE.state_dict()), [x.clone() for x in PAIR]
    with torch.no_grad():
        before = MODULE(X)[0]
    with pytest.raises(case.error) as caught:
        MODULE(**arguments)
    missing = [word for word in case.words if word not in str(caught.value)]
    assert not missing, f"the message lacks {missing}: {caught.value}"
    assert all(torch.equal(state[name], x) for name, x in MODULE.state_dict().items())
    assert all(torch.equal(a, b) for a, b in zip(past, PAIR, strict=True))
    with torch.no_grad():
        assert torch.equal(MODULE(X)[0], before)


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.id)
def test_a_bad_call_is_explained_and_leaves_no_trace(case: Case) -> None:
    refused(case, {"x": X} | case.changes)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CONTINUATIONS, ids=lambda case: case.id)
def test_a_bad_continuation_is_explained_and_leaves_no_trace(case: Case, way: str) -> None:
    length, grad = WAYS[way]
    arguments = {"x": X[:, :length]} | case.changes
    if "key_mask" in arguments:
        arguments["key_mask"] = MASK[:, :length]
    if "cu_seqlens" in arguments:
        row = {"x": X[:1, :length], "past": Past(PAST.k[:1], PAST.y[:1]), "cu_seqlens": torch.tensor([0, length])}
        arguments |= row
    with torch.set_grad_enabled(grad):
        refused(case, arguments)


def test_inverse_norms_that_were_not_cropped_with_the_keys_are_explained() -> None:
    with torch.no_grad():
        past = MODULE(X[:, :1], past=PAST)[1]
        stale = Past(past.k[:, :, :3], past.y[:, :, :3], past.inverse_norms)
        case = Case("", {}, ValueError, ("inverse_norms must be", "[2, 2, 4]", "[2, 2, 7]"))
        refused(case, {"x": X[:, :1], "past": stale})


def test_x_of_another_dtype_than_the_weights_is_refused() -> None:
    with pytest.raises((TypeError, RuntimeError), match=r"double|float64"):
        MODULE(X.double())


def test_options_of_a_call_are_keywords_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        MODULE(X, PAST)
