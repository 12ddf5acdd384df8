"""For every attention: all weights are trained, saved and loaded, at any sizes."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from lucid_attention.nn.causal import CausalAttention

from .contract import ATTENTIONS, CASES, GROUPED, HIDDEN, build, every_case, every_name, gradients, in_chunks, inputs


@every_case
def test_gradients_reach_every_parameter_and_are_finite(case: str) -> None:
    module = build(case)
    module(inputs())[0].square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert (parameter.grad != 0).any(), name


@every_name
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    module, x = build(name), inputs(1, 5).requires_grad_()
    names, values = zip(*module.named_parameters(), strict=True)

    def output(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), (x,))[0]

    arguments = (x, *(value.detach().requires_grad_() for value in values))
    assert torch.autograd.gradcheck(output, arguments, fast_mode=True, rtol=1e-4, atol=1e-6)


SHAPES: dict[str, dict[str, Any]] = {
    "two heads": {"num_heads": 2, "num_kv_heads": 2},
    "one pair of kv heads": {"num_heads": 6, "num_kv_heads": 2},
    "wide heads": {"head_dim": 10},
    "odd heads": {"head_dim": 5, "rope_base": None},
    "heads of one": {"head_dim": 1, "rope_base": None},
    "biases": {"bias": True},
    "narrow values": {"value_dim": 3},
    "wide values": {"value_dim": 9},
}


# In differential attention a value has the size of two keys by definition.
@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, shape) for name in ATTENTIONS for shape in SHAPES if name != "diff" or "values" not in shape],
)
def test_any_sizes_will_do(name: str, shape: str) -> None:
    module, x = build(name, **SHAPES[shape]), inputs()
    if "value_dim" in SHAPES[shape]:
        assert module.o_proj.in_features == 2 * module.v_proj.out_features == 4 * SHAPES[shape]["value_dim"]
    full, _ = module(x)
    output, _ = in_chunks(module, x, [4, 1, 6])
    assert full.shape == x.shape
    assert full.isfinite().all()
    torch.testing.assert_close(output, full)
    torch.testing.assert_close(gradients(module, output), gradients(module, full))
    torch.testing.assert_close(module(x[:, :1])[0], full[:, :1])


@every_case
def test_saved_weights_load_into_a_module_built_on_the_meta_device(case: str) -> None:
    module, x = build(case).float(), inputs().float()
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    name, settings = CASES[case]
    with torch.device("meta"):
        other = ATTENTIONS[name](HIDDEN, **(GROUPED | settings))
    other = other.to_empty(device="cpu")
    other.load_state_dict(torch.load(file, weights_only=True))
    torch.testing.assert_close(other(x)[0], module(x)[0], rtol=0, atol=0)


@every_case
def test_copies_and_pickles_behave_the_same_and_share_nothing(case: str) -> None:
    module, x = build(case), inputs()
    expected, _ = module(x)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(other(x)[0], expected, rtol=0, atol=0)
        for parameter in other.parameters():
            parameter.data.zero_()
        torch.testing.assert_close(module(x)[0], expected, rtol=0, atol=0)


@every_name
def test_the_weights_have_the_names_of_llama(name: str) -> None:
    module = ATTENTIONS[name](HIDDEN, **GROUPED)
    assert isinstance(module, CausalAttention)
    assert {f"{letter}_proj.weight" for letter in "qkvo"} <= set(module.state_dict())
    biases = {key for key in ATTENTIONS[name](HIDDEN, **GROUPED, bias=True).state_dict() if key.endswith("bias")}
    assert {f"{letter}_proj.bias" for letter in "qkvo"} <= biases


@every_name
def test_a_misspelt_option_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match="num_key_heads"):
        ATTENTIONS[name](HIDDEN, 4, num_key_heads=2)
    with pytest.raises(ValueError, match=r"multiple of num_kv_heads: got 4 and 3"):
        ATTENTIONS[name](HIDDEN, 4, num_kv_heads=3)
    with pytest.raises(ValueError, match=r"head_dim must be a positive integer, got 0"):
        ATTENTIONS[name](HIDDEN, 4, head_dim=0)


@every_name
def test_recomputed_activations_give_the_same_gradients(name: str) -> None:
    module, x = build(name), inputs(2, 7)
    output = torch.utils.checkpoint.checkpoint(lambda each: module(each)[0], x, use_reentrant=False)
    torch.testing.assert_close(gradients(module, output), gradients(module, module(x)[0]))


@every_name
def test_a_long_sequence_of_equal_tokens_stays_finite(name: str) -> None:
    """The hardest keys for every memory: all equal."""
    module = build(name).float()
    output, _ = module(inputs(1, 1).float().expand(1, 300, HIDDEN))
    assert output.isfinite().all()
    assert all(grad.isfinite().all() for grad in gradients(module, output).values())
