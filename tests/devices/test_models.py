"""Whole models on a pretended GPU: training steps and decoding wait for nothing that this package asks."""

import copy
from typing import Any

import torch
from models.architectures.cases import lucid_model
from models.decoder.cases import decoder
from torch import Tensor
from transformers import DynamicCache, StaticCache

from lucid_attention import ATTENTIONS

from .pretended_cuda import moved, pretended, pretending, real
from .running import names

T, STEPS = 9, 3


def tokens(B: int = 2, length: int = T + STEPS) -> Tensor:
    return torch.randint(1, 40, (B, length), generator=torch.Generator().manual_seed(0))


def training_step(model: Any, ids: Tensor, **inputs: Any) -> list[Tensor]:
    """A forward, a backward and a step of the optimiser, as Trainer does them."""
    model.train()
    model.zero_grad()
    # A large eps: Adam would turn the rounding errors of a gradient that is 0 into whole steps.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-2, foreach=False)
    loss = model(input_ids=ids, labels=ids, **inputs).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
    optimizer.step()
    return [loss.detach(), *(weight.detach() for weight in model.parameters())]


def decoding(model: Any, ids: Tensor, mask: Tensor | None = None, places: int = 0) -> list[Tensor]:
    """A prompt, then single tokens; with a static cache of `places`."""
    model.eval()
    cache = StaticCache(config=model.config, max_cache_len=places) if places else DynamicCache(config=model.config)
    results = []
    with torch.no_grad():
        for start, stop in [(0, T), *((i, i + 1) for i in range(T, T + STEPS))]:
            shown = None if mask is None else mask[:, :stop]
            results.append(model(input_ids=ids[:, start:stop], attention_mask=shown, past_key_values=cache).logits)
    return results


def waits_of(run: Any, model: Any, *tensors: Any, **named: Any) -> list[str]:
    """What `run(model, ...)` waits for. Its results must be those of the CPU."""
    there = moved(copy.deepcopy(model))
    expected = run(model, *tensors, **named)
    with pretending() as waits:
        sent = [pretended(x) if isinstance(x, Tensor) else x for x in tensors]
        found = run(there, *sent, **{k: pretended(x) if isinstance(x, Tensor) else x for k, x in named.items()})
    for here, other in zip(expected, found, strict=True):
        torch.testing.assert_close(real(other), here, rtol=1e-6, atol=1e-8)
    return waits


def ours(waits: list[str]) -> list[str]:
    """Without what Transformers itself waits for: whether positions are packed, and inside its caches and models."""
    theirs = ("masking_utils.py", "cache_utils.py", "lazy_initialization", "return stock.forward(")
    return [wait for wait in waits if not any(name in wait for name in theirs)]


@names(*ATTENTIONS)
def test_the_decoder_trains_and_decodes_without_waiting(name: str):
    model = decoder(name).double()
    assert waits_of(decoding, model, tokens()) == []
    assert waits_of(training_step, model, tokens()) == []


@names("llama", "qwen2", "gemma2", "gpt_neox")
def test_a_model_with_the_drop_in_trains_and_decodes_without_waiting(name: str):
    model = lucid_model(name).double()
    assert ours(waits_of(decoding, model, tokens())) == []
    mask = torch.ones(2, T + STEPS, dtype=torch.long)
    mask[0, :2] = 0
    for shown in (None, mask):
        assert ours(waits_of(decoding, model, tokens(), shown, places=T + STEPS + 1)) == []
    assert ours(waits_of(training_step, model, tokens())) == []
    assert ours(waits_of(training_step, model, tokens(), use_cache=False)) == []


@names("lucid", "lucid_path", "delta", "llama")
def test_a_mask_is_asked_once_for_a_prompt_and_never_for_a_token(name: str):
    """Operators are much faster without a mask, so a prompt is worth the question whether the mask hides anything."""
    built = (lucid_model(name) if name == "llama" else decoder(name)).double()
    mask = torch.ones(2, T + STEPS, dtype=torch.long)
    assert len(waits_of(decoding, built, tokens(), mask)) == 1
    mask[0, :2] = 0
    layers = built.config.num_hidden_layers if name == "lucid_path" else 0
    assert len(waits_of(decoding, built, tokens(), mask)) == 1 + layers
    assert len(ours(waits_of(training_step, built, tokens(), attention_mask=mask))) == 1 + 2 * layers


POSITIONS = torch.cat([torch.arange(4), torch.arange(5), torch.arange(3)])[None]


@names("lucid", "gla", "llama")
def test_packed_documents_are_read_once_for_all_layers(name: str):
    built = (lucid_model(name) if name == "llama" else decoder(name)).double()
    waits = waits_of(training_step, built, tokens(1), position_ids=POSITIONS)
    assert [wait.split(": ")[0] for wait in ours(waits)] == ["copy to the host"], waits


def test_positions_of_one_document_are_read_once_for_all_layers():
    model = lucid_model("llama").double()
    assert len(ours(waits_of(training_step, model, tokens(2), position_ids=torch.arange(T + STEPS)[None]))) == 1


def in_chunks(model: Any, ids: Tensor, places: int) -> list[Tensor]:
    """A prompt in three parts, into a static cache."""
    cache = StaticCache(config=model.config, max_cache_len=places)
    with torch.no_grad():
        return [
            model(input_ids=ids[:, start:stop], past_key_values=cache).logits
            for start, stop in ((0, 5), (5, 9), (9, 12))
        ]


def test_the_waits_that_are_left_are_those_of_the_guide():
    model = lucid_model("llama").double()
    layers = model.config.num_hidden_layers
    # Transformers describes the documents by a function of positions, which has to be tried.
    assert len(ours(waits_of(training_step, model, tokens(1), position_ids=POSITIONS, use_cache=False))) == 5
    dense = torch.ones(1, 1, T + STEPS, T + STEPS, dtype=torch.bool).tril()
    assert len(ours(waits_of(training_step, model, tokens(1), attention_mask=dense))) == layers
    assert len(ours(waits_of(in_chunks, model, tokens(), 14))) == 2 * layers
