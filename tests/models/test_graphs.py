"""One graph for every batch and length: torch.compile with its real compiler, and torch.export.

Both models, without a mask (in a graph, where nobody can look, such a batch is treated as packed), with one, and with
positions that restart.
"""

import os
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.export import Dim

from tests.models.architectures.cases import lucid_model
from tests.models.decoder.cases import decoder

pytestmark = pytest.mark.slow

MODELS = {"drop-in": lambda: lucid_model("llama"), "decoder": lambda: decoder("lucid")}
# Lengths that do and do not fill the vectors of a CPU.
SIZES = ((2, 16), (3, 17), (2, 40))
INPUTS = {
    "ids": (),
    "mask": ("attention_mask",),
    "positions": ("position_ids",),
    "packed": ("position_ids",),
    "mask and positions": ("attention_mask", "position_ids"),
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def batch(kind: str, B: int, T: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(B * T)
    documents = torch.cat([torch.arange(T // 3), torch.arange(T - T // 3)])
    mask = torch.ones(B, T, dtype=torch.long)
    mask[0, :3] = 0
    whole = {
        "attention_mask": mask,
        "position_ids": (documents if kind == "packed" else torch.arange(T)).repeat(B, 1),
    }
    ids = torch.randint(2, 40, (B, T), generator=generator)
    return {"input_ids": ids, **{name: whole[name] for name in INPUTS[kind]}}


def assert_same_logits(run: Any, model: Any, kind: str, B: int, T: int) -> None:
    inputs = batch(kind, B, T)
    found, expected = (each(**inputs, use_cache=False).logits for each in (run, model))
    seen = inputs.get("attention_mask", torch.ones(B, T)).bool()
    torch.testing.assert_close(found[seen], expected[seen], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("strict", [False, True], ids=["traced", "strict"])
@pytest.mark.parametrize("kind", ["ids", "mask", "positions", "mask and positions"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@torch.no_grad()
@pytest.mark.shows("`torch.export` for any batch and length", model="drop-in")
@pytest.mark.shows("`torch.export` for any batch and length", model="decoder")
def test_an_exported_program_holds_for_every_batch_and_length(make, kind, strict):
    model, inputs = make(), batch(kind, 2, 12)
    shapes: dict[str, Any] = {name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in inputs} | {"use_cache": None}
    program = torch.export.export(model, (), inputs | {"use_cache": False}, dynamic_shapes=shapes, strict=strict)
    for size in SIZES:
        assert_same_logits(program.module(), model, kind, *size)
    if kind == "positions":
        # The program was made from one document per row, and finds more.
        assert_same_logits(program.module(), model, "packed", 2, 21)


@pytest.mark.parametrize("how", ["dynamic=True", "mark_dynamic"])
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@torch.no_grad()
@pytest.mark.shows("one compiled graph for all lengths", model="drop-in")
@pytest.mark.shows("one compiled graph for all lengths", model="decoder")
def test_one_compiled_graph_serves_every_length(make, kind, how):
    model, counter = make(), CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=True if how == "dynamic=True" else None)

    def run(**inputs: Any) -> Any:
        if how == "mark_dynamic":
            for name in ("input_ids", *INPUTS[kind]):
                for dimension in (0, 1):
                    torch._dynamo.mark_dynamic(inputs[name], dimension)
        return compiled(**inputs)

    for size in SIZES:
        assert_same_logits(run, model, kind, *size)
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", ["ids", "packed"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_inductor_compiles_a_batch_without_a_mask(make, kind, tmp_path, monkeypatch):
    """With a length that fills vectors: for those Inductor writes other code."""
    monkeypatch.setitem(os.environ, "TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = make()
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    with torch.no_grad():
        assert_same_logits(compiled, model, kind, *SIZES[0])


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_a_compiled_pass_with_a_cache_does_not_miss_documents(make):
    """Transformers makes no mask of documents where a cache is in use, which is its default."""
    model, inputs = make(), batch("packed", 2, 16)
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits, atol=2e-5, rtol=1e-4)
