"""Bad arguments of PaTH's functions: every error names the argument, what was expected and what came."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lucid_attention.ops.lucid.decode import inverse_key_norms
from lucid_attention.ops.path.api import lucid_path_attention, path_attention, path_precondition
from lucid_attention.ops.path.decode import apply_factors, identity_factors, keys_at_end, path_decode

from .path_cases import PathCase

B, H, G, T, D, E = 2, 2, 2, 6, 4, 3
GOOD = PathCase(T=T, B=B, H=H, G=G, S=T, D=D, E=E).tensors("lucid_path", torch.float32)
Q, K, V, W, BETA = (GOOD[name] for name in ("q", "k", "v", "w", "beta"))
K_PAST, Y_PAST, NORMS = (GOOD[name] for name in ("k_past", "y_past", "inverse_norms"))
CACHE = torch.cat([K_PAST, K[:, :, :1]], 2)
PRODUCT = torch.eye(D).repeat(B, H, 1, 1)
MASK, SHARPNESS = torch.ones(B, T, dtype=torch.bool), torch.full((H,), 2.0)
BORDERS = torch.tensor([0, 2, T], dtype=torch.int32)
NEW = {"k": K, "v": V, "w": W, "beta": BETA}

FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "path": (path_attention, {"q": Q} | NEW),
    "lucid_path": (lucid_path_attention, {"q": Q} | NEW),
    "precondition": (path_precondition, NEW),
    "move": (keys_at_end, {"k": K, "w": W, "beta": BETA}),
    "decode": (
        path_decode,
        {
            "q": Q[:, :, :1],
            "k": CACHE,
            "v": V[:, :, :1],
            "w": W[:, :, :1],
            "beta": BETA[:, :, :1],
            "y_past": Y_PAST,
            "product": PRODUCT,
            "pending": 4,
            "inverse_norms": inverse_key_norms(CACHE),
        },
    ),
    "flush": (apply_factors, {"k": K, "product": PRODUCT}),
    "identity_factors": (identity_factors, {"k": K}),
}
READ, LUCID = ("path", "lucid_path"), ("lucid_path", "precondition")
PATH, REBASE, DECODE, FLUSH = ("path",), ("move",), ("decode",), ("flush",)
SEQUENCES = (*READ, "precondition")
WITH_W, WITH_Q, WITH_V = (*SEQUENCES, "move"), (*READ, "decode"), (*SEQUENCES, "decode")
WITH_K = (*WITH_W, "decode", "flush", "identity_factors")
FACTORS = (*WITH_W, "decode")
FLOAT = "float64, float32, bfloat16 or float16"


class Case(NamedTuple):
    """`functions`, called with `changes` to their first `rows` rows, raise `error` with all `words` in its message."""

    id: str
    functions: tuple[str, ...]
    changes: dict[str, Any]
    error: type[Exception]
    words: tuple[str, ...]
    rows: int = B


def meta(x: Tensor) -> Tensor:
    return x.to("meta")


def case(id: str, functions: tuple[str, ...], changes: dict[str, Any], error: type[Exception], *words: str) -> Case:
    return Case(id, functions, changes, error, words)


TRIPLE = "past must be a triple (k_past, y_past, inverse_norms)"
PAIR = (K_PAST, Y_PAST)
STEP, SHARP = (*DECODE, *FLUSH), (*LUCID, "decode")
EXCLUDED = {"cu_seqlens": BORDERS, "past": (K_PAST[:1], Y_PAST[:1])}
CASES = [
    case("k is a list", WITH_K, {"k": [[1.0]]}, TypeError, "k must be", "torch.Tensor", "got list"),
    case("v too short", SEQUENCES, {"v": V[:, :, 1:]}, ValueError, "v must match k", "[2, 2, 6]", "[2, 2, 5]"),
    case("q too short", READ, {"q": Q[:, :, 1:]}, ValueError, "q must be", "[2, 4, 6, 4]", "[2, 4, 5, 4]"),
    case("w of queries", WITH_W, {"w": Q}, ValueError, "w must be", "[2, 2, 6, 4]", "[2, 4, 6, 4]"),
    case("w is bool", FACTORS, {"w": W > 0}, TypeError, "w must be", FLOAT, "torch.bool"),
    case("w elsewhere", WITH_W, {"w": meta(W)}, ValueError, "w must", "expected cpu", "got meta"),
    case("w of the cache", DECODE, {"w": W}, ValueError, "w must be", "[2, 2, 1, 4]", "[2, 2, 6, 4]"),
    case("beta is [B, T, H]", FACTORS, {"beta": BETA.mT}, ValueError, "beta must be", "[B, H, T]", "[2, 6, 2]"),
    case("past is a tensor", PATH, {"past": K}, TypeError, "past must be a pair", "Tensor"),
    case("past is a tensor", LUCID, {"past": K}, TypeError, TRIPLE, "Tensor"),
    case("inverse_norms too short", LUCID, {"past": (*PAIR, NORMS[..., 1:])}, ValueError, "inverse_norms", "[2, 2, 5]"),
    case("past is a pair", REBASE, {"past": PAIR}, TypeError, "past must be", "torch.Tensor", "tuple"),
    case("past of values", REBASE, {"past": V}, ValueError, "past must be", "[2, 2, 6, 4]", "[2, 2, 6, 3]"),
    case("past is double", REBASE, {"past": K.double()}, TypeError, "past must have", "float32", "float64"),
    case("mask of 0 and 1", FACTORS, {"key_mask": MASK.long()}, TypeError, "key_mask", "torch.bool", "int64"),
    case("mask too short", WITH_W, {"key_mask": MASK[:, 1:]}, ValueError, "key_mask", "[2, 6]", "[2, 5]"),
    Case("borders fall", SEQUENCES, {"cu_seqlens": torch.tensor([0, 4, 2, 6])}, ValueError, ("cu_seqlens", "= 4"), 1),
    Case("past and borders", PATH, EXCLUDED, ValueError, ("cu_seqlens and past exclude each other",), 1),
    case(
        "sharpness of four",
        (*LUCID, "decode"),
        {"sharpness": torch.ones(4)},
        ValueError,
        "sharpness",
        "[H] = [2]",
        "[4]",
    ),
    case("sharpness of PaTH", PATH, {"sharpness": 2.0}, TypeError, "path_attention()", "sharpness"),
    case("scale is text", WITH_Q, {"scale": "0.5"}, TypeError, "scale must be", "number", "got str"),
    case("impl unknown", SEQUENCES, {"impl": "flash"}, ValueError, "impl must be", "'reference'", "'flash'"),
    case("y_past too long", DECODE, {"y_past": V.repeat(1, 1, 2, 1)}, ValueError, "y_past", "[2, 2, 6, 3]", "12, 3]"),
    case("two new values", DECODE, {"v": V[:, :, :2]}, ValueError, "v must be", "[B, H, 1, E]", "[2, 2, 2, 3]"),
    case("product is None", STEP, {"product": None}, TypeError, "product must be", "Tensor", "NoneType"),
    case("product without heads", STEP, {"product": torch.eye(4)}, ValueError, "product must be", "[B, H, D, D]"),
    case("product elsewhere", STEP, {"product": meta(PRODUCT)}, ValueError, "product must", "got meta"),
    case("pending is negative", DECODE, {"pending": -1}, ValueError, "pending must be", "[0, 6]", "got -1"),
    case("pending is float", DECODE, {"pending": 2.0}, (TypeError, ValueError), "pending must be", "integer", "2.0"),
    case("live of another length", DECODE, {"live": CACHE}, ValueError, "live must be", "[2, 2, 7, 4]"),
    case("norms of the past", DECODE, {"inverse_norms": NORMS}, ValueError, "inverse_norms", "[2, 2, 7]", "[2, 2, 6]"),
    case("out too short", FLUSH, {"out": K[:, :, 1:].clone()}, ValueError, "out must be", "[2, 2, 6, 4]", "2, 5, 4]"),
    case("out is double", FLUSH, {"out": K.double()}, TypeError, "out must have", "float32", "float64"),
]


def tensors_of(arguments: dict[str, Any]) -> list[Tensor]:
    nested = (x if isinstance(x, tuple) else (x,) for x in arguments.values())
    return [x for several in nested for x in several if isinstance(x, Tensor)]


@pytest.mark.parametrize(
    ("name", "wrong"), [pytest.param(name, c, id=f"{name}: {c.id}") for c in CASES for name in c.functions]
)
def test_a_bad_argument_is_explained_and_leaves_no_trace(name: str, wrong: Case) -> None:
    function, good = FUNCTIONS[name]
    arguments = {key: x[: wrong.rows] if isinstance(x, Tensor) else x for key, x in good.items()} | wrong.changes
    versions = [(x, x._version) for x in tensors_of(arguments)]
    with pytest.raises(wrong.error) as caught:
        function(**arguments)
    # Whole words: k_past is not past.
    missing = [word for word in wrong.words if not re.search(r"(?<!\w)" + re.escape(word), str(caught.value))]
    assert not missing, f"the message lacks {missing}: {caught.value}"
    assert all(x._version == version for x, version in versions)


@pytest.mark.parametrize("impl", ["blockwise", "reference"])
def test_what_is_unusual_but_right_is_accepted(impl: str) -> None:
    everything = {"q": Q} | NEW
    plain = lucid_path_attention(**everything, impl=impl)
    nothing_yet = K[:, :, :0], V[:, :, :0], NORMS[..., :0]
    for options in ({"past": nothing_yet}, {"key_mask": MASK}, {"sharpness": 2}, {"sharpness": SHARPNESS.double()}):
        torch.testing.assert_close(lucid_path_attention(**everything, impl=impl, **options), plain)
    torch.testing.assert_close(
        path_attention(**everything, impl=impl, past=nothing_yet[:2], scale=1),
        path_attention(**everything, impl=impl, scale=1.0),
    )
    past = lucid_path_attention(**everything, impl=impl, past=(*PAIR, NORMS))
    torch.testing.assert_close(lucid_path_attention(**everything, impl=impl, past=[*PAIR, NORMS]), past)
    row = {name: x[:1] for name, x in everything.items()}
    empty = torch.tensor([0, 0, T, T])
    torch.testing.assert_close(lucid_path_attention(**row, impl=impl, cu_seqlens=empty), plain[:1])
    torch.testing.assert_close(keys_at_end(K, W, BETA, past=K[:, :, :0]), keys_at_end(K, W, BETA))
    wide = everything | {"w": W.double(), "beta": BETA.bfloat16()}
    assert lucid_path_attention(**wide, impl=impl).dtype == torch.float32
