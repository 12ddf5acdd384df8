"""Continuous batching gives each request the tokens that generate() gives it alone, with LUCID and not with softmax."""

from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, PreTrainedModel

from lucid_attention import LucidForCausalLM, set_strength
from tests.models.decoder.cases import decoder
from tests.models.decoder.cases import prompts as decoder_prompts
from tests.models.dropin.cases import ARCHITECTURES, lucid_model, softmax_model, tokens
from tests.models.paged.cases import LENGTHS, NEW, alone, bounds, in_batch, result_of, settings

PROMPTS = [tokens(1, length, seed=length)[0].tolist() for length in LENGTHS]
# With a beginning that several requests share, longer than a page.
SHARED = [PROMPTS[0] + prompt for prompt in PROMPTS]
DECODERS: dict[str, dict[str, Any]] = {
    "lucid": {},
    "softmax": {"attention": "softmax"},
    "diff": {"attention": "diff"},
    "mixed": {"attention": ["lucid", "softmax"]},
    "beta": {"attention_options": {"learn_beta": True, "learn_sharpness": True, "sharpness": 3.0}},
    "qk": {"attention_options": {"norm": "qk"}},
    "reference": {"attention_options": {"impl": "reference"}},
}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.shows("continuous batching", model="drop-in")
def test_every_request_gets_its_own_tokens(name: str) -> None:
    model = lucid_model(name)
    expected = alone(model, PROMPTS)
    assert in_batch(model, PROMPTS) == expected
    # A fallback would be noticed.
    assert sum(a != b for a, b in zip(alone(softmax_model(name), PROMPTS), expected, strict=True)) >= 3
    assert model.config._attn_implementation == "lucid"


@pytest.mark.parametrize(("name", "layers"), [("llama", [1]), ("gemma3", [2])])
def test_layers_that_were_not_chosen_keep_values(name: str, layers: list[int]) -> None:
    model = lucid_model(name, layers=layers)
    expected = alone(model, PROMPTS)
    assert in_batch(model, PROMPTS) == expected
    assert alone(lucid_model(name), PROMPTS) != expected
    assert alone(softmax_model(name), PROMPTS) != expected


def test_strength_and_sharpness_hold() -> None:
    model = lucid_model("llama", strength=0.6, sharpness=5.0)
    expected = alone(model, PROMPTS)
    assert in_batch(model, PROMPTS) == expected
    assert alone(lucid_model("llama"), PROMPTS) != expected


@pytest.mark.parametrize("options", DECODERS.values(), ids=DECODERS)
@pytest.mark.shows("continuous batching", model="decoder")
def test_the_decoder_gives_every_request_its_own_tokens(options: dict[str, Any]) -> None:
    model = decoder(**options)
    prompts = [prompt.tolist() for prompt in decoder_prompts(*LENGTHS)]
    assert in_batch(model, prompts) == alone(model, prompts)


def test_the_decoder_with_softmax_says_other_things() -> None:
    prompts = [prompt.tolist() for prompt in decoder_prompts(*LENGTHS)]
    lucid, softmax = decoder(), decoder("softmax")
    softmax.load_state_dict(lucid.state_dict())
    assert all(a != b for a, b in zip(alone(lucid, prompts)[:3], alone(softmax, prompts)[:3], strict=True))


MODELS = {"drop-in": lambda: lucid_model("llama"), "decoder": decoder}
VARIATIONS: dict[str, dict[str, Any]] = {
    "prompts in one pass": {"max_batch_tokens": 512},
    "a shared beginning": {},
    "no sharing": {"allow_block_sharing": False},
    "prefill first": {"scheduler_type": "prefill_first"},
    "blocks run out": {"num_blocks": 18},
}


