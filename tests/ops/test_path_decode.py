"""Decoding lazily: token by token, with flushes now and then, equals the full pass."""

import pytest
import torch

from lucid_attention.ops.lucid.decode import inverse_key_norms
from lucid_attention.ops.path import decode
from lucid_attention.ops.path.decode import apply_factors, identity_factors, keys_at_end, path_decode
from lucid_attention.ops.softmax import one_token

from .cases import error
from .path_cases import PathCase, call, strengths, tokens

FLUSHES = {
    "never": set(),
    "every token": set(range(200)),
    "now and then": {3, 4, 11, 40},
    "every 7": set(range(0, 200, 7)),
}


class Cache:
    """What a caller keeps, and how."""

    def __init__(self, k, v, prefill=None, lucid=True):
        self.keys, self.values = k[:, :, :0], v[:, :, :0]
        self.inverse_norms = inverse_key_norms(k[:, :, :1])[:, :, :0]
        self.none = self.product = identity_factors(k)
        self.pending, self.lucid = 0, lucid
        if prefill is not None:
            self.keys, self.values, self.inverse_norms = prefill
            self.pending = self.keys.shape[2]

    def step(self, q, k, v, w, beta, key_mask=None, **options):
        self.inverse_norms = torch.cat([self.inverse_norms, inverse_key_norms(k)], 2)
        keys = torch.cat([self.keys, k], 2)
        inverse_norms = self.inverse_norms if self.lucid else None
        args = q, keys, v, w, beta, self.values, self.product, self.pending
        step = path_decode(*args, inverse_norms=inverse_norms, key_mask=key_mask, **options)
        assert step.live.shape[2] == keys.shape[2] - self.pending
        keys[:, :, self.pending :] = step.live
        self.keys, self.product = keys, step.product
        self.values = torch.cat([self.values, step.y], 2)
        return step.o

    def flush(self):
        waiting = apply_factors(self.keys[:, :, : self.pending], self.product) if self.pending else self.keys[:, :, :0]
        self.keys = torch.cat([waiting, self.keys[:, :, self.pending :]], 2)
        self.product, self.pending = self.none, self.keys.shape[2]


def generate(operator, tensors, flushes, prompt=0, key_mask=None, **options):
    """(o, y) of all tokens behind a prompt, and the cache at the end."""
    k, v, T = tensors["k"], tensors["v"], tensors["k"].shape[2]
    prefill, sharpness = None, tensors.get("sharpness", options.pop("sharpness", None))
    if prompt:
        first = tokens({n: tensors[n] for n in ("q", "k", "v", "w", "beta")}, slice(0, prompt))
        mask = None if key_mask is None else key_mask[:, :prompt]
        y = first["v"]
        if operator == "lucid_path":
            y = call("precondition", first, key_mask=mask, sharpness=sharpness)
        elif mask is not None:
            y = y.masked_fill(~mask[:, None, :, None], 0)
        prefill = keys_at_end(first["k"], first["w"], first["beta"], key_mask=mask), y, inverse_key_norms(first["k"])
    cache = Cache(k, v, prefill, operator == "lucid_path")
    if operator == "lucid_path":
        options["sharpness"] = sharpness
    outputs = []
    for t in range(prompt, T):
        if t in flushes:
            cache.flush()
        new = (tensors[name][:, :, t : t + 1] for name in ("q", "k", "v", "w", "beta"))
        outputs.append(cache.step(*new, key_mask=None if key_mask is None else key_mask[:, : t + 1], **options))
    return torch.cat(outputs, 2), cache


