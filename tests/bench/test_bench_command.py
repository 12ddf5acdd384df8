"""`lucid bench`: what it runs, writes, publishes and refuses."""

import json
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from lucid_lab.bench import decode, harness, memory, path, run, solve
from lucid_lab.bench.harness import Shape, Spread, race, ratios
from lucid_lab.bench.memory import Job, measure_cost
from lucid_lab.bench.records import CaseFile, Result, Settings, page, read_case, table
from lucid_lab.bench.run import CASES
from lucid_lab.bench.solve import LUCID, SDPA
from tests.bench.conftest import Bench

ROOT = Path(__file__).resolve().parents[2]
GROUPED = Shape(64, 32, 4)

pytestmark = pytest.mark.usefixtures("short_runs")


def test_a_quick_run_leaves_records_and_can_be_resumed(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (solve, decode):
        monkeypatch.setattr(module, "SHAPES", (GROUPED,))
    code, printed = bench("solve", "decode", "--quick", "--threads", "1")
    assert code == 0, printed
    data = json.loads((tmp_path / "solve.json").read_text())
    assert {"CPU", "cores", "torch", "lucid_attention"} <= data["machine"].keys()
    assert data["command"] == "lucid bench solve decode --threads 1 --quick"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", data["date"])
    assert data["commit"] == run.commit()
    (_, solved), (_, decoded) = (read_case(tmp_path / f"{case}.json") for case in ("solve", "decode"))
    assert [sizes["dtype"] for sizes, _ in solved] == ["float32"] * 2 + ["bfloat16"] * 2
    for sizes, result in [*solved, *decoded]:
        assert sizes["threads"] == 1
        assert not result.limits  # too small to judge
        for spread in (*result.seconds.values(), *result.ratios.values()):
            assert 0 < spread.low <= spread.median <= spread.high
            assert spread.rounds >= 3
    assert set(decoded[0][1].seconds) == {SDPA, "two products", "softmax step", LUCID}
    assert "LUCID / best of torch" in printed

    before = (tmp_path / "solve.json").read_text()
    code, printed = bench("solve", "--quick", "--resume")
    assert code == 0, printed
    assert "[1/" not in printed
    assert (tmp_path / "solve.json").read_text() == before
    monkeypatch.setattr(run, "machine", lambda: {"CPU": "another"})
    code, printed = bench("solve", "--quick", "--resume")
    assert code == 1
    assert "--resume needs records of the same machine: expected {'CPU': 'another'}" in printed


def test_a_quick_run_of_path(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path, "SHAPES", (Shape(64, 8, 2),))
    code, printed = bench("path", "--quick")
    assert code == 0, printed
    passes = [sizes["pass"] for sizes, _ in read_case(tmp_path / "path.json")[1]]
    assert passes == ["forward", "forward+backward", "one token"]


@pytest.mark.parametrize("content", ["[]", '{"records": [{}]}', '{"case": "solve", "rec'])
def test_damaged_records_are_refused(content: str, bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "solve.json").write_text(content)
    code, printed = bench("solve", "--quick", "--resume")
    assert code == 1
    assert str(tmp_path / "solve.json") in printed
    assert (tmp_path / "solve.json").read_text() == content


def made(cpu: str) -> dict[str, object]:
    machine = {"CPU": cpu, "cores": "2", "memory": "24 GB", "torch": "2.13", "lucid_attention": "0.1.0"}
    return {"date": "2000-01-01", "command": "lucid bench x", "commit": "abc", "quick": False, "machine": machine}


def test_the_page_shows_the_newest_record_of_every_row_by_length(tmp_path: Path) -> None:
    for cpu, date, heads, ratio in (("Old", "1999-01-01", ("8/8", "32/4"), 1.9), ("New", "2000-01-01", ("8/8",), 2.2)):
        file = CaseFile(tmp_path / cpu, "solve", made(cpu) | {"date": date})
        for head, N in product(heads, (2048, 1024)):
            name = "LUCID / SDPA"
            result = Result({LUCID: Spread(1, 1, 1, 5)}, {name: Spread(ratio, 1, 3, 5)}, {name: 2.0}, {name: N / 1000})
            file.add({"threads": 1, "heads": head, "N": N}, result)
    text = page(tmp_path, CASES.values())
    assert "## decode" not in text
    new, old = text.split("**New**")[1].split("**Old**")
    assert "|threads|heads||counted|limit|N 1024|2048|" in old
    assert "|1|32/4|LUCID / SDPA|2.00|2.05–1.024|**1.90**|1.90|" in old
    assert "8/8" not in old
    assert "|1|8/8|LUCID / SDPA|2.00|2.05–1.024|**2.20**|**2.20**|" in new
    assert "`lucid bench x`, 2000-01-01, lucid-attention 0.1.0 (abc)" in new
    assert table(read_case(tmp_path / "New" / "solve.json")[1])[1][-1] == "**2.20**"


def test_the_published_page_is_that_of_the_records() -> None:
    published = (ROOT / "docs" / "benchmarks.md").read_text()
    assert published == page(ROOT / "records" / "bench", CASES.values())
    assert len(published.split()) < 3000


def test_publishing_writes_records_and_the_page(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "ROOT", tmp_path)
    assert bench("decode", "--publish")[0] == 1  # no checkout
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(decode, "SHAPES", (GROUPED,))
    monkeypatch.setattr(decode, "CONTEXTS", (64,))
    code, printed = bench("decode", "--publish")
    assert code == 0, printed
    (file,) = (tmp_path / "records" / "bench").glob("*/decode.json")
    assert re.fullmatch(r"[a-z0-9-]+", file.parent.name)
    before = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert "LUCID / softmax step" in before
    (tmp_path / "docs" / "benchmarks.md").unlink()
    assert bench("--publish")[0] == 0  # the page alone
    assert (tmp_path / "docs" / "benchmarks.md").read_text() == before


def test_the_quick_look_ends_with_a_sentence_and_writes_nothing(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "LOOK_LENGTH", 100)
    monkeypatch.setattr(run, "LOOK_CONTEXT", 64)
    monkeypatch.setattr(Settings, "least", 2)
    code, printed = bench()
    assert code == 0, printed
    sentence = " ".join(printed.split("With 8/8 and 32/4 query/key-value heads, ")[1].split())
    assert re.match(
        r"attention with LUCID takes [\d.]+ and [\d.]+ times as long as torch's softmax attention", sentence
    )
    assert "(2 and 1.12 by the count of operations)" in sentence
    assert not list(tmp_path.iterdir())


REFUSED = {
    "unknown": (("solv", "--quick"), "unknown case 'solv' (did you mean 'solve'?)"),
    "published quick run": (("solve", "--quick", "--publish"), "--publish needs full sizes"),
    "no case": (("--quick",), "--quick, --resume and --out are for named cases or --all"),
    "device of another case": (("solve", "--device", "cpu"), "--device is for the case on_device, got solve"),
    "threads": (("solve", "--threads", "9999"), "--threads must be between 1 and the"),
    "second thread count": (("solve", "--threads", "1", "9999"), "--threads must be between 1 and the"),
    "device": (("on_device", "--quick", "--device", "warp"), "--device must be auto, cpu, or an accelerator"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_arguments_that_cannot_be_obeyed_are_refused(words: str, bench: Bench, tmp_path: Path) -> None:
    arguments, message = REFUSED[words]
    code, printed = bench(*arguments)
    assert code == 1
    assert message in printed
    assert not list(tmp_path.glob("*.json"))


def test_help_needs_no_torch_and_names_every_case() -> None:
    program = "import sys; sys.modules['torch'] = None; from lucid_lab.cli import main; main(['bench', '-h'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in CASES)
    assert len(CASES) == 8


def test_every_case_has_points_of_different_sizes() -> None:
    for quick in (False, True):
        for case in CASES.values():
            points = case.points(Settings((1, 2), quick))
            sizes = [tuple(point.sizes.items()) for point in points]
            assert len(set(sizes)) == len(sizes) > 0
            # One table: the same keys in the same order, the length at the end.
            assert len({tuple(point.sizes) for point in points}) == 1
            assert next(iter(points[0].sizes)) == "threads"
            assert all(isinstance(list(point.sizes.values())[-1], int) for point in points)


@pytest.mark.slow
def test_memory_is_measured_in_a_process_of_its_own() -> None:
    """Forward of 2048 tokens: the output takes 1 MB, the matrices would take 34 MB."""
    megabytes, seconds = measure_cost(Job(LUCID, Shape(64, 2, 2), 2048, backward=False))
    assert 1 < megabytes < 20
    assert seconds > 0


def test_memory_that_is_not_linear_is_an_error(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "measure_cost", lambda job: (job.N ** (2 if job.name == LUCID else 1) / 1000, 0.5))
    memory._cost.cache_clear()
    try:
        code, printed = bench("memory")
    finally:
        memory._cost.cache_clear()
    assert code == 1
    assert "memory must be linear in the length" in printed
    records = {tuple(sizes.values()): result for sizes, result in read_case(tmp_path / "memory.json")[1]}
    growth = records[1, "2/2", "forward", memory.LONG]
    assert growth.ratios["LUCID, N over N/2"].median == 4
    assert records[1, "4/4", "forward+backward", 4096].ratios["PaTH, N over N/2"].median == 2


def test_a_race_takes_turns_in_changing_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    runs = {name: lambda name=name: calls.append(name) for name in "abc"}
    seconds = {"a": 1.0, "b": 2.0, "c": 40.0}

    def clock(contestant: harness.Run) -> float:
        contestant()
        return seconds[calls[-1]]

    times = race(runs, budget=0.0, seed="x", least=5, brief={"c"}, clock=clock)
    assert times == {"a": [1.0] * 5, "b": [2.0] * 5, "c": [40.0] * 3}
    rounds = ["".join(calls[start : start + 3]) for start in range(0, 9, 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert len(set(rounds)) > 1
    assert ratios(times["b"], times["a"]) == Spread(2.0, 2.0, 2.0, 5)
    # A round of a and b takes 3 s, so five are run; one of all takes 43 s, so two are.
    assert len(race(runs, budget=0.0, seed="x", brief={"c"}, clock=clock)["a"]) == 5
    assert len(race(runs, budget=0.0, seed="x", clock=clock)["a"]) == 2


def test_the_fastest_standard_decoder_is_one_of_three() -> None:
    ratios = {decode.TO_TORCH: Spread(1.1, 1, 1, 5), decode.TO_STEP: Spread(1.3, 1, 1, 5)}
    for fastest, ratio in ((SDPA, 1.1), ("two products", 1.1), ("softmax step", 1.3)):
        seconds = {name: Spread(1.0 if name == fastest else 2.0, 1, 1, 5) for name in decode.STANDARD}
        name, spread = decode.fastest_standard(Result(seconds, ratios))
        assert (name, spread.median) == (fastest, ratio)
