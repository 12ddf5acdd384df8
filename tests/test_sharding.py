"""A sequence that is split over processes is refused: a shard looks like a short sequence, and P would lack keys."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import (
    _disable_context_parallel_dispatcher,
    _enable_context_parallel_dispatcher,
)

from lucid_attention import ATTENTIONS, LucidAttention, enable_lucid, lucid_attention, precondition
from tests.models.architectures.cases import lucid_model, tokens
from tests.models.decoder.cases import decoder

REFUSED = "the sequence is split over processes"


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def inputs():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 8, 4, generator=generator) for _ in range(3)]


CALLS = {
    "lucid_attention": lambda: lucid_attention(*inputs()),
    "reference": lambda: lucid_attention(*inputs(), impl="reference"),
    "precondition": lambda: precondition(*inputs()[1:]),
    "drop-in": lambda: lucid_model("llama")(tokens()),
    "drop-in with a cache": lambda: lucid_model("llama").generate(tokens(), max_new_tokens=2),
    "decoder": lambda: decoder()(tokens() % 40),
} | {
    f"module {name}": lambda attention=attention: attention(16, 4)(torch.ones(1, 8, 16))
    for name, attention in ATTENTIONS.items()
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.shows("context parallelism", model="drop-in", refused=True)
@pytest.mark.shows("context parallelism", model="decoder", refused=True)
def test_context_parallelism_is_refused(call, mesh):
    call()
    buffer = torch.zeros(1, 8)
    with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1]), pytest.raises(RuntimeError, match=REFUSED):
        call()
    call()


def test_the_newer_form_of_context_parallelism_is_refused(mesh):
    _enable_context_parallel_dispatcher()
    try:
        with pytest.raises(RuntimeError, match=REFUSED):
            CALLS["precondition"]()
    finally:
        _disable_context_parallel_dispatcher()
    CALLS["precondition"]()


def test_a_graph_that_was_made_outside_is_refused_inside(mesh):
    torch.compiler.reset()
    compiled = torch.compile(precondition, backend="eager", fullgraph=True)
    k, v, _ = inputs()
    torch.testing.assert_close(compiled(k, v), precondition(k, v))
    with context_parallel(mesh, buffers=[k, v], buffer_seq_dims=[2, 2]), pytest.raises(RuntimeError, match=REFUSED):
        compiled(k, v)


def test_a_tensor_that_is_sharded_over_its_length_is_refused(mesh):
    for placement, complaint in ((Shard(2), REFUSED), (Replicate(), "sharding strategy")):
        k, v, _ = (DTensor.from_local(x, mesh, [placement]) for x in inputs())
        with pytest.raises((RuntimeError, NotImplementedError), match=complaint):
            precondition(k, v)


def test_another_replacement_of_torchs_attention_is_no_reason(monkeypatch):
    original = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: original(*args, **kwargs))
    CALLS["lucid_attention"]()


def two_processes() -> None:
    """Run by torchrun: two shards of one sequence, and, split by heads, the same heads as in one process."""
    dist.init_process_group("gloo")
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    q, k, v = inputs()
    own = slice(rank, rank + 1)
    heads = lucid_attention(q[:, own], k[:, own], v[:, own])
    torch.testing.assert_close(heads, lucid_attention(q, k, v)[:, own])
    ids, attention, model = tokens(1, 8), LucidAttention(16, 4), enable_lucid(lucid_model("llama"))
    with context_parallel(mesh, buffers=[q, k, v, ids], buffer_seq_dims=[2, 2, 2, 1]):
        assert (k.shape[2], ids.shape[1]) == (4, 4)
        calls = (lambda: lucid_attention(q, k, v), lambda: attention(torch.ones(1, 4, 16)), lambda: model(ids))
        for call in calls:
            with pytest.raises(RuntimeError, match=REFUSED):
                call()
    assert lucid_attention(q, k, v).shape[2] == 8
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_with_one_sequence_are_refused_and_with_half_the_heads_are_right():
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = subprocess.run(
        [*launcher, "-m", "tests.test_sharding"],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]


if __name__ == "__main__":
    two_processes()