@pytest.mark.parametrize("flushes", FLUSHES.values(), ids=FLUSHES)
@pytest.mark.parametrize("prompt", [0, 1, 40])
@pytest.mark.parametrize("operator", ["path", "lucid_path"])
def test_a_generation_is_the_full_pass(operator, prompt, flushes, monkeypatch):
    """With zero keys among the others; where scores are many, weights come from torch's softmax."""
    if prompt == 1:
        monkeypatch.setattr(one_token, "CACHED_SCORES", 0)
    tensors = PathCase(T=60, B=2, G=2, D=4, beta="edges").tensors(operator, sharpness=True)
    tensors["beta"] = torch.where(torch.rand_like(tensors["beta"]) < 0.5, strengths("small", 2, 2, 60), tensors["beta"])
    tensors["k"][:, :, [0, 20, 42, 59]] = 0
    o, cache = generate(operator, tensors, flushes, prompt)
    assert error(o, call(operator, tensors)[:, :, prompt:]) < 1e-12
    y = tensors["v"] if operator == "path" else call("precondition", tensors)
    assert error(cache.values, y) < 1e-12
    cache.flush()
    assert error(cache.keys, keys_at_end(tensors["k"], tensors["w"], tensors["beta"])) < 1e-12


@pytest.mark.parametrize("operator", ["path", "lucid_path"])
@pytest.mark.parametrize("options", [{"scale": -0.3}, {"scale": 0.0}, {"sharpness": 0.4}, {"sharpness": 60.0}], ids=str)
def test_scale_and_sharpness_are_those_of_the_full_pass(options, operator):
    if operator == "path" and "sharpness" in options:
        options = {"scale": 3}
    tensors = PathCase(T=20, B=2, G=3, D=4, keys="close", beta="small").tensors(operator)
    o, _ = generate(operator, tensors, {9}, 5, **options)
    assert error(o, call(operator, tensors, **options)[:, :, 5:]) < 1e-12


@pytest.mark.parametrize("operator", ["path", "lucid_path"])
def test_masks_of_every_kind_leave_the_step(operator):
    tensors = PathCase(T=40, B=6, G=2, D=4, beta="small").tensors(operator)
    key_mask = torch.ones(6, 40, dtype=torch.bool)
    key_mask[1, :10] = False  # left
    key_mask[2, 5:20] = False  # middle
    key_mask[3, 30:] = False  # the new tokens themselves
    key_mask[4, :39] = False  # everything but the last token
    key_mask[5] = False  # everything
    for prompt in (0, 25):
        o, cache = generate(operator, tensors, {27, 33}, prompt, key_mask)
        assert error(o, call(operator, tensors, key_mask=key_mask)[:, :, prompt:]) < 1e-12
        assert (o[5] == 0).all()
        keys = keys_at_end(tensors["k"], tensors["w"], tensors["beta"], key_mask=key_mask)
        cache.flush()
        assert error(cache.keys, keys) < 1e-12
        if operator == "lucid_path":
            assert (cache.values[~key_mask[:, None].expand(6, 2, 40)] == 0).all()


@pytest.mark.parametrize("filling", [float("nan"), float("inf")])
@pytest.mark.parametrize("operator", ["path", "lucid_path"])
def test_a_masked_new_token_may_hold_anything(operator, filling):
    tensors = PathCase(T=20, B=2, G=2, D=4).tensors(operator)
    key_mask = torch.ones(2, 20, dtype=torch.bool)
    key_mask[0, [3, 15, 19]] = False
    key_mask[1, :13] = False
    clean, _ = generate(operator, tensors, {12}, 10, key_mask)
    for x in tensors.values():
        x[~key_mask[:, None].expand(x.shape[:3])] = filling
    if operator == "path":  # LUCID's values are cleaned when they are stored; a caller's own are the caller's
        tensors["v"].masked_fill_(~key_mask[:, None, :, None] & (torch.arange(20) < 10)[:, None], 0)
    o, cache = generate(operator, tensors, {12}, 10, key_mask)
    torch.testing.assert_close(o, clean)
    assert cache.keys.isfinite().all()
    assert cache.values.isfinite().all()


