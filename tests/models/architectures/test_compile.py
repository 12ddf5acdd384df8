"""torch.compile: one graph for every position, with the logits of the plain pass.

Models with sliding windows are left out: Transformers' static cache of a window is traced again for every position,
with any attention. Inductor chooses the same tokens, in 40 s.
"""

import pytest
import torch
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, CompileConfig, StaticCache

from lucid_attention import enable_lucid, set_sharpness, set_strength
from tests.models.architectures.cases import (
    CONFIGURATIONS,
    greedy,
    left_padded,
    lucid_model,
    relative_error,
    sharpen,
    tokens,
)

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Forget graphs of other tests, which count against dynamo's limits."""
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def soft_capped():
    """Gemma 2 without windows: its eager attention function reads the values."""
    config = CONFIGURATIONS["gemma2"]()
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    sharpen(model)
    return enable_lucid(model).eval()


@pytest.mark.parametrize(
    "make", [lambda: lucid_model("llama", center="calibrated", whiten=True), soft_capped], ids=["llama", "gemma2"]
)
@torch.no_grad()
def test_one_graph_decodes_every_position(make):
    model, (ids, mask) = make(), left_padded(tokens(2, 12), [12, 8])
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=counter)
    cache = StaticCache(model.config, max_cache_len=16)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = [model(ids[:, :6], attention_mask=mask[:, :6], position_ids=positions[:, :6], past_key_values=cache).logits]
    whole_mask = torch.nn.functional.pad(mask, (0, 4))
    for t in range(6, 12):
        inputs = {"attention_mask": whole_mask, "position_ids": positions[:, t : t + 1]}
        found.append(compiled(ids[:, t : t + 1], past_key_values=cache, **inputs).logits)
    full = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    seen = mask.bool()
    assert relative_error(torch.cat(found, 1)[seen], full[seen]) < 2e-5
    assert counter.frame_count == 1


@torch.no_grad()
def test_a_prompt_is_compiled_into_an_initialised_static_cache():
    model, (ids, mask) = lucid_model("llama"), left_padded(tokens(2, 12), [12, 7])
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=counter)
    cache = StaticCache(model.config, max_cache_len=16)
    cache.early_initialization(2, 2, 8, torch.float32, torch.device("cpu"))
    with pytest.raises(Unsupported, match=r"call model\.adopt_cache\(cache\)"):
        compiled(ids[:, :4], past_key_values=cache)
    model.model.adopt_cache(cache)
    whole_mask = torch.nn.functional.pad(mask, (0, 4))
    found = [compiled(piece, attention_mask=whole_mask, past_key_values=cache).logits for piece in ids.split(4, 1)]
    full = model(ids, attention_mask=mask, use_cache=False).logits
    seen = mask.bool()
    assert relative_error(torch.cat(found, 1)[seen], full[seen]) < 2e-5
    assert counter.frame_count == 1


@pytest.mark.shows("compiled generation", model="drop-in")
def test_generate_compiles_once_and_chooses_the_same_tokens():
    model, (ids, mask) = lucid_model("llama"), left_padded(tokens(2), [12, 7])
    how = CompileConfig(fullgraph=True, dynamic=False, backend="aot_eager", mode=None)
    how._compile_all_devices = True
    compiled = greedy(model, ids, 5, attention_mask=mask, cache_implementation="static", compile_config=how)
    assert torch.equal(compiled, greedy(model, ids, 5, attention_mask=mask))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.shows("compiled training", model="drop-in")
def test_a_compiled_training_pass_has_the_gradients_of_a_plain_one():
    model, (ids, mask) = lucid_model("qwen3").train(), left_padded(tokens(2), [12, 7])

    def step(run):
        model.zero_grad()
        loss = run(ids, attention_mask=mask, labels=ids, use_cache=False).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    expected = step(model)
    found = step(torch.compile(model, fullgraph=True, backend="eager"))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_a_strength_or_a_sharpness_that_changes_costs_no_graph():
    """They are tensors."""
    model, ids = lucid_model("llama"), tokens(2)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    with torch.no_grad():
        for strength in (0.1, 0.2, 0.3, 0.7):
            set_strength(model, strength)
            set_sharpness(model, 1 + strength)
            inputs = {"attention_mask": torch.ones_like(ids), "use_cache": False}
            torch.testing.assert_close(compiled(ids, **inputs).logits, model(ids, **inputs).logits)
    assert counter.frame_count == 1
