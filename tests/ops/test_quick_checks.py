"""What the quick look at the tensors of a token accepts, the checks accept."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lucid_attention.ops.softmax import one_token

B, H, G, S, D, E = 2, 3, 2, 4, 5, 6
Arguments = dict[str, Any]


def arguments(static: bool, dtype: torch.dtype = torch.float32) -> Arguments:
    total = S + 1
    shapes = {"q": (B, H * G, 1, D), "k": (B, H, total, D), "v": (B, H, 1, E)}
    shapes |= {"y_past": (B, H, total if static else S, E), "inverse_norms": (B, H, total)}
    tensors: Arguments = {name: torch.ones(shape, dtype=dtype) for name, shape in shapes.items()}
    tensors["key_mask"] = torch.ones(B, total, dtype=torch.bool)
    return tensors | {"position": torch.tensor(S) if static else None}


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "nothing": lambda x: None,
    "a list": lambda x: x.tolist(),
    "a parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "sparse": lambda x: x.to_sparse(),
    "on another device": lambda x: x.to("meta"),
    "float64": lambda x: x.double(),
    "float16": lambda x: x.half(),
    "int64": lambda x: x.long(),
    "int32": lambda x: x.int(),
    "bool": lambda x: x.bool(),
    "complex": lambda x: x.to(torch.complex64),
    "one dimension more": lambda x: x[None],
    "one dimension less": lambda x: x.flatten(0, 1) if x.ndim > 1 else x.reshape(()),
} | {
    f"{what} in dimension {dim}": (lambda x, dim=dim, size=size: _resized(x, dim, size))
    for dim in range(4)
    for what, size in (("none", 0), ("one", 1), ("one more", None))
}


def _resized(x: Tensor, dim: int, size: int | None) -> Tensor:
    if x.ndim <= dim:
        return x
    shape = list(x.shape)
    shape[dim] = shape[dim] + 1 if size is None else size
    return x.new_ones(shape)


def _accepts(check: Callable[..., Any], tensors: Arguments) -> bool:
    try:
        return check(**tensors) is not False
    except (TypeError, ValueError):
        return False


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
def test_what_the_quick_look_accepts_the_checks_accept(static: bool) -> None:
    plain = arguments(static)
    assert one_token._plainly_right(**plain)
    accepted = 0
    for name in plain:
        for change in CHANGES.values() if plain[name] is not None else ():
            changed = plain | {name: change(plain[name])}
            if one_token._plainly_right(**changed):
                accepted += 1
                assert _accepts(one_token._check_tensors, changed), (name, changed[name])
    # Some changes are allowed: no mask, norms in another dtype, another number of values.
    assert accepted > 5


def test_every_dtype_is_looked_at_quickly_and_others_are_not() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        assert one_token._plainly_right(**arguments(False, dtype))
    assert not one_token._plainly_right(**arguments(False, torch.int64))


def test_context_parallelism_is_not_overlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_token, "context_parallel_is_active", lambda: True)
    assert not one_token._plainly_right(**arguments(False))