@pytest.mark.parametrize("operator", ["path", "lucid_path"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 3e-6), (torch.bfloat16, 4 * 2**-8), (torch.float16, 4 * 2**-11)],
    ids=["float32", "bfloat16", "float16"],
)
def test_a_cache_of_any_dtype_is_read_in_at_least_float32(dtype, tolerance, operator):
    """One step against float64 on the same rounded cache, with factors pending and in float32."""
    S, pending = 1500, 1440
    tensors = PathCase(T=S + 1, B=2, G=2, D=16, E=8, keys="close").tensors("lucid_path", dtype)
    k, v, q = tensors["k"], tensors["v"], tensors["q"][:, :, -1:]
    w, beta = (tensors[name][:, :, -1:].float() for name in ("w", "beta"))
    product = torch.linalg.qr(torch.randn(2, 2, 16, 16))[0]
    inverse_norms = inverse_key_norms(k) if operator == "lucid_path" else None
    args = q, k, v[:, :, -1:], w, beta, v[:, :, :-1], product
    step = path_decode(*args, pending, inverse_norms=inverse_norms)
    assert step.o.dtype == step.y.dtype == dtype
    # Kept wide: a 16-bit cache would round them anew with every token.
    assert step.live.dtype == step.product.dtype == torch.float32
    assert identity_factors(k).dtype == torch.float32
    assert apply_factors(k, product).dtype == dtype
    wide = [x.double() for x in args]
    expected = path_decode(*wide, pending, inverse_norms=None if inverse_norms is None else inverse_key_norms(wide[1]))
    for name in ("o", "y", "live", "product"):
        assert error(getattr(step, name), getattr(expected, name)) <= tolerance, name
    with torch.autocast("cpu", torch.bfloat16):
        again = path_decode(*args, pending, inverse_norms=inverse_norms)
    for a, b in zip(again, step, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def strided(x):
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def beginning(x):
    """The filled part of a longer buffer."""
    return torch.cat([x, torch.full_like(x, float("nan"))], 2)[:, :, : x.shape[2]]


@pytest.mark.parametrize(
    "layout", [strided, beginning, lambda x: x[:1].expand(x.shape)], ids=["strided", "beginning", "expanded"]
)
def test_the_layout_of_an_input_does_not_matter_and_inputs_stay_as_they_are(layout):
    tensors = PathCase(T=30, B=3, G=2, D=4).tensors("lucid_path")
    inputs = {name: tensors[name][:, :, -1:] for name in ("q", "v", "w", "beta")}
    inputs |= {"k": tensors["k"], "y_past": tensors["v"][:, :, :-1], "inverse_norms": inverse_key_norms(tensors["k"])}
    inputs["product"] = torch.randn(3, 2, 4, 4).double()
    inputs = {name: layout(x).requires_grad_() for name, x in inputs.items()}
    before = {name: x.detach().clone() for name, x in inputs.items()}
    expected = path_decode(**before, pending=20)
    step = path_decode(**inputs, pending=20)
    for a, b in zip(step, expected, strict=True):
        torch.testing.assert_close(a, b)
        assert not a.requires_grad
    for name, x in inputs.items():
        torch.testing.assert_close(x.detach(), before[name], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pieces", [3, 1024])
def test_keys_are_moved_in_place_or_beside_in_pieces_of_any_size(pieces, dtype, monkeypatch):
    monkeypatch.setattr(decode, "KEYS_AT_ONCE", pieces)
    k, product = (
        torch.randn(2, 2, 20, 4).to(dtype),
        torch.randn(2, 2, 4, 4).to(identity_factors(torch.ones(1, 1, 1, 1, dtype=dtype))),
    )
    expected = torch.einsum("bhnd,bhed->bhne", k.double(), product.double()).to(dtype)
    beside = apply_factors(k, product)
    torch.testing.assert_close(beside, expected)
    buffer = torch.full((2, 2, 30, 4), 7.0, dtype=dtype)
    buffer[:, :, :20] = k
    cache = buffer[:, :, :20]
    assert apply_factors(cache, product, out=cache) is cache
    torch.testing.assert_close(cache, beside, rtol=0, atol=0)
    assert (buffer[:, :, 20:] == 7).all()
