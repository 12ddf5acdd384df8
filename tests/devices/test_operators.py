"""Every operator on a pretended GPU: forward and backward have no tensor on a wrong device and do not wait."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lucid_attention import (
    delta_attention,
    diff_attention,
    gla_attention,
    gsa_attention,
    inverse_key_norms,
    lucid_attention,
    lucid_decode,
    lucid_path_attention,
    path_attention,
    precondition,
    preconditioner,
)
from lucid_attention.ops.path.decode import path_decode
from lucid_attention.ops.softmax import attention
from lucid_attention.ops.softmax.sliding import read_window
from tests.ops.varlen_kernel import stand_in

from .running import Tensors, on_both

T, S, D, E = 21, 7, 4, 3
BORDERS = [0, 3, 3, 5, 12, 21, 21]


def tensors(B: int = 2) -> Tensors:
    """Correlated keys, and everything that operators take beside them."""
    torch.manual_seed(0)

    def leaf(*shape: int, shift: float = 0.0) -> torch.Tensor:
        return (torch.randn(*shape, dtype=torch.float64) + shift).requires_grad_()

    mask = torch.rand(B, S + T) < 0.8
    # A row without a key, and one whose past is empty.
    mask[0, :9] = False
    return {
        "q": leaf(B, 4, T, D),
        "k": leaf(B, 2, T, D, shift=0.8),
        "v": leaf(B, 2, T, E),
        "w": torch.nn.functional.normalize(torch.randn(B, 2, T, D, dtype=torch.float64), dim=-1).requires_grad_(),
        "beta": torch.rand(B, 2, T, dtype=torch.float64).requires_grad_(),
        "log_decay": (-torch.rand(B, 2, T, dtype=torch.float64)).requires_grad_(),
        "log_decays": (-torch.rand(B, 2, T, D, dtype=torch.float64)).requires_grad_(),
        "s": leaf(B, 2, T, D),
        "sharpness": torch.rand(2, dtype=torch.float64).add(1).requires_grad_(),
        "past": (leaf(B, 2, S, D, shift=0.8), leaf(B, 2, S, E)),
        "mask": mask[:, S:],
        "long_mask": mask,
        "cu": torch.tensor(BORDERS, dtype=torch.int32),
    }


def first(t: Tensors, *names: str) -> list[Any]:
    return [t[name] for name in names]


LUCID, PATH = ("q", "k", "v"), ("q", "k", "v", "w", "beta")
OPERATORS: dict[str, Callable[[Tensors], Any]] = {
    "lucid": lambda t: lucid_attention(*first(t, *LUCID)),
    "lucid, mask": lambda t: lucid_attention(*first(t, *LUCID), key_mask=t["mask"]),
    "lucid, past and mask": lambda t: lucid_attention(*first(t, *LUCID), past=t["past"], key_mask=t["long_mask"]),
    "lucid, options": lambda t: lucid_attention(
        *first(t, *LUCID), beta=t["beta"], sharpness=t["sharpness"], strength=0.5, norm="qk", key_mask=t["mask"]
    ),
    "lucid, row_max": lambda t: precondition(t["k"], t["v"], norm="row_max", sharpness=t["sharpness"]),
    "lucid, reference": lambda t: lucid_attention(*first(t, *LUCID), key_mask=t["mask"], impl="reference"),
    "preconditioner": lambda t: preconditioner(t["k"], key_mask=t["mask"], beta=t["beta"]),
    "path": lambda t: path_attention(*first(t, *PATH)),
    "lucid_path": lambda t: lucid_path_attention(*first(t, *PATH), sharpness=t["sharpness"]),
    "lucid_path, past": lambda t: lucid_path_attention(
        *first(t, *PATH), past=(*t["past"], inverse_key_norms(t["past"][0].detach()))
    ),
    "lucid_path, reference": lambda t: lucid_path_attention(*first(t, *PATH), key_mask=t["mask"], impl="reference"),
    "diff": lambda t: diff_attention(t["q"], t["k"], t["v"][:, :1], 0.3, key_mask=t["mask"]),
    "sliding": lambda t: read_window(*first(t, *LUCID), 5, key_mask=t["mask"]),
    "delta": lambda t: tuple(delta_attention(*first(t, *LUCID, "beta"), log_decay=t["log_decay"], key_mask=t["mask"])),
    "delta, reference": lambda t: tuple(delta_attention(*first(t, *LUCID, "beta"), impl="reference")),
    "gla": lambda t: tuple(gla_attention(*first(t, *LUCID, "log_decays"), key_mask=t["mask"])),
    "gsa": lambda t: gsa_attention(*first(t, *LUCID, "s", "log_decays"), key_mask=t["mask"]).o,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_do_not_wait_for_the_device(name: str):
    assert on_both(OPERATORS[name], tensors()) == []


# How often a pass with its backward reads borders or a mask whose values decide about shapes: once per operator.
READING: dict[str, tuple[Callable[[Tensors], Any], int]] = {
    "lucid": (lambda t: lucid_attention(*first(t, *LUCID), cu_seqlens=t["cu"]), 4),
    "lucid, mask": (lambda t: lucid_attention(*first(t, *LUCID), cu_seqlens=t["cu"], key_mask=t["mask"]), 4),
    "lucid, reference": (lambda t: lucid_attention(*first(t, *LUCID), cu_seqlens=t["cu"], impl="reference"), 1),
    "lucid_path": (lambda t: lucid_path_attention(*first(t, *PATH), cu_seqlens=t["cu"]), 2),
    "diff": (lambda t: diff_attention(t["q"], t["k"], t["v"][:, :1], 0.3, cu_seqlens=t["cu"]), 4),
    "sliding": (lambda t: read_window(*first(t, *LUCID), 5, cu_seqlens=t["cu"]), 1),
    "delta": (lambda t: tuple(delta_attention(*first(t, *LUCID, "beta"), cu_seqlens=t["cu"])), 1),
    "gla": (lambda t: tuple(gla_attention(*first(t, *LUCID, "log_decays"), cu_seqlens=t["cu"])), 1),
}


@pytest.mark.parametrize("name", READING)
def test_packed_documents_wait_for_their_borders_only_and_not_if_these_are_on_the_cpu(name: str):
    call, reads = READING[name]
    assert on_both(call, tensors(B=1), host=("cu",)) == []
    waits = on_both(call, tensors(B=1))
    assert len(waits) == reads
    assert all(wait.startswith("tolist: packing.py, offsets") for wait in waits)


@pytest.mark.parametrize("name", ["lucid, mask", "lucid, past and mask"])
def test_the_read_out_by_the_kernel_for_different_lengths_does_not_wait(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "varlen_can_read", lambda *arguments: True)
    monkeypatch.setattr(attention, "_varlen_kernel", lambda: stand_in)
    assert on_both(OPERATORS[name], tensors()) == []


def test_path_reads_its_mask_once_per_pass():
    """A masked position is absent from PaTH, so the mask decides about shapes."""
    masked = {
        "alone": lambda t: lucid_path_attention(*first(t, *PATH), key_mask=t["mask"]),
        "past": lambda t: path_attention(*first(t, *PATH), past=t["past"], key_mask=t["long_mask"]),
    }
    for call in masked.values():
        waits = on_both(call, tensors())
        assert [wait.split(":")[0] for wait in waits] == ["copy to the host"] * 2


def decode_inputs() -> Tensors:
    t = {name: x for name, x in tensors().items() if name in ("sharpness",)}
    torch.manual_seed(1)
    M = S + 5
    t |= {"q": torch.randn(2, 4, 1, D), "k": torch.randn(2, 2, M, D) + 0.8, "v": torch.randn(2, 2, 1, E)}
    t |= {"y": torch.randn(2, 2, M, E), "mask": torch.rand(2, M) < 0.8, "position": torch.tensor(S)}
    t |= {"w": torch.randn(2, 2, 1, D), "beta": torch.rand(2, 2, 1), "product": torch.eye(D).expand(2, 2, D, D).clone()}
    t["mask"][:, S + 1 :] = False
    return {name: x.detach().double() if x.is_floating_point() else x for name, x in t.items()}


def lucid_step(t: Tensors, y: torch.Tensor, **options: Any) -> Any:
    return lucid_decode(t["q"], t["k"], t["v"], y, inverse_key_norms(t["k"]), **options)


def path_step(t: Tensors, **options: Any) -> Any:
    return path_decode(*first(t, "q", "k", "v", "w", "beta"), t["y"][:, :, :-1], t["product"], 4, **options)


DECODING: dict[str, Callable[[Tensors], Any]] = {
    "lucid": lambda t: lucid_step(t, t["y"][:, :, :-1]),
    "lucid, mask": lambda t: lucid_step(t, t["y"][:, :, :-1], key_mask=t["mask"], beta=t["beta"]),
    "lucid, static": lambda t: lucid_step(
        t, t["y"], key_mask=t["mask"], position=t["position"], norm="qk", sharpness=t["sharpness"]
    ),
    "path": lambda t: path_step(t, key_mask=t["mask"]),
    "lucid_path": lambda t: path_step(t, inverse_norms=inverse_key_norms(t["k"])),
}


@pytest.mark.parametrize("name", DECODING)
def test_decoding_steps_do_not_wait_for_the_device(name: str):
    assert on_both(lambda t: tuple(DECODING[name](t)), decode_inputs()) == []
