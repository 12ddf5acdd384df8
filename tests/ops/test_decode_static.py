"""One token against the whole buffers of a static cache: the ordinary step, in one graph for all positions."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from lucid_attention import lucid_decode, precondition
from lucid_attention.ops.lucid.decode import inverse_key_norms
from lucid_attention.ops.softmax import one_token as decoding
from lucid_attention.ops.softmax.one_token import Decoded

from .cases import Case

NORMS = ["key", "qk", "row_max"]
every_norm = pytest.mark.parametrize("norm", NORMS)
M = 24
POSITIONS = (0, 1, 11, M - 1)


class Buffers:
    """A cache of M places, filled up to the new token; finite garbage behind it and in its own place of y."""

    def __init__(self, case: Case, position: int, dtype: torch.dtype = torch.float64, padded: bool = False) -> None:
        tensors, now = case.tensors(dtype, beta=True), slice(position, position + 1)
        self.key_mask = (torch.arange(M) <= position).repeat(case.B, 1)
        if padded:
            self.key_mask[0, : position // 2] = False
            self.key_mask[1, 2:4] = False
        self.q, self.v, self.beta = (tensors[name][:, :, now].clone() for name in ("q", "v", "beta"))
        self.k, self.y = tensors["k"], tensors["v"]
        if position:
            past = (x[:, :, :position] for x in (self.k, self.y))
            self.y[:, :, :position] = precondition(*past, key_mask=self.key_mask[:, :position])
        self.k[:, :, position + 1 :] *= 40
        self.y[:, :, position:] *= 1e3
        self.inverse_norms = inverse_key_norms(self.k)
        self.inverse_norms[:, :, position + 1 :] = 1e6
        self.position = position

    def ordinary(self, **options: Any) -> Decoded:
        stop = self.position + 1
        args = self.q, self.k[:, :, :stop], self.v, self.y[:, :, : self.position], self.inverse_norms[:, :, :stop]
        return lucid_decode(*args, key_mask=self.key_mask[:, :stop], **options)

    def static(self, step: Any = lucid_decode, shape: tuple[int, ...] = (), **options: Any) -> Decoded:
        position = torch.full(shape, self.position)
        args = self.q, self.k, self.v, self.y, self.inverse_norms
        return step(*args, key_mask=self.key_mask, position=position, **options)


@every_norm
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("way", ["single passes", "torch's softmax"])
def test_it_is_the_ordinary_step(position, norm, padded, way, monkeypatch):
    if way != "single passes":
        monkeypatch.setattr(decoding, "CACHED_SCORES", 0)
    case = Case(T=M, B=3, G=2, D=4, E=5)
    buffers = Buffers(case, position, padded=padded)
    sharpness = torch.tensor([0.7, 1.9], dtype=torch.float64)
    for options in (
        {},
        {"strength": 0.5},
        {"strength": 0.0, "beta": buffers.beta},
        {"beta": buffers.beta, "sharpness": sharpness, "scale": 0.3, "strength": 0.8},
    ):
        for shape in ((), (1,)):
            static, ordinary = (
                buffers.static(norm=norm, shape=shape, **options),
                buffers.ordinary(norm=norm, **options),
            )
            assert static.y.shape == (3, 2, 1, 5)
            torch.testing.assert_close(static, ordinary, rtol=1e-12, atol=1e-12)


@every_norm
def test_the_new_token_may_be_padding_and_a_row_may_hold_nothing_else(norm):
    buffers = Buffers(Case(T=M, B=3, G=2, D=4), 9)
    buffers.key_mask[0, 9] = False
    buffers.key_mask[1] = False
    for filling in (None, torch.nan):
        if filling is not None:
            buffers.k[:2, :, 9] = buffers.v[:2] = buffers.q[1] = filling
            buffers.inverse_norms = inverse_key_norms(buffers.k)
        static, ordinary = buffers.static(norm=norm), buffers.ordinary(norm=norm)
        torch.testing.assert_close(static, ordinary, rtol=1e-12, atol=1e-12)
        assert not static.y[:2].any()
        assert not static.o[1].any()


@every_norm
@pytest.mark.parametrize("way", ["single passes", "torch's softmax"])
def test_a_zero_key_and_a_broken_query_are_those_of_the_ordinary_step(norm, way, monkeypatch):
    if way != "single passes":
        monkeypatch.setattr(decoding, "CACHED_SCORES", 0)
    buffers = Buffers(Case(T=M, B=2, G=2, D=4), 9)
    buffers.k[0, :, 9] = 0
    buffers.inverse_norms[0, :, 9] = 0
    buffers.q[1] = torch.nan
    static, ordinary = buffers.static(norm=norm), buffers.ordinary(norm=norm)
    torch.testing.assert_close(static, ordinary, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert static.o[1].isnan().all()


@every_norm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_buffers_of_any_dtype_are_read_as_the_ordinary_step_reads_them(dtype, norm):
    buffers = Buffers(Case(T=M, B=2, G=2, D=4), 13, dtype, padded=True)
    given = buffers.k, buffers.y, buffers.inverse_norms, buffers.key_mask
    before = [x.clone() for x in given]
    static, ordinary = buffers.static(norm=norm, strength=0.5), buffers.ordinary(norm=norm, strength=0.5)
    assert static.o.dtype == static.y.dtype == dtype
    assert all(map(torch.equal, given, before))
    torch.testing.assert_close(static, ordinary)


@pytest.mark.parametrize(
    ("norm", "backend"),
    [*((norm, "aot_eager") for norm in NORMS), pytest.param("key", "inductor", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("way", ["single passes", "torch's softmax"])
def test_one_compiled_graph_serves_every_position(norm, backend, way, dynamo, monkeypatch):
    if way != "single passes":
        monkeypatch.setattr(decoding, "CACHED_SCORES", 0)
    counter = CompileCounterWithBackend(backend)
    step = torch.compile(lucid_decode, backend=counter, fullgraph=True)
    for position in (5, *POSITIONS, *range(6, 10)):
        buffers = Buffers(Case(T=M, B=2, G=2, D=4), position, torch.float32, padded=True)
        options = {"norm": norm, "beta": buffers.beta, "strength": 0.5}
        torch.testing.assert_close(buffers.static(step, **options), buffers.ordinary(**options))
    assert counter.frame_count == 1


def bad(**changes: Any) -> dict[str, Any]:
    b = Buffers(Case(T=M, B=2, G=2, D=4), 13)
    good = {"q": b.q, "k": b.k, "v": b.v, "y_past": b.y, "inverse_norms": b.inverse_norms, "key_mask": b.key_mask}
    return good | {"position": torch.tensor(13)} | changes


def of(name: str, size: int) -> Tensor:
    return bad()[name].narrow(-1 if name in ("inverse_norms", "key_mask") else 2, 0, size)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a number": ({"position": 13}, TypeError, r"position must be a torch\.Tensor, got int"),
    "int32": ({"position": torch.tensor(13).int()}, TypeError, r"position must be torch\.int64, got torch\.int32"),
    "one per row": ({"position": torch.tensor([13, 13])}, ValueError, r"position must be \[\] or \[1\], got shape"),
    "elsewhere": ({"position": torch.tensor(13, device="meta")}, ValueError, "position must be on the device of k"),
    "no mask": ({"key_mask": None}, TypeError, r"key_mask must be \[B, M\].*got None"),
    "short mask": ({"key_mask": of("key_mask", 14)}, ValueError, r"key_mask must be \[B, M\] = \[2, 24\], got shape"),
    "y of the past": ({"y_past": of("y_past", 13)}, ValueError, r"y_past must be \[B, H, M, E\] = \[2, 2, 24, 3\]"),
    "short norms": ({"inverse_norms": of("inverse_norms", 14)}, ValueError, r"inverse_norms must be \[B, H, M\] = "),
}


@pytest.mark.parametrize(("changes", "kind", "message"), BAD.values(), ids=BAD)
def test_a_bad_argument_is_explained(changes, kind, message):
    with pytest.raises(kind, match=message):
        lucid_decode(**bad(**changes))
