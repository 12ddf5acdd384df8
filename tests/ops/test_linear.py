"""Every operator with a state, each implementation, against its recurrence: outputs, states and every gradient."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lucid_attention.ops.linear import chunks
from lucid_attention.ops.linear.delta import delta_attention
from lucid_attention.ops.linear.gated import gsa_attention

from .cases import assert_as_good_as, assert_exact, error, shifted_keys, widened
from .linear_cases import OPERATORS, Sizes, call, evaluate, truth

SIZES = [
    Sizes(T=1, B=2, G=2),
    Sizes(T=3, D=1, E=1),
    Sizes(T=37, B=2, G=3, keys="close"),
    Sizes(T=65, B=2, H=1, G=2, keys="repeated"),
    Sizes(T=150, H=1, D=8, E=4, keys="runs"),
]
T = 90
POSITIONS = torch.arange(T)
MASKS = {
    "left": torch.stack([POSITIONS >= 70, POSITIONS >= 3]),
    "right": torch.stack([POSITIONS < 66, POSITIONS < 1]),
    "holes": torch.stack([POSITIONS % 3 > 0, (POSITIONS // 20) % 2 == 0]),
    "none": torch.stack([POSITIONS < 0, POSITIONS >= 0]),
}
BORDERS = {
    "short": [0, 1, 2, 33, 40, T],
    "empty": [0, 0, 10, 10, 75, T, T, T],
    "at a chunk": [0, 64, 65, T],
    "masked": [0, 20, 30, 70, T],
}
UNIT = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
GATED = ["gated_delta", "gla", "gsa"]
every_operator = pytest.mark.parametrize("operator", OPERATORS)
both_impls = pytest.mark.parametrize("impl", ["chunkwise", "reference"])


@pytest.mark.parametrize("chunk", [4, 64])
@pytest.mark.parametrize("size", SIZES, ids=str)
@every_operator
def test_every_implementation_is_the_recurrence(operator, size, chunk, monkeypatch):
    """Also with chunks and segments so small that short examples have several of both."""
    if chunk == 4:
        monkeypatch.setattr(chunks, "CHUNK", chunk)
        monkeypatch.setattr(chunks, "CPU_SEGMENT", 24)
    for state, scale in ((False, None), (True, -0.7)):
        tensors = size.tensors(operator, state=state)
        # Neither their layout matters, nor are they changed.
        strided = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in tensors.items()}
        expected = evaluate(truth, operator, tensors, scale=scale)
        assert_exact(evaluate(call, operator, strided, scale=scale, impl="chunkwise"), expected)
        call(operator, strided, scale=scale)
        assert all(torch.equal(x, tensors[name]) for name, x in strided.items())
        if chunk == 64:
            assert_exact(evaluate(call, operator, tensors, scale=scale, impl="reference"), expected)


@pytest.mark.parametrize("dtype", [torch.float32, *UNIT], ids=str)
@every_operator
def test_results_are_rounded_once_and_better_than_plain(operator, dtype):
    size = Sizes(T=300, H=1, G=2, D=16, E=8, keys="close")
    tensors = size.tensors(operator, state=True, dtype=dtype)
    expected = evaluate(truth, operator, widened(tensors))
    ours = evaluate(call, operator, tensors)
    by_hand = evaluate(truth, operator, {name: x.to(dtype) for name, x in tensors.items()})
    multiple, floor = (3, 2e-6) if dtype == torch.float32 else (1, UNIT[dtype])
    assert_as_good_as(ours, by_hand, expected, multiple=multiple, floor=floor)
    for name, x in ours.items():
        state = name in ("out1", "out2") or name.startswith("dstate")
        assert x.dtype == (torch.float32 if state else dtype), name
        if name in ("out0", "dq", "dk", "dv"):
            off = (x.double() - expected[name]).abs()
            allowed = 1.01 * UNIT.get(dtype, 0) * expected[name].abs() + 1e-4 * expected[name].abs().max()
            assert (off <= allowed).all(), f"{name}: {(off - allowed).max():.2e} too far"
    for name in ("out1", "out2"):
        if name in expected:
            torch.testing.assert_close(ours[name].double(), expected[name], rtol=1e-4, atol=1e-5)


@both_impls
@pytest.mark.parametrize("length", [1, 200])
@every_operator
def test_autocast_rounds_the_output_and_nothing_else(operator, length, impl):
    tensors = Sizes(T=length, G=2, D=16, E=8).tensors(operator, state=True, dtype=torch.float32)
    o, *state = call(operator, tensors, impl=impl)
    wide = call(operator, widened(tensors), impl=impl)[0]
    with torch.autocast("cpu", torch.bfloat16):
        narrow, *same = call(operator, tensors, impl=impl)
        mixed = dict(tensors, q=tensors["q"].bfloat16(), v=tensors["v"].bfloat16())
        assert call(operator, mixed, impl=impl)[0].dtype == torch.bfloat16
        assert torch.equal(call(operator, widened(tensors), impl=impl)[0], wide)
    torch.testing.assert_close(narrow, o.bfloat16(), rtol=0, atol=0)
    for a, b in zip(same, state, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def spoilt(tensors: dict[str, torch.Tensor], key_mask: torch.Tensor) -> dict[str, torch.Tensor]:
    hidden = ~key_mask[:, None]
    return {
        name: x if name.startswith("state") else x.masked_fill(hidden if x.ndim == 3 else hidden[..., None], torch.nan)
        for name, x in tensors.items()
    }


@both_impls
@pytest.mark.parametrize("mask", [*MASKS, "one token"])
@every_operator
def test_masked_tokens_are_dropped_whatever_stands_there(operator, mask, impl):
    key_mask = MASKS.get(mask, torch.tensor([[True], [False]]))
    tensors = Sizes(T=key_mask.shape[1], B=2, H=1, G=2, keys="close").tensors(operator, state=True)
    expected = evaluate(truth, operator, tensors, key_mask=key_mask)
    assert_exact(evaluate(call, operator, spoilt(tensors, key_mask), key_mask=key_mask, impl=impl), expected)


@both_impls
@pytest.mark.parametrize("borders", BORDERS)
@every_operator
def test_documents_do_not_see_each_other(operator, borders, impl):
    """Masked: a document begins with a masked token, and one is masked throughout."""
    tensors = Sizes(T=T, G=2, keys="close").tensors(operator)
    options = {"cu_seqlens": torch.tensor(BORDERS[borders], dtype=torch.int32 if impl == "reference" else torch.int64)}
    given = tensors
    if borders == "masked":
        kept = ((POSITIONS >= 30) | (POSITIONS < 20)) & (POSITIONS % 7 > 0) & (POSITIONS != 30) & (POSITIONS < 85)
        options["key_mask"] = kept[None]
        given = spoilt(tensors, kept[None])
    expected = evaluate(truth, operator, tensors, **options)
    assert_exact(evaluate(call, operator, given, **options, impl=impl), expected)


def in_pieces(operator, tensors, *, cuts, **options):
    """The sequence from cut to cut, each piece from the state of the one before."""
    state = {name: x for name, x in tensors.items() if name.startswith("state")}
    names = sorted(state)
    outputs = []
    for start, stop in zip([0, *cuts], [*cuts, tensors["k"].shape[2]], strict=True):
        piece = {name: x[:, :, start:stop] for name, x in tensors.items() if name not in state}
        o, *left = call(operator, piece | state, **options)
        state = dict(zip(names, left, strict=True))
        outputs.append(o)
    return torch.cat(outputs, 2), *state.values()


@pytest.mark.parametrize("cuts", [[1], [64], [63, 64, 65], [40, 41, 129]], ids=str)
@every_operator
def test_pieces_equal_the_whole_with_every_gradient(operator, cuts):
    tensors = Sizes(T=140, H=1, G=2, keys="close").tensors(operator, state=True)
    assert_exact(evaluate(in_pieces, operator, tensors, cuts=cuts), evaluate(call, operator, tensors))


class Written(TorchDispatchMode):
    """Counts the elements that operations write, and the operations."""

    elements = operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            for x in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(x, torch.Tensor):
                    self.elements += x.numel()
            self.operations += 1
        return out


@both_impls
@every_operator
def test_work_grows_linearly_forward_and_backward(operator, impl, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK", 8)
    monkeypatch.setattr(chunks, "CPU_SEGMENT", 32)

    def work(length):
        tensors = Sizes(T=length, H=1, D=4, E=4).tensors(operator)
        with Written() as forward:
            call(operator, tensors, impl=impl)
        with Written() as both:
            evaluate(call, operator, tensors, impl=impl)
        return [forward.elements, forward.operations, both.elements, both.operations]

    assert all(b <= 2.1 * a for a, b in zip(work(96), work(192), strict=True))


@pytest.mark.parametrize(("operator", "operations"), [("delta", 12), ("gated_delta", 14), ("gla", 12), ("gsa", 18)])
def test_decoding_a_token_is_a_few_small_products(operator, operations):
    tensors = Sizes(T=1, G=2, D=8, E=8).tensors(operator, state=True, dtype=torch.float32)
    state = sum(x.numel() for name, x in tensors.items() if name.startswith("state"))
    with torch.no_grad(), Written() as count:
        call(operator, tensors)
    assert count.operations <= operations
    # The state is decayed and written, not copied over and over.
    assert count.elements <= 4 * state


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("strength", [-0.1, 20.0, 1e30], ids=["growth", "strong", "complete"])
@pytest.mark.parametrize("operator", GATED)
def test_decays_of_any_strength(operator, strength, dtype):
    """exp(−Σ log decay) over a chunk would be infinite in every dtype; a log decay above zero is allowed."""
    tensors = Sizes(T=150, H=1, G=2, keys="close").tensors(operator, state=True, dtype=dtype)
    tensors["log_decay"] = -strength * torch.rand_like(tensors["log_decay"])
    expected = evaluate(truth, operator, widened(tensors))
    if dtype == torch.float64:
        assert_exact(evaluate(call, operator, tensors), expected, 1e-9 if strength < 0 else 1e-11)
    else:
        assert_as_good_as(evaluate(call, operator, tensors), evaluate(truth, operator, tensors), expected)


@pytest.mark.parametrize("often", [0.03, 1.0])
@both_impls
@pytest.mark.parametrize("operator", GATED)
def test_complete_forgetting_has_a_gradient(operator, impl, often):
    tensors = Sizes(T=150, H=1, G=2, keys="close").tensors(operator, state=True)
    g = tensors["log_decay"]
    g[torch.rand_like(g) < often] = -torch.inf
    ours, expected = evaluate(call, operator, tensors, impl=impl), evaluate(truth, operator, tensors)
    assert_exact(ours, expected)
    assert (ours["dlog_decay"][g.isinf()] == 0).all()


@pytest.mark.parametrize("operator", GATED)
def test_weak_decay_after_strong_decay_keeps_its_digits(operator):
    """In float32 the sum of the log decays of the first tokens is so large that later ones would drown in it."""
    tensors = Sizes(T=64, H=1, D=4, E=4, decay=0.01).tensors(operator, dtype=torch.float32)
    tensors["log_decay"][:, :, :20] *= 1e5
    expected, plain = evaluate(truth, operator, widened(tensors)), evaluate(truth, operator, tensors)
    assert_as_good_as(evaluate(call, operator, tensors), plain, expected, multiple=2, floor=1e-6)


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("operator", ["delta", "gated_delta"])
def test_write_strengths_at_their_limits(operator, beta):
    """β = 1 projects, β = 2 reflects: the inner system is then as far from the identity as it gets."""
    for keys in ("equal", "repeated", "closest"):
        tensors = Sizes(T=130, H=1, keys=keys).tensors(operator, state=True)
        tensors["beta"] = torch.full_like(tensors["beta"], beta)
        assert_exact(evaluate(call, operator, tensors), evaluate(truth, operator, tensors), 1e-10)


def test_a_repeated_key_reads_what_was_written_last():
    k = F.normalize(shifted_keys(1, 1, 1, 6), dim=-1).repeat(1, 1, 100, 1)
    v = torch.randn(1, 1, 100, 3).double()
    o, state = delta_attention(k, k, v, torch.ones(1, 1, 100).double(), scale=1.0)
    torch.testing.assert_close(o, v, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(k[:, :, :1] @ state, v[:, :, -1:], rtol=1e-12, atol=1e-12)


def test_float32_stays_accurate_over_a_long_sequence_of_repeated_keys():
    """Unit keys and 0 ≤ β ≤ 2 cannot let an error grow: after 64 chunks it is that of the recurrence."""
    k = F.normalize(shifted_keys(1, 1, 30, 16, cosine=0.9), dim=-1)[:, :, torch.randint(30, (4096,))].float()
    q, v, beta = torch.randn(1, 1, 4096, 16), torch.randn(1, 1, 4096, 16), 2 * torch.rand(1, 1, 4096)
    expected, _ = delta_attention(q.double(), k.double(), v.double(), beta.double(), impl="reference")
    plain, _ = delta_attention(q, k, v, beta, impl="reference")
    o, _ = delta_attention(q, k, v, beta)
    assert error(o, expected) <= 3 * error(plain, expected) + 2e-6


def test_a_slot_for_every_token_is_softmax_attention():
    """Tokens written whole to slots of their own; slots not yet written hold zero keys and values, like masked ones."""
    T = 20
    x = Sizes(T=T, D=6, E=3).tensors("gsa")
    s = torch.eye(T, dtype=torch.float64).expand(1, 2, T, T)
    o, (keys, values) = gsa_attention(x["q"], x["k"], x["v"], s, torch.zeros_like(s))
    scores = (x["q"] @ x["k"].mT / 6**0.5).tril()
    torch.testing.assert_close(o, scores.softmax(-1).tril() @ x["v"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(keys.mT, x["k"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(values, x["v"], rtol=1e-12, atol=1e-12)
