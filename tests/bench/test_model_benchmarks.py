"""The cost of whole models: the run, its formulas, and the gate before it. In processes of their own, as the others."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("Gemma-3-1B", "Gemma-3-4B", "Qwen-2.5-1.5B")


def run(*args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *args], cwd=ROOT, capture_output=True, text=True, timeout=240)


PUBLISHED = """
import sys
from pathlib import Path
from lucid_attention.bench.command import _publish
from lucid_attention.bench.harness import machine
from lucid_attention.bench.results import Store

store = Store(Path(sys.argv[1]), {"machine": machine(), "code": sys.argv[2], "quick": True})
assert store.load() == ""
docs = Path(sys.argv[1]) / "docs"
docs.mkdir()
_publish(store, ["models"], docs)
"""


def test_a_quick_run_of_whole_models_fills_every_cell_of_the_page(tmp_path: Path) -> None:
    done = run("-m", "benchmarks", "model_training", "model_decode", "--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((tmp_path / "results.json").read_text())
    done = run("-c", PUBLISHED, str(tmp_path), data["about"]["code"])
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "docs" / "benchmarks_models.md").read_text()

    training, decoding = page.split("### model_decode, 1 thread")
    assert "### model_training, 1 thread" in training
    for model in MODELS:
        (row,) = re.findall(rf"^\| {model} .*", training, re.MULTILINE)
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        without_window = {3} if model.startswith("Qwen") else set()
        assert {i for i, cell in enumerate(cells) if not cell} == without_window
    for model in (*MODELS, "paper's 1B"):
        rows = re.findall(rf"^\| {model} .*", decoding, re.MULTILINE)
        assert [row.split("|")[3].strip() for row in rows] == ["dynamic", "static"]
    assert {len(row.split("|")) for row in decoding.splitlines() if row.startswith("| ")} == {15}


def test_training_runs_with_the_largest_thread_count_alone() -> None:
    done = run(
        "-c",
        "from benchmarks import model_decode, model_training\n"
        "from lucid_attention.bench.results import Settings\n"
        "for module in (model_training, model_decode):\n"
        "    print(sorted({case.threads for case in module.BENCHMARK.cases(Settings((1, 2), False))}))",
    )
    assert done.stdout.split("\n")[:2] == ["[2]", "[1, 2]"], done.stderr


FORMULAS = """
from dataclasses import replace

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from benchmarks import model_shapes, model_training
from lucid_attention.bench.cases.model_decode import with_growth
from lucid_attention.bench.cases.model_shapes import FULL, GEMMA_1B, GEMMA_4B, QWEN, SLIDING

gemma = replace(GEMMA_1B, sliding_layers=22, full_layers=4)
times = {model_training.WINDOW: [1.0, 2.0], "SDPA": [3.0, 4.0], "LUCID": [5.0, 6.0]}
assert model_training.compose(gemma, times, "SDPA") == [22 + 12, 44 + 16]
assert model_training.compose(gemma, times, "LUCID", head=10.0) == [22 + 20 + 10, 44 + 24 + 10]
assert model_training.compose(QWEN, {"SDPA": [2.0]}, "SDPA") == [56]
assert with_growth([1.0, 2.0], growth=8.0, context=64, layers=2) == [2.0, 3.0]

# Queries 0, 1, 2, 3, 4 see 1, 2, 3, 3, 3 keys.
assert model_shapes.pairs(5, 3) == 12
assert model_shapes.pairs(5, 5) == model_shapes.pairs(5, 99) == 15

# What was published: https://huggingface.co, and 64 more tokens for the text model of Gemma 3 4B.
published = {GEMMA_1B: 999_885_952, GEMMA_4B: 3_880_099_328 + 64 * 2560, QWEN: 1_543_714_304}
for shape, parameters in published.items():
    kinds = ([SLIDING] * 5 + [FULL]) * 6 if shape.window else [FULL] * 28
    kinds = kinds[: shape.layers]
    assert (kinds.count(SLIDING), kinds.count(FULL)) == (shape.sliding_layers, shape.full_layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_shapes.config(shape, kinds, shape.vocab))
    assert sum(weight.numel() for weight in model.parameters()) == parameters, shape

# The count of operations against torch's own, for everything but attention.
for shape in (GEMMA_1B.small(), QWEN.small()):
    model = model_shapes.with_softmax(shape, [FULL])
    x = model_shapes.hidden_states(shape, 40).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        model(inputs_embeds=x, use_cache=False).last_hidden_state.sum().backward()
    products = counter.get_flop_counts()["Global"]
    linear = sum(n for name, n in products.items() if "mm" in str(name) and "bmm" not in str(name))
    assert linear == 6 * 40 * shape.weights, (linear, 6 * 40 * shape.weights)
"""


def test_composition_shapes_and_counts_are_right() -> None:
    done = run("-c", FORMULAS)
    assert done.returncode == 0, done.stderr


HEAD = """
import torch
import torch.nn.functional as F
from lucid_attention.bench.cases.model_training import head_step

x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
targets, gradient = torch.randint(11, (7,)), torch.zeros(11, 5, dtype=torch.float64)
F.cross_entropy(x @ weight.T, targets, reduction="sum").backward()
with torch.no_grad():
    torch.testing.assert_close(head_step(x, weight, gradient, targets), x.grad)
torch.testing.assert_close(gradient, weight.grad)
"""


def test_the_head_that_is_timed_computes_its_gradients() -> None:
    done = run("-c", HEAD)
    assert done.returncode == 0, done.stderr


WRONG_MODELS = """
import torch
from benchmarks import model_gate, model_shapes
from lucid_attention.bench.gate import WrongAnswer
from lucid_attention.bench.cases.model_shapes import GEMMA_1B, QWEN

torch.set_num_threads(1)
right = model_shapes.with_lucid


def without_gradients(model, strength=1.0):
    one = right(model, strength)
    for layer in one.layers:
        layer.self_attn.v_proj.register_full_backward_hook(lambda module, dx, do: (torch.zeros_like(dx[0]),))
    return one


def caught(wrong, check):
    model_shapes.with_lucid = wrong
    try:
        check()
    except WrongAnswer as error:
        print(error)


for shape in (GEMMA_1B, QWEN):
    caught(lambda model, strength=1.0: model_shapes.twin(model), lambda: model_gate.check_training.__wrapped__(shape))
    caught(without_gradients, lambda: model_gate.check_training.__wrapped__(shape))
    caught(lambda model, strength=1.0: right(model, 1.0), lambda: model_gate.check_training.__wrapped__(shape))
    caught(lambda model: right(model, 0.5), lambda: model_gate.check_decoding.__wrapped__(shape))
"""


def test_wrong_models_are_caught() -> None:
    done = run("-c", WRONG_MODELS)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"'(.+)' does not compute what it should: (.+) is .+ away from", done.stdout)
    expected = [
        ("LUCID", "its output"),
        ("LUCID", "the gradient of its input"),
        ("LUCID of strength 0", "its output"),
        ("LUCID", "its output from a dynamic cache"),
    ]
    assert found == 2 * expected
