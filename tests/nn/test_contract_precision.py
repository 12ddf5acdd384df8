"""For every attention: 16-bit runs are as exact as rounding their weights and inputs would make any run.

How much a rounding error grows on its way to the output, or to a gradient where large terms cancel, is a property of
the attention and its weights. So it is measured: the module in float32, weights and inputs off by up to one rounding.
"""

import copy

import pytest
import torch
from torch import Tensor

from lucid_attention.nn.causal import CausalAttention

from .contract import build, every_case, gradients, in_chunks, inputs

ROUNDING = 2.0**-8
Results = dict[str, Tensor]


def results(module: CausalAttention, x: Tensor) -> Results:
    output, _ = module(x)
    return {"output": output.detach(), **gradients(module, output)}


def relative(x: Tensor, truth: Tensor) -> float:
    return ((x.double() - truth.double()).norm() / truth.double().norm()).item()


def shaken(module: CausalAttention, x: Tensor) -> list[Results]:
    """What becomes of weights and inputs that are off by up to one rounding of bfloat16."""

    def shake(each: Tensor) -> Tensor:
        return each * (1 + ROUNDING * (2 * torch.rand_like(each) - 1))

    torch.manual_seed(7)
    found = []
    for _ in range(4):
        other = copy.deepcopy(module)
        for parameter in other.parameters():
            parameter.data = shake(parameter.data)
        found.append(results(other, shake(x)))
    return found


def assert_as_good_as_rounding(ours: Results, truth: Results, others: list[Results]) -> None:
    assert ours.keys() == truth.keys()
    for name, expected in truth.items():
        # Measured over five inputs: at most 1.7 for all but one weight of a convolution, with 3.3.
        allowed = 4 * (max(relative(other[name], expected) for other in others) + ROUNDING)
        assert relative(ours[name], expected) < allowed, name


@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_errors_of_16_bits_are_those_of_rounded_weights_and_inputs(case: str, dtype: torch.dtype) -> None:
    """float16 rounds eight times finer; it must not overflow."""
    narrow, x = build(case).to(dtype), inputs().to(dtype)
    wide = copy.deepcopy(narrow).float()
    truth, others = results(wide, x.float()), shaken(wide, x.float())
    ours = results(narrow, x)
    assert all(each.dtype == dtype and each.isfinite().all() for each in ours.values())
    assert_as_good_as_rounding(ours, truth, others)
    with torch.no_grad():
        steps = {"output": in_chunks(narrow, x, [6, 1, 3, 1])[0]}
    assert_as_good_as_rounding(steps, {"output": truth["output"]}, others)


@every_case
def test_autocast_narrows_the_output_and_not_the_gradients(case: str) -> None:
    module, x = build(case).float(), inputs().float()
    truth, others = results(module, x), shaken(module, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = module(x)
        with torch.no_grad():
            steps = {"output": in_chunks(module, x, [6, 1, 3, 1])[0]}
    assert output.dtype == steps["output"].dtype == torch.bfloat16
    grads = gradients(module, output.float())
    assert all(grad.dtype == torch.float32 for grad in grads.values())
    assert_as_good_as_rounding({"output": output.detach(), **grads}, truth, others)
    assert_as_good_as_rounding(steps, {"output": truth["output"]}, others)
