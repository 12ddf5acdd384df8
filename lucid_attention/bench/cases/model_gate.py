"""The correctness gate of whole models: small ones with the true heads against the defining equation in float64."""

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from .. import gate
from . import model_shapes
from .model_shapes import FULL, SLIDING, ModelShape, hidden_states, training_step
from .peers import SDPA

LUCID, STRENGTH_0 = "LUCID", "LUCID of strength 0"
LENGTH, PREFILL, STEPS = 150, 120, 20
PARTS = ("its output", "the gradient of its input", "the gradient of its weights")
TRUTHS = {False: "benchmark_softmax", True: "benchmark_lucid"}


def _true_forward(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, solves: bool, scaling: float, **others: Any
) -> tuple[Tensor, None]:
    """An attention function of Transformers: full attention by its definition, dense, in float64."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    assert q.dtype == torch.float64
    kinds = getattr(module.config, "layer_types", None)
    if kinds is not None and kinds[module.layer_idx] == SLIDING:
        return sdpa_attention_forward(module, q, k, v, mask, scaling=scaling, **others)
    assert abs(scaling * k.shape[-1] ** 0.5 - 1) < 1e-6
    return gate.true_attention(q, k, v, solves).transpose(1, 2).contiguous(), None


def _true_twin(model: Any, solves: bool) -> Any:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(TRUTHS[solves], partial(_true_forward, solves=solves))
    AttentionMaskInterface.register(TRUTHS[solves], sdpa_mask)
    wide = model_shapes.with_softmax(*model.made_from).double()
    wide.load_state_dict(model.state_dict())
    wide.set_attn_implementation(TRUTHS[solves])
    return wide


def _model(shape: ModelShape) -> Any:
    made_from = shape.small(), [SLIDING, FULL] if shape.window else [FULL, FULL]
    model = model_shapes.with_softmax(*made_from)
    model.made_from = made_from
    return model


def _step(model: Any, x: Tensor, dx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A training step, the gradients of all weights in one."""
    o, gradient, *weights = training_step(model, x, dx)
    return o, gradient, torch.cat([weight.flatten() for weight in weights])


@cache
def check_training(shape: ModelShape) -> None:
    """Outputs and all gradients, with and without LUCID; LUCID of strength 0 is the model without."""
    model, where = _model(shape), f"model_training, {shape.name}, small, T={LENGTH}"
    x, dx = (hidden_states(shape.small(), T)[:, :LENGTH] for T in (LENGTH, LENGTH + 1))
    truths = [_step(_true_twin(model, solves), x.double(), dx.double()) for solves in (False, True)]
    gate.check_sharp(where, truths[1][0], truths[0][0], torch.float32)
    softmax = _step(model, x, dx)
    gate.check(where, SDPA, softmax, "the float64 truth", truths[0], PARTS)
    gate.check(where, LUCID, _step(model_shapes.with_lucid(model), x, dx), "the float64 truth", truths[1], PARTS)
    gate.check(where, STRENGTH_0, _step(model_shapes.with_lucid(model, 0.0), x, dx), repr(SDPA), softmax, PARTS)


@cache
def check_decoding(shape: ModelShape) -> None:
    """A prefill and single tokens behind it, from either cache, against the full pass in float64."""
    from transformers import DynamicCache, StaticCache

    model, where = _model(shape), f"model_decode, {shape.name}, small, context {PREFILL}"
    x, end = hidden_states(shape.small(), PREFILL + STEPS), PREFILL + STEPS
    with torch.no_grad():
        truths = [
            _true_twin(model, solves)(inputs_embeds=x.double(), use_cache=False).last_hidden_state
            for solves in (False, True)
        ]
        gate.check_sharp(where, truths[1], truths[0], torch.float32)
        for name, one, truth in ((SDPA, model, truths[0]), (LUCID, model_shapes.with_lucid(model), truths[1])):
            caches = {"dynamic": DynamicCache(config=one.config), "static": StaticCache(one.config, end)}
            for kind, past in caches.items():
                parts = x.split([PREFILL, *[1] * STEPS], 1)
                got = [one(inputs_embeds=part, past_key_values=past).last_hidden_state for part in parts]
                what = (f"its output from a {kind} cache",)
                gate.check(where, name, (torch.cat(got, 1),), "the float64 truth", (truth,), what)
