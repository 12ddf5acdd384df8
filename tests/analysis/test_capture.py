"""Watching a forward pass changes nothing, and refuses models that it cannot read."""

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, GptOssConfig, GptOssForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lucid_lab.analysis.capture import visit_layers
from lucid_lab.analysis.hit_rate import Query, hit_rates
from tests.models.decoder.cases import decoder

from .subjects import Plain, layers_of, llama, tokens

MODELS = {"plain": lambda: Plain("lucid", "softmax"), "decoder": decoder, "drop-in": lambda: llama("sdpa")}


class Stop(Exception):
    """From a consumer."""


def state(model: nn.Module) -> list:
    own = [(vars(module).get("attend"), module.training) for module in model.modules()]
    return [dict(ALL_ATTENTION_FUNCTIONS), torch.is_grad_enabled(), own]


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("fails", [False, True], ids=["passes", "raises"])
def test_nothing_is_left_behind(build, fails):
    model = build().train()
    model.get_submodule("").training = True
    before = state(model)
    inside = []

    def consume(layer):
        inside.append((state(model) == before, torch.is_grad_enabled(), any(m.training for m in model.modules())))
        if fails:
            raise Stop

    if fails:
        with pytest.raises(Stop):
            visit_layers(model, tokens(1, 9), consume)
    else:
        visit_layers(model, tokens(1, 9), consume)
    assert set(inside) == {(False, False, False)}
    assert state(model) == before


def test_only_the_layers_that_were_asked_for_are_shown_under_their_own_numbers():
    names = visit_layers(llama("sdpa"), tokens(1, 9), lambda layer: None)
    assert names == ["softmax"] * 3
    assert [layer.index for layer in layers_of(llama("sdpa"), tokens(1, 9), layers=[2, 0])] == [0, 2]
    assert [layer.index for layer in layers_of(Plain("lucid", "softmax", "path"), tokens(1, 9), layers=[1])] == [1]
    for model in (llama("sdpa"), Plain("lucid", "softmax", "path")):
        with pytest.raises(ValueError, match="layers must be 0 to 2, of this model, got 3"):
            layers_of(model, tokens(1, 9), layers=[0, 3])


@pytest.mark.parametrize("name", ["delta", "gated_delta", "gla", "gsa"])
def test_attention_without_a_softmax_is_refused_with_its_layer_and_name(name):
    model = Plain("softmax", name)
    with pytest.raises(ValueError, match=f"layer 1 has attention '{name}', which has no softmax"):
        layers_of(model, tokens(1, 9))
    assert [layer.attention for layer in layers_of(model, tokens(1, 9), layers=[0])] == ["softmax"]


def test_models_without_attention_that_can_be_seen_are_refused():
    with pytest.raises(ValueError, match="Linear has no attention that could be analysed"):
        visit_layers(nn.Linear(3, 3), torch.ones(1, 3), lambda layer: None)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    with pytest.raises(ValueError, match="is not causal: expected a decoder"):
        visit_layers(BertModel(BertConfig(vocab_size=48, **sizes)), tokens(1, 9), lambda layer: None)


def test_sinks_are_no_weights_of_ours_but_keys_can_be_looked_at():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"intermediate_size": 16, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
    model = GptOssForCausalLM._from_config(
        GptOssConfig(vocab_size=48, **sizes, **more, layer_types=["full_attention"]), attn_implementation="eager"
    )
    (layer,) = layers_of(model, tokens(1, 9))
    head = next(layer.heads())
    assert head.P.dense().shape == (9, 9)
    with pytest.raises(ValueError, match="layer 0 has no weights to show: its softmax has sinks"):
        head.weights(torch.tensor([3]))


def test_a_cache_is_refused():
    model = decoder()
    past = model(tokens(1, 4), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="layer 0 got a cache"):
        hit_rates(model, {"input_ids": tokens(1, 5), "past_key_values": past}, [Query(4, ((0, 1),))])
