"""Offline: `LLM.generate` chooses the tokens of this package's own generate()."""

from collections.abc import Callable
from typing import Any

import pytest
from vllm import SamplingParams

from lucid_attention.vllm.backend import LucidImpl

# The layers with LUCID of every checkpoint of references.py.
LAYERS = {
    "llama": [0, 1, 2],
    "qwen2": [0, 1, 2],
    "qwen3": [0, 2],
    "mistral": [0, 1, 2],
    "gemma3": [1, 2],
    "decoder": [0, 1, 2],
    "decoder_mixed": [0, 2],
}


def answers(llm: Any, prompts: list[list[int]], new: int = 12, **options: Any) -> list[Any]:
    """All prompts at once."""
    sampling = SamplingParams(**{"temperature": 0, "max_tokens": new, **options})
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def counter(llm: Any, name: str) -> int:
    return next(metric.value for metric in llm.get_metrics() if metric.name == name)


def lucid_layers(llm: Any) -> list[int]:
    """The layers whose attention is LUCID, in the model that vLLM runs."""
    model = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model
    found = [isinstance(layer.self_attn.attn.impl, LucidImpl) for layer in model.model.layers]
    return [index for index, is_lucid in enumerate(found) if is_lucid]


@pytest.mark.parametrize("name", LAYERS)
def test_the_tokens_are_those_of_generate(name: str, engine: Callable[..., Any], references: dict[str, Any]) -> None:
    """Twelve requests at once, in chunks, with shared prefixes, for every architecture and kind of setting."""
    expected = references[name]
    with engine(name) as llm:
        assert tokens(answers(llm, expected["prompts"])) == expected["tokens"]
        assert lucid_layers(llm) == LAYERS[name]
    assert sum(a != b for a, b in zip(expected["tokens"], expected["softmax"], strict=True)) >= 6


def test_a_plain_model_keeps_softmax_attention(engine: Callable[..., Any], references: dict[str, Any]) -> None:
    with engine("plain") as llm:
        assert tokens(answers(llm, references["llama"]["prompts"])) == references["llama"]["softmax"]
        assert lucid_layers(llm) == []


def test_a_found_prefix_gives_the_same_tokens(engine: Callable[..., Any], references: dict[str, Any]) -> None:
    expected = references["llama"]
    with engine("llama", enable_prefix_caching=True) as llm:
        first, second = answers(llm, expected["prompts"]), answers(llm, expected["prompts"])
        assert tokens(first) == tokens(second) == expected["tokens"]
        assert sum(output.num_cached_tokens for output in second) >= 400
        # A fork: two answers share the blocks of their prompt. vLLM has it for sampling alone.
        forked = answers(llm, expected["prompts"][6:7], n=2, temperature=1, top_k=1)[0].outputs
        assert [list(each.token_ids) for each in forked] == [expected["tokens"][6]] * 2


def test_without_prefix_caching_the_tokens_are_the_same(engine: Callable[..., Any], references: dict[str, Any]) -> None:
    expected = references["llama"]
    with engine("llama", enable_prefix_caching=False) as llm:
        outputs = [*answers(llm, expected["prompts"]), *answers(llm, expected["prompts"])]
        assert tokens(outputs) == expected["tokens"] * 2
        assert not any(output.num_cached_tokens for output in outputs)


@pytest.mark.parametrize(("name", "blocks"), [("llama", 10), ("gemma3", 16)])
def test_preempted_requests_give_the_same_tokens(
    name: str, blocks: int, engine: Callable[..., Any], references: dict[str, Any]
) -> None:
    """A request of 162 tokens needs 6 blocks in every group of layers. Gemma's windows are a second group."""
    expected = references[name]
    long = [index for index, prompt in enumerate(expected["prompts"]) if len(prompt) > 50]
    prompts = [expected["prompts"][index] for index in long]
    options = {"num_gpu_blocks_override": blocks, "max_model_len": 192, "enable_prefix_caching": False}
    with engine(name, **options) as llm:
        assert tokens(answers(llm, prompts)) == [expected["tokens"][index] for index in long]
        assert counter(llm, "vllm:num_preemptions") > 0


def test_a_model_in_bfloat16_answers(engine: Callable[..., Any], references: dict[str, Any]) -> None:
    """No tokens to compare with: rounding chooses others."""
    with engine("llama", dtype="bfloat16") as llm:
        found = tokens(answers(llm, references["llama"]["prompts"]))
    assert [len(each) for each in found] == [12] * len(found)
