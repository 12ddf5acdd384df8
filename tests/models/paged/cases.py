"""Continuous batching of tiny models, within bounds: by default it takes most of the memory of the machine."""

from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

NEW = 8
# Of different lengths: less and more than a page, more than a pass takes in, one token alone.
LENGTHS = (12, 5, 40, 1, 17)
Answers = list[list[int]]


def bounds(**changes: Any) -> ContinuousBatchingConfig:
    """64 blocks of 4 tokens, 16 new tokens in a pass: prompts are split, and every past has several pages."""
    return ContinuousBatchingConfig(**({"num_blocks": 64, "page_size": 4, "max_batch_tokens": 16} | changes))


def settings(**changes: Any) -> GenerationConfig:
    return GenerationConfig(**({"do_sample": False, "max_new_tokens": NEW, "eos_token_id": -1} | changes))


def in_batch(model: PreTrainedModel, prompts: Answers, **changes: Any) -> Answers:
    """What continuous batching answers. changes: of `bounds`."""
    made = model.generate_batch(prompts, generation_config=settings(), continuous_batching_config=bounds(**changes))
    assert [one.error for one in made.values()] == [None] * len(prompts)
    return [one.generated_tokens for one in made.values()]


def alone(model: PreTrainedModel, prompts: Answers) -> Answers:
    """What generate() answers to each prompt alone."""
    options = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW}
    rows = [(prompt, torch.tensor([prompt])) for prompt in prompts]
    made = [model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(p) :] for p, ids in rows]
    return [tokens.tolist() for tokens in made]


def result_of(manager: Any, request: str) -> Any:
    """The next result of a request. Results of others that come before it are dropped."""
    while manager.is_running():
        result = manager.get_result(timeout=1)
        if result is not None and result.request_id == request:
            return result
    raise RuntimeError(f"the manager has stopped before {request}")
