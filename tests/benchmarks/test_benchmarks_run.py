"""The benchmarks run, leave tables and data behind, and refuse contestants that compute something else.

In processes of their own: they pin threads and switch garbage collection off, and a folder `tests/benchmarks` stands
beside the package `benchmarks`.
"""

import json
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
from benchmarks.__main__ import main

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
