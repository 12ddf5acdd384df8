"""The bridge to flash-linear-attention, as far as it can be tested without a GPU.

Its kernels' signatures are read from the installed files, and its naive code stands in for the kernels: what is tested
is that arguments arrive under the right names and in the right layout, and that results come back in ours. That the
kernels compute the same is not tested here.
"""

import ast
import importlib.util
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lucid_attention.ops.linear import fla

from .cases import assert_exact
from .linear_cases import OPERATORS, Sizes, call, evaluate
from .test_outside_witnesses import naive

KERNELS = {
    "delta": ("delta_rule", "chunk_delta_rule", {"beta"}),
    "gated_delta": ("gated_delta_rule", "chunk_gated_delta_rule", {"beta", "g"}),
    "gla": ("gla", "chunk_gla", {"g"}),
    "gsa": ("gsa", "chunk_gsa", {"s", "g"}),
}
COMMON = {"q", "k", "v", "scale", "initial_state", "output_final_state", "cu_seqlens"}


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_installed_kernels_take_what_the_bridge_gives(operator, monkeypatch):
    module, name, own = KERNELS[operator]
    given = stand_in(operator, monkeypatch)
    call(operator, Sizes(T=5).tensors(operator, state=True, dtype=torch.bfloat16), impl="fla")
    assert given[0].keys() == COMMON | own
    folder = Path(importlib.util.find_spec("fla").submodule_search_locations[0], "ops", module)
    functions = [
        node
        for node in ast.walk(ast.parse((folder / "chunk.py").read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    assert len(functions) == 1
    parameters = functions[0].args
    names = {argument.arg for argument in (*parameters.args, *parameters.kwonlyargs)}
    assert names >= COMMON | own
    required = {argument.arg for argument in parameters.args[: len(parameters.args) - len(parameters.defaults)]}
    assert required <= COMMON | own
    assert f"import {name}" in (folder / "__init__.py").read_text()


def their_naive(operator: str, q: torch.Tensor, initial_state: Any, scale: float, **x: torch.Tensor) -> Any:
    """Their naive code in the layout of their kernels, [B, T, H, D]."""
    module = naive(KERNELS[operator][0])
    state = {"initial_state": initial_state, "output_final_state": True}
    if operator == "gated_delta":
        return module.naive_recurrent_gated_delta_rule(q, **x, scale=scale, **state)
    if operator == "gsa":
        return module.naive_recurrent_gsa(q, **x, scale=scale, **state)
    # These two know only their default scale.
    q = q * scale * q.shape[-1] ** 0.5
    if operator == "gla":
        return module.naive_recurrent_gla(q, x["k"], x["v"], x["g"], **state)
    o, final = module.delta_rule_recurrence(*(y.transpose(1, 2) for y in (q, x["k"], x["v"], x["beta"])), **state)
    return o.transpose(1, 2), final


def stand_in(operator: str, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Put their naive code in place of their kernel; return the arguments of its calls."""
    given = []

    def kernel(*, cu_seqlens: torch.Tensor | None, output_final_state: bool, **arguments: Any) -> Any:
        given.append(arguments | {"cu_seqlens": cu_seqlens, "output_final_state": output_final_state})
        assert output_final_state
        if cu_seqlens is None:
            return their_naive(operator, **arguments)
        assert (cu_seqlens.diff() > 0).all()
        outputs, states = [], []
        for start, stop in pairwise(cu_seqlens.tolist()):
            document = {name: x[:, start:stop] if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
            o, state = their_naive(operator, **document)
            outputs.append(o)
            states.append(state if isinstance(state, tuple) else (state,))
        final = [torch.cat(parts) for parts in zip(*states, strict=True)]
        return torch.cat(outputs, 1), final if operator == "gsa" else final[0]

    module, name, _ = KERNELS[operator]
    fake = ModuleType(f"fla.ops.{module}")
    setattr(fake, name, kernel)
    monkeypatch.setitem(sys.modules, f"fla.ops.{module}", fake)
    monkeypatch.setattr(fla, "refuse_what_cannot_run", lambda k: None)
    return given


OPTIONS: dict[str, tuple[bool, dict[str, Any]]] = {
    "plain": (False, {}),
    "state": (True, {"scale": 0.4}),
    "mask": (True, {"key_mask": torch.arange(20)[None] % 4 > 0}),
    "packed": (False, {"cu_seqlens": torch.tensor([0, 0, 3, 3, 15, 20, 20], dtype=torch.int32)}),
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("G", [1, 3])
@pytest.mark.parametrize("operator", OPERATORS)
def test_layouts_names_and_groups_are_translated(operator, G, options, monkeypatch):
    given = stand_in(operator, monkeypatch)
    with_state, more = OPTIONS[options]
    dtype = torch.bfloat16 if operator == "delta" else torch.float32
    tensors = Sizes(T=20, G=G, keys="close").tensors(operator, state=with_state, dtype=dtype)
    ours = evaluate(call, operator, tensors, **more)
    theirs = evaluate(call, operator, tensors, **more, impl="fla")
    assert len(given) == 1
    assert {name: x.dtype for name, x in theirs.items()} == {name: x.dtype for name, x in ours.items()}
    assert_exact(theirs, ours, 2**-7 if operator == "delta" else 1e-5)


def test_the_bridge_refuses_what_the_kernels_cannot_do(monkeypatch):
    meta = torch.empty(1, 1, 4, 4, device="meta")
    with pytest.raises(ValueError, match="impl='fla' expects CUDA tensors, got meta"):
        fla.refuse_what_cannot_run(meta)

    class OnCuda:
        device, dtype = torch.device("cuda"), torch.float64

    with pytest.raises(TypeError, match=r"expects float32, bfloat16 or float16, got torch\.float64"):
        fla.refuse_what_cannot_run(OnCuda())  # type: ignore[arg-type]
    stand_in("delta", monkeypatch)
    with pytest.raises(TypeError, match=r"without log_decay expects bfloat16 or float16, got torch\.float32"):
        call("delta", Sizes(T=5).tensors("delta", dtype=torch.float32), impl="fla")
    monkeypatch.setitem(sys.modules, "fla.ops.delta_rule", None)
    with pytest.raises(ImportError, match=r"impl='fla' expects fla\.ops\..*\(pip install flash-linear-attention"):
        call("delta", Sizes(T=5).tensors("delta", dtype=torch.bfloat16), impl="fla")