@pytest.mark.parametrize("made", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("changes", VARIATIONS.values(), ids=VARIATIONS)
def test_the_schedule_changes_nothing(made: Any, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation.continuous_batching.cache import PagedAttentionCache
    from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

    seen = {"shared": 0, "taken away": 0}

    def count(owner: Any, name: str, what: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            seen[what] += bool(result)
            return result

        monkeypatch.setattr(owner, name, counted)

    count(PagedAttentionCache, "search_prefix_match", "shared")
    count(OffloadingManager, "offload_requests", "taken away")
    model = made()
    prompts = [[token % 47 + 1 for token in prompt] for prompt in SHARED]
    assert in_batch(model, prompts, **changes) == alone(model, prompts)
    if "num_blocks" in changes:
        assert seen["taken away"]
    if not changes:
        assert seen["shared"]
    if "allow_block_sharing" in changes:
        assert not seen["shared"]


@pytest.mark.parametrize("made", MODELS.values(), ids=MODELS)
def test_sampled_tokens_have_the_probabilities_of_a_full_pass(made: Any) -> None:
    """The log-probability that the engine gives each sampled token is that of a pass without a cache."""
    model: PreTrainedModel = made()
    prompts = [[token % 47 + 1 for token in prompt] for prompt in SHARED]
    sampled = model.generate_batch(
        prompts,
        generation_config=settings(do_sample=True, temperature=1.0, top_k=0, num_return_sequences=2),
        continuous_batching_config=bounds(return_logprobs=True),
    )
    assert len(sampled) == 2 * len(prompts)
    answers = [one.generated_tokens for one in sampled.values()]
    assert len({tuple(answer) for answer in answers}) == len(answers)
    for one in sampled.values():
        ids = torch.tensor([one.prompt_ids + one.generated_tokens])
        with torch.no_grad():
            logits = model(ids).logits[0, len(one.prompt_ids) - 1 : -1].log_softmax(-1)
        expected = logits.gather(1, ids[0, len(one.prompt_ids) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(one.logprobs), expected, rtol=1e-3, atol=1e-3)


def test_a_cancelled_request_ends_and_the_others_go_on() -> None:
    model = lucid_model("llama")
    with model.continuous_batching_context_manager(
        generation_config=settings(max_new_tokens=150), continuous_batching_config=bounds(num_blocks=256)
    ) as manager:
        gone = manager.add_request(PROMPTS[1], streaming=True)
        result_of(manager, gone)
        kept = manager.add_request(PROMPTS[0], max_new_tokens=NEW)
        manager.cancel_request(gone)
        made = result_of(manager, kept)
        after = result_of(manager, manager.add_request(PROMPTS[2], max_new_tokens=NEW))
        assert not manager.batch_processor.scheduler.active_requests.get(gone)
    assert [made.generated_tokens, after.generated_tokens] == alone(model, [PROMPTS[0], PROMPTS[2]])


@pytest.mark.parametrize("attention", ["delta", "path", "sliding", ["lucid", "gsa"]])
@pytest.mark.shows("continuous batching of attentions with a state", model="decoder", refused=True)
def test_an_attention_with_a_state_is_refused_in_words(attention: Any) -> None:
    model: LucidForCausalLM = decoder(attention)
    name = attention if isinstance(attention, str) else "gsa"
    with pytest.raises(ValueError, match=rf"past of {name} is a state or changes.*Use generate\(\)"):
        in_batch(model, [[1, 2, 3]])


def test_values_of_another_size_are_refused() -> None:
    model = decoder(attention_options={"value_dim": 10})
    with pytest.raises(ValueError, match=r"2 keys and values of size 6: lucid .* values of 20 numbers"):
        in_batch(model, [[1, 2, 3]])


def test_graphs_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be part of a CUDA graph or of a compiled one"):
        in_batch(lucid_model("llama"), [[1, 2, 3]], default_compile_level=1)


def test_a_manager_that_was_kept_does_not_serve_another_attention() -> None:
    model = lucid_model("llama")
    options = {"generation_config": settings(), "persistent_manager": True}
    model.generate_batch(PROMPTS[:1], continuous_batching_config=bounds(), **options)
    try:
        again = model.generate_batch(PROMPTS[:2], continuous_batching_config=bounds(), **options)
        assert [one.generated_tokens for one in again.values()] == alone(model, PROMPTS[:2])
        model.set_attn_implementation("sdpa")
        with pytest.raises(ValueError, match=r"made for attention 'lucid', and the model has 'softmax' now"):
            model.generate_batch(PROMPTS[:1], continuous_batching_config=bounds(), **options)
    finally:
        model.destroy_cached_continuous_batching_manager()


def test_a_strength_that_changes_in_between_fails_the_requests() -> None:
    model = lucid_model("llama")
    with model.continuous_batching_context_manager(
        generation_config=settings(), continuous_batching_config=bounds()
    ) as manager:
        result_of(manager, manager.add_request(PROMPTS[0]))
        set_strength(model, 0.5)
        made = result_of(manager, manager.add_request(PROMPTS[1]))
    assert "cannot continue with {'strength': 0.5" in made.error


def test_softmax_models_are_served_as_before() -> None:
    model = softmax_model("llama")
    lucid_model("llama")
    assert in_batch(model, PROMPTS) == alone(model, PROMPTS)
    assert isinstance(bounds(), ContinuousBatchingConfig)
