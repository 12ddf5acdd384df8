"""The Triton operators inside torch: opcheck, compile, autocast, checkpointing, vmap, FSDP2. In the interpreter."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from lucid_attention import lucid_attention, lucid_decode, precondition
from lucid_attention.ops.lucid import triton_solve
from lucid_attention.ops.lucid.decode import inverse_key_norms
from lucid_attention.ops.lucid.solve_op import precondition_triton_op
from lucid_attention.ops.lucid.system import checked_system

from .cases import Case, call, error, evaluate
from .interpreted_lucid import SMALL


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(triton_solve, "solve_tiles", lambda *shape: SMALL)


KINDS: dict[str, tuple[Case, dict[str, Any]]] = {
    "plain": (Case(T=20, H=1), {}),
    "masked": (Case(T=20, H=1, B=2), {"key_mask": torch.arange(40).view(2, 20) % 9 > 1}),
    "packed": (Case(T=20, H=1), {"cu_seqlens": torch.tensor([0, 3, 20])}),
    "past": (Case(T=9, S=6, H=1), {}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
def test_opcheck_finds_nothing(kind):
    case, options = KINDS[kind]
    tensors = {name: x.requires_grad_() for name, x in case.tensors(torch.float32, beta=True, sharpness=True).items()}
    past = (tensors["k_past"], tensors["y_past"]) if case.S else None
    given = {"beta": tensors["beta"], "sharpness": tensors["sharpness"], "strength": 0.5, **options}
    system = checked_system(tensors["k"], tensors["v"], past=past, **given)
    inputs = tensors["v"], *system.operator_inputs()
    torch.library.opcheck(precondition_triton_op.forward, inputs, rtol=1e-4, atol=1e-5)


@every_kind
def test_a_compiled_call_is_one_graph_and_equals_the_plain_one(kind):
    case, options = KINDS[kind]
    torch._dynamo.reset()
    compiled = torch.compile(lucid_attention, fullgraph=True, backend="aot_eager")
    compiled.__name__ = "lucid_attention"
    tensors = case.tensors(torch.float32, beta=True, sharpness=True)
    weight = torch.randn(case.B, case.H, case.T, case.E)
    ours = evaluate(compiled, tensors, weight, impl="triton", **options)
    plain = evaluate(lucid_attention, tensors, weight, impl="triton", **options)
    assert all(error(ours[name], plain[name]) <= 1e-6 for name in plain)


def test_a_compiled_decoding_step_equals_the_plain_one():
    torch._dynamo.reset()
    tensors = Case(T=20, G=2).tensors(torch.float32)
    k, v = tensors["k"], tensors["v"]
    arguments = tensors["q"][:, :, -1:], k, v[:, :, -1:], v[:, :, :-1], inverse_key_norms(k)
    plain = lucid_decode(*arguments, impl="triton")
    ours = torch.compile(lucid_decode, fullgraph=True, backend="aot_eager")(*arguments, impl="triton")
    assert torch.equal(ours.o, plain.o)
    assert torch.equal(ours.y, plain.y)


def test_autocast_does_not_reach_into_the_solve():
    tensors = Case(T=20, keys="close").tensors(torch.float32)
    plain = call(precondition, tensors, impl="triton")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(call(precondition, tensors, impl="triton"), plain)


def test_checkpointing_gives_the_same_gradients():
    tensors = Case(T=20, H=1).tensors(torch.float32)
    weight = torch.randn(1, 1, 20, 3)

    def kept(k, v):
        return checkpoint(precondition, k, v, impl="triton", use_reentrant=False)

    plain = evaluate(precondition, tensors, weight, impl="triton")
    k, v = (tensors[name].clone().requires_grad_() for name in "kv")
    kept(k, v).backward(weight)
    assert torch.equal(k.grad, plain["dk"])
    assert torch.equal(v.grad, plain["dv"])


def test_vmap_equals_a_loop():
    k, v = torch.randn(3, 1, 1, 9, 5) + 1, torch.randn(3, 1, 1, 9, 3)
    mapped = torch.vmap(lambda k, v: precondition(k, v, impl="triton"))(k, v)
    assert torch.equal(mapped, torch.stack([precondition(*pair, impl="triton") for pair in zip(k, v, strict=True)]))


def test_a_second_derivative_is_refused():
    k, v = (torch.randn(1, 1, 5, 4, requires_grad=True) for _ in range(2))
    (dk,) = torch.autograd.grad(precondition(k, v, impl="triton").sum(), k, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dk.sum().backward()


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(6, 18)

    def forward(self, x):
        q, k, v = self.project(x)[:, None].chunk(3, -1)
        return lucid_attention(q, k, v, impl="triton")[:, 0]


def test_sharded_weights_get_the_gradients_of_whole_ones(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        plain, x = Layer(), torch.randn(2, 9, 6)
        plain(x).square().sum().backward()
        sharded = Layer()
        sharded.load_state_dict(plain.state_dict())
        fully_shard(sharded, mesh=dist.init_device_mesh("cpu", (1,)))
        sharded(x).square().sum().backward()
        assert error(sharded.project.weight.grad.full_tensor(), plain.project.weight.grad) <= 1e-6
    finally:
        dist.destroy_process_group()
