"""Attention modules under torch.compile, export and vmap, mostly `LucidAttention`, whose operators are our own."""

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from lucid_attention import LucidAttention

from . import contract
from .contract import HIDDEN, every_name, gradients, inputs


def build(**options: Any) -> LucidAttention:
    torch.manual_seed(0)
    return LucidAttention(HIDDEN, 4, num_kv_heads=2, **options).double()


@pytest.mark.slow
def test_inductor_compiles_it_with_its_gradients(dynamo: Any) -> None:
    module = build(learn_beta=True, learn_sharpness=True)
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    for length in (6, 9):
        x, key_mask = inputs(2, length), torch.arange(length) >= torch.tensor([[0], [2]])
        expected, output = module(x, key_mask=key_mask)[0], compiled(x, key_mask=key_mask)[0]
        torch.testing.assert_close(output, expected)
        # Inductor's graphs reuse the memory of what they saved.
        torch.testing.assert_close(gradients(module, output, retain_graph=False), gradients(module, expected))


@pytest.mark.slow
@every_name
def test_every_attention_compiles_into_one_graph_with_its_gradients(name: str, dynamo: Any) -> None:
    module, x = contract.build(name), inputs()
    key_mask = torch.arange(contract.T) >= torch.tensor([[0], [2], [7]])
    output = torch.compile(module, backend="aot_eager", fullgraph=True)(x, key_mask=key_mask)[0]
    expected = module(x, key_mask=key_mask)[0]
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(gradients(module, output), gradients(module, expected))


@pytest.mark.parametrize("name", ["lucid", pytest.param("gated_delta", marks=pytest.mark.slow)])
def test_a_compiled_decoding_loop_does_not_recompile_for_every_token(name: str, dynamo: Any) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    module, x = contract.build(name), inputs(1, 14)
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    with torch.no_grad():
        full, _ = module(x)
        output, past = module(x[:, :4])
        outputs = [output]
        for token in x[:, 4:].split(1, 1):
            output, past = compiled(token, past=past)
            outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, 1), full)
    # Three graphs: a past without inverse_norms, a past with them, and such a past of any length.
    assert counter.frame_count <= 3


def test_a_compiled_module_follows_a_schedule_of_strengths_in_few_graphs(dynamo: Any) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    module, x = build(learn_sharpness=True), inputs(2, 6)
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for strength in (0, 0.05, 0.5, 0.55, 0.95, 1):
        module.strength = strength
        output, expected = compiled(x)[0], module(x)[0]
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(gradients(module, output), gradients(module, expected))
    # Three graphs: for the first value, for any other, and for 1.
    assert counter.frame_count <= 4


def test_an_exported_program_runs_at_other_lengths() -> None:
    module = build(learn_beta=True, learn_sharpness=True)
    T = torch.export.Dim("T", min=2, max=4096)
    program = torch.export.export(module, (inputs(2, 6),), dynamic_shapes=({1: T},))
    x = inputs(2, 19)
    torch.testing.assert_close(program.module()(x)[0], module(x)[0])
