"""What holds for every test: fixed seeds, and uninitialised memory full of NaN."""

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

# The same examples in every run: a failure can be seen again, and a run proves what the last one proved.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None, max_examples=30)
settings.load_profile("repeatable")

# The tensors here are small: a second thread gains nothing, and next to another busy process its barriers cost minutes.
torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """The million objects of imported packages and of the tests stay: the garbage collector need not look at them."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan() -> Iterator[None]:
    """What reads a buffer before writing it gives NaN instead of the zeros that fresh memory happens to hold."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.fixture
def dynamo() -> Iterator[Any]:
    """A compiler that remembers no other test."""
    torch._dynamo.reset()
    yield torch._dynamo
    torch._dynamo.reset()


if os.environ.get("TRITON_INTERPRET") == "1":
    from triton_interpreter import install

    install()
