"""Speculative decoding. The last file: after its drafts have imported Numba, vLLM starts no engine in this process."""

from collections.abc import Callable
from typing import Any

from .test_offline import answers, counter, tokens


def test_rejected_drafts_leave_no_trace(engine: Callable[..., Any], references: dict[str, Any]) -> None:
    """Speculative decoding writes keys and y of drafts, and overwrites those that were rejected."""
    expected = references["llama"]
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    with engine("llama", speculative_config=drafts) as llm:
        assert tokens(answers(llm, expected["prompts"])) == expected["tokens"]
        drafted = counter(llm, "vllm:spec_decode_num_draft_tokens")
        assert 0 <= counter(llm, "vllm:spec_decode_num_accepted_tokens") < drafted
