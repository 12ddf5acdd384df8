"""Bad arguments of the public functions: every error names the argument, what was expected and what came."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import lucid_attention as package
from lucid_attention import lucid_attention, lucid_decode, precondition, preconditioner
from lucid_attention.ops.lucid.decode import inverse_key_norms

B, H, G, T, D, E = 2, 2, 2, 6, 4, 3
random = torch.Generator().manual_seed(0)


def correlated(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=random) + 1


Q, K, V = correlated(B, H * G, T, D), correlated(B, H, T, D), correlated(B, H, T, E)
PAST = correlated(B, H, T, D), correlated(B, H, T, E)
CACHE = torch.cat([PAST[0], K[:, :, :1]], 2)
MASK, BETA, SHARPNESS = torch.ones(B, T, dtype=torch.bool), torch.full((B, H, T), 0.5), torch.full((H,), 2.0)
BORDERS = torch.tensor([0, 2, T], dtype=torch.int32)

FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "attention": (lucid_attention, {"q": Q, "k": K, "v": V}),
    "precondition": (precondition, {"k": K, "v": V}),
    "preconditioner": (preconditioner, {"k": K}),
    "decode": (
        lucid_decode,
        {"q": Q[:, :, :1], "k": CACHE, "v": V[:, :, :1], "y_past": PAST[1], "inverse_norms": inverse_key_norms(CACHE)},
    ),
    "inverse_norms": (inverse_key_norms, {"k": K}),
}
ATTENTION, DECODE, NORMS = ("attention",), ("decode",), ("inverse_norms",)
SEQUENCES = ("attention", "precondition")
DENSE = (*SEQUENCES, "preconditioner")
WITH_Q = ("attention", "decode")
WITH_OPTIONS = (*DENSE, "decode")
WITH_K = (*WITH_OPTIONS, "inverse_norms")


class Case(NamedTuple):
    """`functions`, called with `changes` to their first `rows` rows, raise `error` with all `words` in its message."""

    id: str
    functions: tuple[str, ...]
    changes: dict[str, Any]
    error: type[Exception]
    words: tuple[str, ...]
    rows: int = B


def jagged() -> Tensor:
    return torch.nested.nested_tensor([K[0], K[1]], layout=torch.jagged)


def meta(x: Tensor) -> Tensor:
    return x.to("meta")


FLOAT = "float64, float32, bfloat16 or float16"
NAN = math.nan


def case(id: str, functions: tuple[str, ...], changes: dict[str, Any], error: type[Exception], *words: str) -> Case:
    return Case(id, functions, changes, error, words)


def packed(id: str, offsets: Any, error: type[Exception], *words: str, rows: int = 1, **more: Any) -> Case:
    functions = SEQUENCES if more else DENSE
    borders = torch.tensor(offsets, dtype=torch.int32) if isinstance(offsets, tuple) else offsets
    return Case(id, functions, {"cu_seqlens": borders, **more}, error, ("cu_seqlens", *words), rows)


INVERSE_NORMS = FUNCTIONS["decode"][1]["inverse_norms"]
CASES = [
    case("k is a list", WITH_K, {"k": [[1.0]]}, TypeError, "k must be", "torch.Tensor", "got list"),
    case("k without a batch", WITH_K, {"k": K[0]}, ValueError, "k must be", "[B, H,", "[2, 6, 4]"),
    case("v too short", SEQUENCES, {"v": V[:, :, 1:]}, ValueError, "v must match k", "[2, 2, 6]", "[2, 2, 5]"),
    case("q too short", ATTENTION, {"q": Q[:, :, -1:]}, ValueError, "q must be", "[2, 4, 1, 4]", "past=", "_decode"),
    case("three q heads on two", WITH_Q, {"q": Q[:, :3]}, ValueError, "q must", "multiple of 2", "got 3"),
    case("no token", DENSE, {"k": K[:, :, :0]}, ValueError, "k must be", "empty", "[2, 2, 0, 4]"),
    case("k is integer", WITH_K, {"k": K.long()}, TypeError, "k must be", FLOAT, "torch.int64"),
    case("q is bfloat16", ATTENTION, {"q": Q.bfloat16()}, TypeError, "q must", "dtype of k", "float32", "bfloat16"),
    case("q elsewhere", ATTENTION, {"q": meta(Q)}, ValueError, "q must", "expected cpu", "got meta"),
    case("new q elsewhere", DECODE, {"q": meta(Q[:, :, :1])}, ValueError, "q must", "expected cpu", "got meta"),
    case("k is sparse", WITH_K, {"k": K.to_sparse()}, TypeError, "k must be", "dense", "sparse_coo"),
    case("k is jagged", SEQUENCES, {"k": jagged()}, TypeError, "k must be", "dense", "jagged"),
    case("past is a tensor", SEQUENCES, {"past": K}, TypeError, "past must be a pair (k_past, y_past)", "Tensor"),
    case("past swapped", SEQUENCES, {"past": PAST[::-1]}, ValueError, "k_past must be", "[2, 2, 6, 4]", "2, 6, 3]"),
    case("y too short", SEQUENCES, {"past": (K, V[:, :, 1:])}, ValueError, "y_past", "[2, 2, 6, 3]", "[2, 2, 5, 3]"),
    case("dense with past", ("preconditioner",), {"past": PAST}, TypeError, "past", "unexpected"),
    case("mask of 0 and 1", WITH_OPTIONS, {"key_mask": MASK.long()}, TypeError, "key_mask", "torch.bool", "int64"),
    case("mask too long", DENSE, {"key_mask": MASK.repeat(1, 2)}, ValueError, "key_mask", "[2, 6]", "[2, 12]"),
    case("mask of new", SEQUENCES, {"key_mask": MASK, "past": PAST}, ValueError, "[B, S + T] = [2, 12]", "[2, 6]"),
    packed("borders in a list", [0, 2, 6], TypeError, "torch.Tensor", "got list"),
    packed("borders are float", BORDERS.float(), TypeError, "int32 or int64", "float32"),
    packed("last border below T", (0, 2, 5), ValueError, "cu_seqlens[-1] = 6", "got 5"),
    packed("falling borders", (0, 4, 2, 6), ValueError, "without falling", "[1] = 4", "[2] = 2"),
    packed("falling, reference", (0, 4, 2, 6), ValueError, "falling", "[1] = 4", "[2] = 2", impl="reference"),
    packed("packed in two rows", BORDERS, ValueError, "batch size 1", "got 2", rows=2),
    packed("packed with past", BORDERS, ValueError, "past", "exclude", past=(K[:1], V[:1])),
    packed("borders elsewhere", meta(BORDERS), ValueError, "expected cpu", "got meta"),
    case("beta is a number", WITH_OPTIONS, {"beta": 0.5}, TypeError, "beta must be", "torch.Tensor", "got float"),
    case("beta is [B, T, H]", DENSE, {"beta": BETA.mT}, ValueError, "beta", "[B, H, T] = [2, 2, 6]", "[2, 6, 2]"),
    case("sharpness is 0", WITH_OPTIONS, {"sharpness": 0}, ValueError, "sharpness must be", "positive", "got 0"),
    case("sharpness is 1e39", WITH_OPTIONS, {"sharpness": 1e39}, ValueError, "finite number in float32", "got 1e+39"),
    case("sharpness is text", WITH_OPTIONS, {"sharpness": "4"}, TypeError, "sharpness must be", "number", "got str"),
    case("sharpness is []", WITH_OPTIONS, {"sharpness": torch.tensor(2.0)}, ValueError, "[H] = [2]", "got shape []"),
    case("scale is text", WITH_Q, {"scale": "0.5"}, TypeError, "scale must be", "number", "got str"),
    case("scale is NaN", WITH_Q, {"scale": NAN}, ValueError, "scale must be", "finite", "got nan"),
    case("norm unknown", WITH_OPTIONS, {"norm": "l2"}, ValueError, "norm must be", "'key', 'qk', 'row_max'", "'l2'"),
    case("impl unknown", SEQUENCES, {"impl": "flash"}, ValueError, "impl must be", "'auto', 'reference'", "'flash'"),
    case("impl not there", SEQUENCES, {"impl": "triton"}, ValueError, "impl='triton'", "Expected 'auto', 'reference'"),
    case("SDPA's mask", ATTENTION, {"attn_mask": MASK}, ValueError, "attn_mask", "key_mask", "cu_seqlens", "block"),
    case("SDPA's dropout", ATTENTION, {"dropout_p": 0.1}, ValueError, "dropout_p", "0.1"),
    case("misspelt", ATTENTION, {"sharpnes": 4.0}, TypeError, "lucid_attention()", "did you mean 'sharpness'"),
    case("y_past too long", DECODE, {"y_past": PAST[1].repeat(1, 1, 2, 1)}, ValueError, "y_past", "[2, 2, 12, 3]"),
    case("y_past elsewhere", DECODE, {"y_past": meta(PAST[1])}, ValueError, "y_past", "expected cpu", "got meta"),
    case("norms of the past", DECODE, {"inverse_norms": INVERSE_NORMS[..., 1:]}, ValueError, "inverse_norms", "2, 7]"),
    case("two new values", DECODE, {"v": V[:, :, :2]}, ValueError, "v must be", "[B, H, 1, E]", "[2, 2, 2, 3]"),
    case("two new queries", DECODE, {"q": Q[:, :, :2]}, ValueError, "q must be", "[2, 4, 1, 4]", "[2, 4, 2, 4]"),
    case("mask of the past", DECODE, {"key_mask": MASK}, ValueError, "key_mask", "[2, 7]", "[2, 6]"),
]


def snapshot(arguments: dict[str, Any]) -> list[tuple[Tensor, int, Tensor | None]]:
    """Every tensor that was handed over, with its version and a copy of what it held."""
    found = []
    for x in arguments.values():
        for tensor in x if isinstance(x, tuple) else (x,):
            if isinstance(tensor, Tensor):
                readable = tensor.device.type == "cpu" and tensor.layout == torch.strided
                found.append((tensor, tensor._version, tensor.clone() if readable else None))
    return found


@pytest.mark.parametrize(
    ("name", "case"), [pytest.param(name, case, id=f"{name}: {case.id}") for case in CASES for name in case.functions]
)
def test_a_bad_argument_is_explained_and_leaves_no_trace(name: str, case: Case) -> None:
    function, good = FUNCTIONS[name]
    before = function(**good)
    arguments = {key: x[: case.rows] for key, x in good.items()} | case.changes
    held = snapshot(arguments)
    with pytest.raises(case.error) as caught:
        function(**arguments)
    missing = [word for word in case.words if word not in str(caught.value)]
    assert not missing, f"the message lacks {missing}: {caught.value}"
    for tensor, version, copy in held:
        assert tensor._version == version
        if copy is not None:
            torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(function(**good), before, rtol=0, atol=0)


def test_options_are_keywords_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        lucid_attention(Q, K, V, PAST)  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional"):
        precondition(K, V, PAST)  # type: ignore[misc]


def test_every_public_function_of_lucid_is_in_the_table() -> None:
    modules = {name: getattr(getattr(package, name), "__module__", "") for name in package.__all__}
    functions = {name for name, module in modules.items() if module.startswith("lucid_attention.ops.lucid.")}
    functions -= {name for name in functions if isinstance(getattr(package, name), type)}
    assert functions == {function.__name__ for function, _ in FUNCTIONS.values()}


def test_what_is_unusual_but_right_is_accepted() -> None:
    plain = lucid_attention(Q, K, V)
    nothing_yet = K[:, :, :0], V[:, :, :0]
    names_of_sdpa = {"attn_mask": None, "dropout_p": 0.0, "is_causal": True, "enable_gqa": True}
    numbers: list[dict[str, Any]] = [{"sharpness": 2}, {"sharpness": SHARPNESS.double()}]
    for options in ({"past": nothing_yet}, {"key_mask": MASK}, names_of_sdpa, *numbers):
        torch.testing.assert_close(lucid_attention(Q, K, V, **options), plain)  # type: ignore[arg-type]
    with_past = lucid_attention(Q, K, V, past=PAST)
    torch.testing.assert_close(lucid_attention(Q, K, V, past=list(PAST)), with_past)  # type: ignore[arg-type]
    row = Q[:1], K[:1], V[:1]
    empty_documents = torch.tensor([0, 0, T, T])
    torch.testing.assert_close(lucid_attention(*row, cu_seqlens=empty_documents), plain[:1])
    torch.testing.assert_close(lucid_attention(*row, cu_seqlens=empty_documents, past=None), plain[:1])


@pytest.mark.parametrize("name", ["k", "beta"])
def test_whatever_stands_at_a_masked_key_does_not_reach_the_preconditioner(name: str) -> None:
    arguments, key_mask = {"k": K, "beta": BETA}, torch.arange(T).expand(B, T) != 2
    expected = preconditioner(**arguments, key_mask=key_mask)
    arguments[name] = arguments[name].clone()
    arguments[name][:, :, 2] = NAN
    torch.testing.assert_close(preconditioner(**arguments, key_mask=key_mask), expected, rtol=0, atol=0)
