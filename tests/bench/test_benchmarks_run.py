"""The benchmarks run, leave tables and data behind, and refuse contestants that compute something else.

In processes of their own: they pin threads and switch garbage collection off, and a folder `tests/benchmarks` stands
beside the package `benchmarks`.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *args], cwd=ROOT, capture_output=True, text=True, timeout=240)


def test_a_quick_run_leaves_tables_and_data_and_can_be_resumed(tmp_path: Path) -> None:
    command = ("-m", "benchmarks", "solve", "decode", "--quick", "--out", str(tmp_path))
    done = run(*command)
    assert done.returncode == 0, done.stdout + done.stderr

    data = json.loads((tmp_path / "results.json").read_text())
    assert {"CPU", "cores", "torch"} <= data["about"]["machine"].keys()
    assert data["commands"][0]["command"] == "python -m benchmarks solve decode --threads 1 --quick"
    assert {record["benchmark"] for record in data["records"].values()} == {"solve", "decode"}
    for record in data["records"].values():
        for entry in record["entries"].values():
            assert 0 < entry["seconds"]["low"] <= entry["seconds"]["median"] <= entry["seconds"]["high"]
            assert entry["seconds"]["rounds"] >= 3

    page = (tmp_path / "results.md").read_text()
    assert "### solve, 1 thread" in page
    assert "### decode, 1 thread" in page
    rows = [line for line in page.splitlines() if line.startswith("| 64 | 32/4 |")]
    assert len(rows) == 4  # forward, forward+backward; two contexts
    assert str(ROOT) not in page

    again = run(*command, "--resume")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "0 cases" in again.stdout
    assert json.loads((tmp_path / "results.json").read_text())["records"] == data["records"]


SOFTMAX_FOR_LUCID = """
import sys
from benchmarks import peers
from lucid_attention.bench.command import main

peers.ATTENTIONS[peers.OURS] = peers.Peer(peers.sdpa, solves=True)
sys.exit(main(["solve", "--quick", "--out", sys.argv[1]]))
"""

WRONG_GRADIENT = """
import torch
from benchmarks import peers, solve

torch.set_num_threads(1)
right = peers.ours
peers.ATTENTIONS[peers.OURS] = peers.Peer(lambda q, k, v: right(q, k.detach() + 0 * k, v), solves=True)
shape = solve.SHAPES[1]
solve.check_truth("solve", shape, False, torch.float32, (peers.OURS,))
solve.check_truth("solve", shape, True, torch.float32, (peers.OURS,))
"""

WRONG_DECODER = """
import torch
from benchmarks import decode, peers

torch.set_num_threads(1)
peers.DECODERS[peers.DECODE_STEP] = peers.Peer(peers.decode_products, solves=True)
decode.check_truth(decode.SHAPES[0])
"""


def test_a_contestant_that_skips_the_solve_stops_the_run(tmp_path: Path) -> None:
    done = run("-c", SOFTMAX_FOR_LUCID, str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "stopped: " in done.stdout
    assert "'lucid_attention' does not compute what it should: its output" in done.stdout
    assert not (tmp_path / "results.md").exists()


def test_a_wrong_gradient_is_caught() -> None:
    done = run("-c", WRONG_GRADIENT)
    assert "WrongAnswer" in done.stderr
    assert "'lucid_attention' does not compute what it should: the gradient of k" in done.stderr


def test_a_wrong_decoder_is_caught() -> None:
    done = run("-c", WRONG_DECODER)
    assert "WrongAnswer" in done.stderr
    assert "'decode_step' does not compute what it should: its output" in done.stderr


PUBLISHED = """
import sys
from pathlib import Path
from lucid_attention.bench.command import _publish
from lucid_attention.bench.harness import machine
from lucid_attention.bench.results import Store, fingerprint

