"""Whole models on any device: what runs, what is recorded, and how a device is timed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lucid_lab.bench.cases import on_device
from lucid_lab.bench.cases.whole_models import FULL, GEMMA_1B, GEMMA_4B, PAPER_1B, QWEN, SLIDING

from lucid_lab.bench import harness
from lucid_lab.bench.harness import device_clock
from tests.bench.conftest import Bench

pytestmark = pytest.mark.usefixtures("short_runs")


def test_a_quick_run_on_the_cpu(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "TRAINING_SHAPES", (GEMMA_1B,))
    monkeypatch.setattr(on_device, "DECODING_SHAPES", (GEMMA_1B, PAPER_1B))
    words = ("whole_training", "whole_decode", "--quick", "--device", "cpu")
    code, printed = bench(*words)
    assert code == 0, printed
    data = json.loads((tmp_path / "results.json").read_text())
    assert data["commands"][0]["command"] == "lucid bench whole_training whole_decode --threads 1 --device cpu --quick"
    assert list(data["records"]) == [
        "whole_training cpu Gemma-3-1B 64", "whole_decode cpu Gemma-3-1B 96", "whole_decode cpu paper's 1B 96",
    ]  # fmt: skip
    for record in data["records"].values():
        assert (record["facts"]["device"], record["facts"]["dtype"]) == ("cpu", "float32")
        assert record["entries"]["LUCID"]["seconds"]["rounds"] >= 3
        assert record["entries"]["LUCID"]["ratio"]["median"] > 0
    code, printed = bench(*words, "--resume")
    assert code == 0
    assert "0 cases" in printed


def test_all_layers_run_in_their_true_order() -> None:
    for shape in (GEMMA_1B, GEMMA_4B, QWEN, PAPER_1B):
        kinds = on_device.layer_kinds(shape)
        assert (kinds.count(SLIDING), kinds.count(FULL)) == (shape.sliding_layers, shape.full_layers)
    assert on_device.layer_kinds(GEMMA_1B)[:7] == [*[SLIDING] * 5, FULL, SLIDING]


def test_the_contestants_share_their_weights_and_differ_in_attention() -> None:
    shape = PAPER_1B.small()
    pair = on_device.models(shape, torch.device("cpu"), quick=True)
    softmax, lucid = pair.values()
    for a, b in zip(softmax.parameters(), lucid.parameters(), strict=True):
        assert a.data_ptr() == b.data_ptr()
    ids = torch.randint(shape.vocab, (1, 40))
    assert not torch.allclose(softmax(input_ids=ids).logits, lucid(input_ids=ids).logits)


def test_a_model_that_does_not_fit_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "machine_memory", lambda: 1000)
    code, printed = bench("whole_decode", "--quick", "--device", "cpu")
    assert code == 2
    assert "Gemma-3-1B must fit in the 0.0 GB of memory of cpu, but needs at least" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("decode", "--device", "cpu"), "--device is for whole_training, whole_decode, and not for decode"),
        (("whole_decode", "--device", "warp"), "--device must be auto, cpu, or an accelerator"),
    ],
)
def test_wrong_devices_are_refused(words: tuple[str, ...], message: str, bench: Bench) -> None:
    code, printed = bench(*words)
    assert code == 2
    assert message in printed


def test_a_gpu_is_timed_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            calls.append("event")

        def elapsed_time(self, end: "Event") -> float:
            return 77.0

    class Device:
        def __init__(self, device: torch.device) -> None:
            pass

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    assert device_clock(torch.device("cuda"))(lambda: calls.append("run")) == 0.077
    assert calls == ["wait", "event", "run", "event", "wait"]


def test_another_accelerator_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: calls.append("wait"))
    assert device_clock(torch.device("mps"))(lambda: calls.append("run")) > 0
    assert calls == ["wait", "run", "wait"]
    assert device_clock(torch.device("cpu")) is harness._seconds


def test_a_race_is_timed_by_its_clock() -> None:
    def clock(run: Callable[[], object]) -> float:
        run()
        return 2.0

    times = harness.race({"a": lambda: None, "b": lambda: None}, budget=0.0, seed="x", least=3, clock=clock)
    assert times == {"a": [2.0] * 3, "b": [2.0] * 3}
