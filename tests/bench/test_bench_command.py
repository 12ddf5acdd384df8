"""`lucid bench`: what it runs, writes, publishes and refuses."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lucid_lab.bench.cases import decode, memory, path, path_decode, peers, quick_look, solve
from lucid_lab.bench.cases.memory import Job, measure_cost
from lucid_lab.bench.cases.path import LUCID_PATH
from lucid_lab.bench.cases.peers import OURS
from lucid_lab.bench.command import BENCHMARKS, _publish
from lucid_lab.bench.pages import Published
from lucid_lab.bench.report import PAGES
from lucid_lab.bench.results import Check, Entry, Record, Results, Settings

from lucid_lab.bench import command, results
from lucid_lab.bench.arguments import CATALOGUE
from lucid_lab.bench.gate import Shape
from lucid_lab.bench.harness import Spread, machine
from lucid_lab.fingerprint import sources
from lucid_lab.locks import locked
from tests.bench.conftest import Bench

ROOT = Path(__file__).resolve().parents[2]
GROUPED = Shape(64, 32, 4)

pytestmark = pytest.mark.usefixtures("short_runs")


def loaded(folder: Path) -> Results:
    file = Results(folder, {"machine": machine(), "quick": True}, BENCHMARKS)
    assert file.load() == ""
    return file


def test_a_quick_run_leaves_tables_and_data_and_can_be_resumed(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solve, "SHAPES", (GROUPED,))
    monkeypatch.setattr(decode, "SHAPES", (GROUPED,))
    code, printed = bench("solve", "decode", "--quick")
    assert code == 0, printed

    data = json.loads((tmp_path / "results.json").read_text())
    assert {"CPU", "cores", "torch"} <= data["about"]["machine"].keys()
    assert data["commands"][0]["command"] == "lucid bench solve decode --threads 1 --quick"
    assert {record["benchmark"] for record in data["records"].values()} == {"solve", "decode"}
    for record in data["records"].values():
        assert record["code"] == BENCHMARKS[record["benchmark"]].code
        for entry in record["entries"].values():
            assert 0 < entry["seconds"]["low"] <= entry["seconds"]["median"] <= entry["seconds"]["high"]
            assert entry["seconds"]["rounds"] >= 3

    page = (tmp_path / "results.md").read_text()
    assert "### solve, 1 thread" in page
    assert "### decode, 1 thread" in page
    rows = [line for line in page.splitlines() if line.startswith("| 64 | 32/4 |")]
    assert len(rows) == 4  # forward, forward+backward; two contexts
    assert str(ROOT) not in page

    code, printed = bench("solve", "decode", "--quick", "--resume")
    assert code == 0, printed
    assert "0 cases" in printed
    assert json.loads((tmp_path / "results.json").read_text())["records"] == data["records"]


def test_results_of_edited_code_are_put_aside_and_measured_again(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench("accuracy", "--quick")[0] == 0
    before = (tmp_path / "results.json").read_text()
    monkeypatch.setattr(results, "fingerprint", lambda module: f"edited {module}")
    code, printed = bench("accuracy", "--quick", "--resume")
    assert code == 0
    assert "the code has changed since these results, which no longer count: accuracy" in printed
    assert "5 cases, about" in printed
    assert (tmp_path / "results.old.json").read_text() == before
    codes = {record["code"] for record in json.loads((tmp_path / "results.json").read_text())["records"].values()}
    assert codes == {"edited lucid_lab.bench.cases.accuracy"}


def test_results_of_another_machine_are_put_aside_and_not_resumed(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench("accuracy", "--quick")[0] == 0
    before = (tmp_path / "results.json").read_text()
    monkeypatch.setattr(command, "machine", lambda: {"CPU": "another"})
    code, printed = bench("accuracy", "--quick", "--resume")
    assert code == 2
    assert "was made with another machine" in printed
    assert (tmp_path / "results.json").read_text() == before
    assert bench("accuracy", "--quick")[0] == 0
    assert (tmp_path / "results.old.json").read_text() == before
    assert json.loads((tmp_path / "results.json").read_text())["about"]["machine"] == {"CPU": "another"}


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"about": [], "records": {}}', "[" * 100_000], ids=lambda c: c[:9]
)
def test_damaged_results_are_put_aside_and_not_resumed(content: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(content)
    file = Results(tmp_path, {"machine": machine(), "quick": True}, BENCHMARKS)
    assert file.load().startswith(f"{tmp_path / 'results.json'} is damaged (")
    assert file.records == {}


def test_a_quick_run_of_the_family_leaves_tables_a_picture_and_a_page(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (path, path_decode):
        monkeypatch.setattr(module, "SHAPES", (Shape(64, 8, 2),))
    code, printed = bench("path", "path_decode", "linear", "--quick")
    assert code == 0, printed
    page = (tmp_path / "results.md").read_text()
    for name in ("path", "path_decode", "linear"):
        assert f"### {name}, 1 thread" in page
    assert len(re.findall(r"^\| 8/2 \| forward", page, re.MULTILINE)) == 2
    assert "| one token |" in page
    assert (tmp_path / "linear_growth.png").stat().st_size > 10_000

    file = loaded(tmp_path)
    file.add_command("lucid bench solve", "2000-01-01", ["solve"])
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "benchmarks.md").touch()
    _publish(file, ["family"], docs)
    assert sorted(path.name for path in docs.rglob("*.*")) == [
        "benchmarks.md",
        "benchmarks_family.md",
        "linear_growth.png",
    ]
    page = (docs / "benchmarks_family.md").read_text()
    assert "](images/linear_growth.png)" in page
    assert "](benchmarks.md)" in page
    assert "`lucid bench path path_decode linear --threads 1 --quick`" in page
    assert "solve" not in page.split("## path")[0]  # a command of the other page


def test_publishing_replaces_own_tables_and_keeps_those_of_other_machines(tmp_path: Path) -> None:
    def results(cpu: str, folder: str, value: float, *names: str) -> Results:
        about = machine() | {"CPU": cpu}
        file = Results(tmp_path / folder, {"machine": about, "quick": False}, BENCHMARKS)
        file.add_command(f"lucid bench {' '.join(names)}", "2000-01-01", names)
        for name in names:
            entries = {peers.SDPA: Entry(Spread(value, value, value, 1))}
            facts: dict[str, int | str] = {"D": 64, "heads": 8, "kv_heads": 8, "N": 10, "pass": "forward"}
            file.records[name] = Record(name, 1, facts, entries, {"ratio": Check(value, 5.0)}, flop_ratio=2.0)
        return file

    docs = tmp_path / "docs"
    docs.mkdir()
    for file in (
        results("Old", "a", 1.0, "solve", "bf16"),
        results("New", "b", 2.0, "solve"),
        results("New", "c", 9.0, "solve"),
    ):
        _publish(file, ["benchmarks"], docs)
    published = Published.of((docs / "benchmarks.md").read_text())
    old, new = (f"{cpu}, {torch.backends.cpu.get_cpu_capability()}" for cpu in ("Old", "New"))
    assert {where: " 1000 " in lines[-1] for where, lines in published.tables.items()} == {
        ("solve, 1 thread", old): True,
        ("solve, 1 thread", new): False,
        ("bf16, 1 thread", old): True,
    }
    assert " 9000 " in published.tables["solve, 1 thread", new][-1]
    page = (docs / "benchmarks.md").read_text()
    assert page.count("| limits | 0 of 2 cases that have a limit are over it |") == 1
    assert page.count("| limits | 1 of 1 cases that have a limit are over it |") == 1
    assert published.machines[new]["CPU"] == "New"


def test_the_published_pages_are_read_as_they_were_written() -> None:
    for name, page in PAGES.items():
        published = Published.of((ROOT / "docs" / page.file).read_text())
        assert published.tables
        assert published.machines
        assert Published.of(published.render(page.title, command._on_page(name), [])) == published


def test_the_quick_look_prints_a_table_and_writes_nothing(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quick_look, "SHAPES", (GROUPED,))
    monkeypatch.setattr(quick_look, "LENGTHS", (40, 200))
    monkeypatch.setattr(quick_look, "CONTEXTS", (64,))
    monkeypatch.setattr(Settings, "least", 2)
    code, printed = bench()
    assert code == 0
    rows = re.findall(
        r"^(training|prefill|decoding): .*?(\d+/\d+) +(\d+) +[\d.]+ \(.* ([\d.]+)$", printed, re.MULTILINE
    )
    assert rows == [
        ("training", "32/4", "40", "1.12"),
        ("training", "32/4", "200", "1.12"),
        ("prefill", "32/4", "40", "1.12"),
        ("prefill", "32/4", "200", "1.12"),
        ("decoding", "32/4", "64", "1.01"),
    ]
    assert "lucid bench --help" in printed
    assert not list(tmp_path.iterdir())


REFUSED = {
    "unknown": (("solv", "--quick"), "unknown benchmark 'solv' (did you mean 'solve'?)"),
    "all and a name": (("solve", "--all"), "--all runs every benchmark: leave out solve, or --all"),
    "quick without names": (("--quick",), "--quick, --out: name the benchmarks to run, or add --all"),
    "published quick run": (("solve", "--quick", "--publish"), "leave out --quick"),
    "threads": (("solve", "--threads", "9999"), "--threads must be between 1 and the"),
    "no page": (("whole_decode", "--publish"), "--publish: no page of docs/ has tables of whole_decode"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_arguments_that_cannot_be_obeyed_are_refused(words: str, bench: Bench, tmp_path: Path) -> None:
    arguments, message = REFUSED[words]
    code, printed = bench(*arguments)
    assert code == 2
    assert message in printed
    assert not list(tmp_path.iterdir())


def test_a_folder_that_another_run_writes_is_refused(bench: Bench, tmp_path: Path) -> None:
    with locked(tmp_path, "lucid bench"):
        code, printed = bench("accuracy", "--quick")
    assert code == 1
    assert f"{tmp_path} is being written by another `lucid bench`" in printed
    assert not (tmp_path / "results.json").exists()


def test_publishing_needs_a_checkout(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "ROOT", tmp_path)
    code, printed = bench("accuracy", "--publish")
    assert code == 2
    assert f"there is no {tmp_path / 'docs'}" in printed
    assert not list(tmp_path.iterdir())


def test_help_needs_no_transformers_and_names_every_benchmark() -> None:
    program = "import sys; sys.modules['transformers'] = None; from lucid_lab.cli import main; main(['bench', '-h'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(f"\n  {name} " in done.stdout for name in BENCHMARKS)
    assert list(CATALOGUE) == list(BENCHMARKS)


def test_memory_is_measured_in_a_process_of_its_own() -> None:
    """Forward of 2048 tokens: the output takes 1 MB, the matrices would take 34 MB."""
    cost = measure_cost(Job(OURS, 64, 2, 2, 2048, False, 1))
    assert 1 < cost.megabytes < 20
    assert cost.seconds > 0


def test_memory_that_cannot_be_measured_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MODULE", "no_such_module")
    with pytest.raises(RuntimeError, match=r"(?s)the memory of .* could not be measured.*no_such_module"):
        measure_cost(Job(OURS, 64, 2, 2, 64, False, 1))


def test_records_of_memory_have_ratios_and_growth(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    megabytes = {OURS: 30.0, LUCID_PATH: 50.0}

    def cost(job: Job) -> memory.Cost:
        return memory.Cost(megabytes.get(job.name, 20.0) * job.N, 0.5)

    monkeypatch.setattr(memory, "measure_cost", cost)
    for module in (memory, path):
        monkeypatch.setattr(module, "check_truth", lambda *case: None)
    memory._path_entry.cache_clear()
    try:
        code, printed = bench("memory", "path_memory", "--quick")
    finally:
        memory._path_entry.cache_clear()
    assert code == 0, printed
    records = json.loads((tmp_path / "results.json").read_text())["records"].values()
    checks = {
        f"{record['benchmark']} {name}": value[0] for record in records for name, value in record["checks"].items()
    }
    assert checks == {
        "memory ratio": 1.5,
        "path_memory path_attention, N over N/2": 2.0,
        "path_memory lucid_path_attention, N over N/2": 2.0,
    }


def test_the_harness_depends_on_no_other_room() -> None:
    for module in ("harness", "gate", "results", "report"):
        rooms = {name.split(".")[1] for name in sources(f"lucid_lab.bench.{module}")}
        assert rooms <= {
            "bench",
            "files",
            "messages",
            "memory",
            "processes",
            "devices",
            "tables",
            "labels",
            "locks",
            "fingerprint",
        }


def test_every_benchmark_has_cases_with_keys_of_their_own() -> None:
    for quick in (False, True):
        cases = [case for benchmark in BENCHMARKS.values() for case in benchmark.cases(Settings((1, 2), quick))]
        assert len({case.key for case in cases}) == len(cases) > 30
        assert all(case.estimate(30e9) > 0 for case in cases)