store = Store(Path(sys.argv[1]), {"machine": machine(), "code": fingerprint(), "quick": True})
assert store.load() == ""
store.add_command("python -m benchmarks solve", "2000-01-01", ["solve"])
docs = Path(sys.argv[1]) / "docs"
docs.mkdir()
(docs / "benchmarks.md").touch()
_publish(store, ["family"], docs)
"""


def test_a_quick_run_of_the_family_leaves_tables_a_picture_and_a_page(tmp_path: Path) -> None:
    done = run("-m", "benchmarks", "path", "path_decode", "linear", "--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "results.md").read_text()
    for name in ("path", "path_decode", "linear"):
        assert f"### {name}, 1 thread" in page
    assert len(re.findall(r"^\| 8/2 \| forward", page, re.MULTILINE)) == 2
    assert "| one token |" in page
    assert (tmp_path / "linear_growth.png").stat().st_size > 10_000

    done = run("-c", PUBLISHED, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "docs").rglob("*.*")) == [
        "benchmarks.md",
        "benchmarks_family.md",
        "linear_growth.png",
    ]
    page = (tmp_path / "docs" / "benchmarks_family.md").read_text()
    assert "](images/linear_growth.png)" in page
    assert "](benchmarks.md)" in page
    assert "`python -m benchmarks path path_decode linear --threads 1 --quick`" in page
    assert "solve" not in page.split("## path")[0]  # a command of the other page


def test_a_page_with_a_benchmark_missing_is_not_published(tmp_path: Path) -> None:
    done = run("-m", "benchmarks", "path", "linear", "--publish", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "benchmarks_family.md lacks path_decode, path_memory." in done.stderr
    assert not list(tmp_path.iterdir())


WRONG_FAMILY = """
from functools import partial

import torch
from benchmarks import linear_peers, path_decode, path_peers, peers
from lucid_attention.bench.gate import WrongAnswer
from lucid_attention.bench.cases.path_peers import LUCID_PATH, PATH

torch.set_num_threads(1)
shape = path_peers.SHAPES[1]


def caught(table, name, wrong, check):
    right, table[name] = table[name], wrong
    try:
        check()
    except WrongAnswer as error:
        print(error)
    table[name] = right


right, attention = path_peers.ATTENTIONS[PATH], partial(path_peers.check_truth.__wrapped__, "path", shape)
caught(path_peers.ATTENTIONS, PATH, lambda q, k, v, w, beta: peers.sdpa(q, k, v), partial(attention, False))
without_gradient = lambda q, k, v, w, beta: right(q, k, v, w.detach() + 0 * w, beta)
caught(path_peers.ATTENTIONS, PATH, without_gradient, partial(attention, True))
caught(path_peers.ATTENTIONS, LUCID_PATH, right, partial(attention, False))


def without_the_flush(one, tokens):
    keys = one.k[:, :, : one.length].clone()
    result = path_decode.path_cycle(one, tokens, lucid=False)
    one.k[:, :, : keys.shape[2]] = keys
    return result


decoders = partial(path_decode.check_truth.__wrapped__, shape)
caught(path_decode.CYCLES, path_decode.STEP, without_the_flush, decoders)
caught(path_decode.CYCLES, path_decode.LUCID_STEP, path_decode.CYCLES[path_decode.STEP], decoders)

members = linear_peers.MEMBERS
ungated = members["gated_delta"]._replace(run=lambda q, k, v, beta, log_decay: members["delta"].run(q, k, v, beta))
caught(members, "gated_delta", ungated, partial(linear_peers.check_truth.__wrapped__, shape, 300, False))
"""


def test_wrong_members_of_the_family_are_caught() -> None:
    done = run("-c", WRONG_FAMILY)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"'(.+)' does not compute what it should: (.+) is .+ away from", done.stdout)
    assert found == [
        ("path_attention", "its output"),
        ("path_attention", "the gradient of w"),
        ("lucid_path_attention", "its output"),
        ("path_decode_step", "its output"),
        ("path_decode_step with scalars", "its output"),
        ("gated_delta", "its output"),
    ]
