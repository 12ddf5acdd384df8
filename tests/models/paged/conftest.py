"""What holds for the tests of continuous batching."""

from types import SimpleNamespace

import pytest
from transformers.generation.continuous_batching import continuous_api


@pytest.fixture(autouse=True)
def no_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every manager collects garbage twice at its end, which takes longer than these models."""
    monkeypatch.setattr(continuous_api, "gc", SimpleNamespace(collect=lambda: None))
