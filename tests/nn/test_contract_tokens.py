"""For every attention: a token sees earlier tokens of its own document, and no padding."""

import pytest
import torch

from .contract import (
    CASES,
    WINDOWED,
    B,
    T,
    alone,
    build,
    every_case,
    every_case_without_window,
    every_name,
    gradients,
    in_chunks,
    inputs,
)

LENGTHS = torch.tensor([[T], [T - 4], [1]])
PADDINGS = {
    "left": torch.arange(T) >= T - LENGTHS,
    "right": torch.arange(T) < LENGTHS,
    # Padding inside a row: only here do counted positions matter, as a shift of a whole row changes nothing.
    "inside": (torch.arange(T) < 3) | (torch.arange(T) >= 3 + torch.tensor([[0], [2], [5]])),
}
every_padding = pytest.mark.parametrize("side", PADDINGS)
every_padded_case = pytest.mark.parametrize(
    ("case", "side"), [(case, side) for case in CASES for side in PADDINGS if side != "inside" or case not in WINDOWED]
)
BORDERS = torch.tensor([0, 4, 5, 5, 11], dtype=torch.int32)
# Positions run on over packed documents, and the float32 angles of a rotary embedding round differently there.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@every_case
def test_future_tokens_do_not_change_the_past(case: str) -> None:
    module, x = build(case), inputs()
    for t in (1, 7, T - 1):
        changed = torch.cat([x[:, :t], -3 * x[:, t:]], 1)
        output, other = module(x)[0], module(changed)[0]
        torch.testing.assert_close(other[:, :t], output[:, :t], rtol=1e-12, atol=1e-12)
        assert (other[:, t:] - output[:, t:]).abs().max() > 0.1


@every_case_without_window
def test_a_token_sees_those_long_before_it(case: str) -> None:
    module, x = build(case), inputs()
    changed = torch.cat([-3 * x[:, :1], x[:, 1:]], 1)
    assert (module(changed)[0] - module(x)[0])[:, -1].abs().max() > 1e-4


@every_case_without_window
@every_padding
def test_a_padded_prompt_may_be_continued_through_the_cache(case: str, side: str) -> None:
    module, x = build(case), inputs(length=T + 4)
    key_mask = torch.cat([PADDINGS[side], torch.tensor([[True] * 4, [True, False, True, True], [True] * 4])], 1)
    expected = alone(module, x, key_mask)
    with torch.no_grad():
        for sizes in ([T, 1, 1, 1, 1], [T, 2, 2]):
            torch.testing.assert_close(in_chunks(module, x, sizes, key_mask)[0][key_mask], expected)
    output, _ = in_chunks(module, x, [3, T - 3, 1, 3], key_mask)
    torch.testing.assert_close(output[key_mask], expected)
    torch.testing.assert_close(gradients(module, output[key_mask]), gradients(module, expected))


@every_padded_case
def test_a_padded_row_equals_its_tokens_alone_even_if_padding_is_nan(case: str, side: str) -> None:
    module, key_mask = build(case), PADDINGS[side]
    x = inputs().masked_fill(~key_mask[..., None], torch.nan).requires_grad_()
    expected = alone(module, x, key_mask)
    for sizes in ([T], [5, 1, T - 6]):
        output, _ = in_chunks(module, x, sizes, key_mask)
        assert output.isfinite().all()
        torch.testing.assert_close(output[key_mask], expected)
        torch.testing.assert_close(gradients(module, output[key_mask]), gradients(module, expected))
        (dx,) = torch.autograd.grad(output.square().sum(), x, retain_graph=True)
        assert dx.isfinite().all()
        assert not dx[~key_mask].any()


@every_name
def test_a_row_of_padding_alone_does_no_harm(name: str) -> None:
    module, x = build(name), inputs()
    key_mask = torch.ones(B, T, dtype=torch.bool)
    key_mask[1] = False
    output, past = module(x, key_mask=key_mask)
    torch.testing.assert_close(output[::2], module(x[::2])[0])
    assert output.isfinite().all()
    assert all(grad.isfinite().all() for grad in gradients(module, output).values())
    # The first tokens of the row may come later.
    later, _ = module(x, past=past, key_mask=torch.cat([key_mask, torch.ones_like(key_mask)], 1))
    torch.testing.assert_close(later[1:2], module(x[1:2])[0])


@every_case
def test_packed_documents_equal_separate_runs(case: str) -> None:
    module, x = build(case), inputs(batch=1)
    output, _ = module(x, cu_seqlens=BORDERS)
    separate = torch.cat([module(document)[0] for document in x.split([4, 1, 6], 1)], 1)
    torch.testing.assert_close(output, separate, **CLOSE)
    torch.testing.assert_close(gradients(module, output), gradients(module, separate), **CLOSE)
    assert (output - module(x)[0]).abs().max() > 0.01


@every_case_without_window
def test_packed_documents_may_have_padding(case: str) -> None:
    module, x = build(case), inputs(batch=1)
    key_mask = torch.ones(1, T, dtype=torch.bool)
    key_mask[0, [0, 3, 7, 8]] = False
    output, _ = module(x.masked_fill(~key_mask[..., None], torch.nan), cu_seqlens=BORDERS, key_mask=key_mask)
    spans = (slice(0, 4), slice(4, 5), slice(5, 11))
    separate = torch.cat([alone(module, x[:, span], key_mask[:, span]) for span in spans])
    torch.testing.assert_close(output[key_mask], separate, **CLOSE)
    torch.testing.assert_close(gradients(module, output[key_mask]), gradients(module, separate), **CLOSE)
