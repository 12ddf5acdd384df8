"""Inputs that make P far from the identity, and how results are compared with the truth.

Independent random keys at D ≥ 64 make P ≈ I, on which an operator without a solve would pass: every key made here is
correlated with the others.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def shifted_keys(*shape: int, cosine: float = 0.5, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random keys with a common mean, so that two of them have about this cosine."""
    return torch.randn(*shape, dtype=dtype) + math.sqrt(cosine / (1 - cosine))


def keys_of(kind: str, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """[B, H, T, D] keys: "shifted" (cosine 0.5), "close" (0.95), "closest" (0.99), "equal", "repeated", "runs"."""
    B, H, T, D = shape
    if kind == "equal":
        return shifted_keys(B, H, 1, D, dtype=dtype).repeat(1, 1, T, 1)
    if kind == "repeated":
        return shifted_keys(B, H, 7, D, dtype=dtype)[:, :, torch.randint(7, (T,))]
    if kind == "runs":
        return shifted_keys(B, H, T // 50 + 1, D, dtype=dtype).repeat_interleave(50, 2)[:, :, :T]
    return shifted_keys(*shape, cosine={"shifted": 0.5, "close": 0.95, "closest": 0.99}[kind], dtype=dtype)


@dataclass(frozen=True)
class Sizes:
    """Sizes in the letters of the package: B, H, G, T, S, D, E; and the kind of keys."""

    T: int
    B: int = 1
    H: int = 2
    G: int = 1
    S: int = 0
    D: int = 5
    E: int = 3
    keys: str = "shifted"

    def __str__(self) -> str:
        sizes = "-".join(
            f"{name}{getattr(self, name)}" for name in "TBHGSDE" if (name, getattr(self, name)) != ("S", 0)
        )
        return f"{self.keys}-{sizes}"


class Case(Sizes):
    """A problem of `lucid_attention`."""

    def tensors(
        self, dtype: torch.dtype = torch.float64, beta: bool = False, sharpness: bool = False
    ) -> dict[str, Tensor]:
        """Arguments of `lucid_attention` by name, the past as k_past and y_past."""
        B, H, T, S, D, E = self.B, self.H, self.T, self.S, self.D, self.E
        keys = keys_of(self.keys, B, H, S + T, D, dtype=dtype)
        out = {"q": torch.randn(B, H * self.G, T, D, dtype=dtype), "k": keys[:, :, S:].clone()}
        out["v"] = torch.randn(B, H, T, E, dtype=dtype)
        if S:
            out |= {"k_past": keys[:, :, :S].clone(), "y_past": torch.randn(B, H, S, E, dtype=dtype)}
        if beta:
            out["beta"] = torch.rand(B, H, T, dtype=dtype)
        if sharpness:
            out["sharpness"] = torch.linspace(0.7, 2.1, H, dtype=dtype)
        return out


def upstream(tensors: dict[str, Tensor], fn: Callable[..., Tensor]) -> Tensor:
    """A gradient of the output of `precondition`, or of an attention, for these arguments."""
    rows = tensors["v" if fn.__name__ == "precondition" else "q"]
    return torch.randn(*rows.shape[:3], tensors["v"].shape[3], dtype=torch.float64)


def call(fn: Callable[..., Tensor], tensors: dict[str, Tensor], **options: Any) -> Tensor:
    """fn of tensors by name, where k_past and y_past stand for past. `precondition` gets no q."""
    arguments: dict[str, Any] = dict(tensors)
    if "k_past" in arguments:
        arguments["past"] = arguments.pop("k_past"), arguments.pop("y_past")
    if fn.__name__ == "precondition":
        arguments.pop("q", None)
    return fn(**arguments, **options)


def evaluate(
    fn: Callable[..., Tensor], tensors: dict[str, Tensor], weight: Tensor, **options: Any
) -> dict[str, Tensor]:
    """The output of fn and its gradient with respect to every tensor, for the loss (out · weight).sum()."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    if fn.__name__ == "precondition":
        leaves.pop("q", None)
    out = call(fn, leaves, **options)
    out.backward(weight.to(out.dtype))
    grads = {f"d{name}": x.grad for name, x in leaves.items()}
    assert all(grad is not None for grad in grads.values()), (
        f"no gradient: {[n for n, g in grads.items() if g is None]}"
    )
    return {"out": out.detach(), **grads}


def widened(tensors: dict[str, Tensor], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {name: x.to(dtype) for name, x in tensors.items()}


def error(x: Tensor, truth: Tensor, ordinary: float = 0.1) -> float:
    """Largest deviation in units of the largest entry of the truth; infinite if x is not finite.

    Where the truth vanishes (one token has no dq; repeated keys have hardly a dk) `ordinary` is the unit.
    """
    assert x.shape == truth.shape, f"shape {tuple(x.shape)}, expected {tuple(truth.shape)}"
    if x.numel() == 0:
        return 0.0
    off = (x.double() - truth.double()).abs().max().item()
    return off / max(truth.abs().max().item(), ordinary) if math.isfinite(off) else math.inf


def assert_exact(
    ours: dict[str, Tensor], truth: dict[str, Tensor], tolerance: float = 1e-11, **ordinary: float
) -> None:
    """float64 against float64. `ordinary`: units by name for `error`."""
    assert ours.keys() == truth.keys()
    errors = {name: error(ours[name], truth[name], ordinary.get(name, 0.1)) for name in truth}
    assert all(e <= tolerance for e in errors.values()), f"errors {errors}, allowed {tolerance}"


def assert_as_good_as(
    ours: dict[str, Tensor],
    plain: dict[str, Tensor],
    truth: dict[str, Tensor],
    *,
    multiple: float = 3.0,
    floor: float = 2e-6,
    **ordinary: float,
) -> None:
    """At most a small multiple of the error that the plain formula makes in the same precision."""
    assert ours.keys() == truth.keys()
    for name in truth:
        allowed = multiple * error(plain[name], truth[name], ordinary.get(name, 0.1)) + floor
        came = error(ours[name], truth[name], ordinary.get(name, 0.1))
        assert came <= allowed, f"{name}: error {came:.2e}, allowed {allowed:.2e}"
