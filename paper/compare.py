"""Our numbers next to those of numbers.toml: python paper/compare.py TABLE RUNS "LENGTH ..."

RUNS has models/NAME and scores/NAME; LENGTHs stand for 2K, 4K, 6K, 8K, 16K, 32K, 64K and 128K tokens. Writes
RUNS/compare/TABLE/result.json, which `lucid report` shows. What has not run is empty.

    python paper/compare.py prompt FILE.jsonl LINE OUT     OUT.txt and OUT.answer: a prompt and what its answer is
"""

import json
import re
import sys
import tomllib
from collections.abc import Callable
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from statistics import fmean

PAPER_LENGTHS = (2048, 4096, 6144, 8192, 16384, 32768, 65536, 131072)
ARMS = {
    "Standard": "softmax", "softmax": "softmax", "Diff Trans.": "diff", "Diff": "diff", "DeltaNet": "delta",
    "GLA": "gla", "GSA": "gsa", "PaTH": "path", "LUCID": "lucid", "LUCID-PaTH": "lucid_path",
    "key norm (β = 1)": "lucid", "QK-Norm": "qk_norm", "max norm": "row_max", "key norm (learn β)": "learn_beta",
    "Standard (+10 %)": "softmax-10_percent",
}  # fmt: skip
DATASETS = {
    "Qasper": ("qasper", "scrolls-qasper", "f1", 1),
    "2WikiMQA": ("longbench", "longbench-2wikimqa", "qa_f1_score", 100),
    "HotpotQA": ("longbench", "longbench-hotpotqa", "qa_f1_score", 100),
    "MultifieldQA": ("longbench", "longbench-multifieldqa_en", "qa_f1_score", 100),
    "QMSum R-1": ("qmsum", "scrolls-qmsum", "rouge1", 1), "QMSum R-L": ("qmsum", "scrolls-qmsum", "rougeL", 1),
}  # fmt: skip
PRESETS = {"Gemma-3-1B": "gemma3_1b", "Gemma-3-4B": "gemma3_4b", "Qwen-2.5-1.5B": "qwen2_5_1_5b"}
NEEDLES = (2, 4, 6, 8, 10)
MEASURES = {"A, softmax": "softmax", "|W|, normalised": "magnitude"}


class Missing(Exception):
    """A run that is needed has not been made."""


class Runs:
    """The results of a folder RUNS. A value is a number, or a text such as "12.0 to 15.5"."""

    def __init__(self, folder: Path, lengths: list[int]) -> None:
        self.folder, self.sizes = folder, dict(zip(PAPER_LENGTHS, lengths, strict=False))

    def read(self, name: str) -> dict:
        file = self.folder / name
        if not file.is_file():
            raise Missing(name)
        return json.loads(file.read_text())

    def score(self, name: str, task: str, metric: str = "score") -> float:
        results = self.read(f"scores/{name}/results.json")
        found = {**results.get("groups", {}), **results["results"]}.get(task, {})
        value = next((value for key, value in found.items() if key.split(",")[0] == metric), None)
        if value is None:
            raise Missing(f"{name} {task}")
        return float(value)

    def mniah(self, name: str, needles: int, length: int) -> float:
        """authors: niah_multikey_1. paper: the mean of RULER's five tasks."""
        size = self.sizes[length]
        try:
            return 100 * self.score(name, f"mniah-needles_{needles}-{size}")
        except Missing:
            return 100 * self.score(name, f"mniah-multikey_1-needles_{needles}-{size}")

    def sniah(self, name: str, length: int) -> str:
        """The mean of two of RULER's three tasks; which two is not known: from the lowest pair to the highest."""
        each = [100 * self.score(name, f"sniah-single_{task}-{self.sizes[length]}") for task in (1, 2, 3)]
        pairs = [fmean(pair) for pair in combinations(each, 2)]
        return f"{min(pairs):.1f} to {max(pairs):.1f}"

    def loss(self, name: str) -> float:
        return float(self.read(f"models/{name}/summary.json")["validation_loss"])

    def lead(self, tuned: str) -> str:
        """LUCID's relative lead in percent, mean over 2K to 8K, and over 2K to 32K."""
        leads = []
        for lengths in (PAPER_LENGTHS[:4], PAPER_LENGTHS[:6]):
            lucid, softmax = (
                fmean(self.mniah(f"{tuned}-{arm}", 4, n) for n in lengths) for arm in ("lucid", "softmax")
            )
            if not softmax:
                raise Missing("softmax attention finds nothing")
            leads.append(100 * (lucid / softmax - 1))
        return f"{leads[0]:.1f}, to 32K {leads[1]:.1f}"

    def grid(self) -> list[float]:
        """LUCID's lead in points in every cell of Figure 4."""
        cells = [(needles, length) for needles in NEEDLES for length in PAPER_LENGTHS[:4]]
        return [self.mniah("64k-lucid", *cell) - self.mniah("64k-softmax", *cell) for cell in cells]

    def hit_rate(self, arm: str, measure: str) -> float:
        files = sorted((self.folder / "hit_rate" / arm).glob("*/analysis.json"))
        if not files:
            raise Missing(arm)
        return fmean(json.loads(file.read_text())["results"]["mean_hit_rate"][measure] for file in files)


RULES: dict[str, tuple[str, list[tuple[str, Callable[..., float | str]]]]] = {
    # table of this folder: where in the paper, and patterns of the names with what we have for them
    "table1": ("Table 1", [(r"(.*), LUCID over standard, .*", lambda r, m: speed(r, PRESETS[m]))]),
    "table3": ("Table 3", [(r"(.*), (\d+) needles, .*", lambda r, m, n: r.mniah(f"2k-{ARMS[m]}", int(n), 2048))]),
    "table5": ("Table 5", [(r"(.*), (\d+) needles", lambda r, m, n: r.mniah(f"2k-{ARMS[m]}", int(n), 2048))]),
    "table4": ("Table 4", [(r"(.*), (.*)", lambda r, m, d: long_qa(r, ARMS[m], *DATASETS[d]))]),
    "figure4": ("Figure 4", [
        (r"softmax, 10 needles, 8192 tokens", lambda r: r.mniah("64k-softmax", 10, 8192)),
        (r"LUCID's smallest lead .*", lambda r: min(r.grid())), (r"LUCID's largest lead .*", lambda r: max(r.grid())),
    ]),
    "figure5": ("Figure 5", [(r".* tuned at (\d+)K, .*", lambda r, k: r.lead(f"{k}k"))]),
    "figure6": ("Figure 6|Abstract", [
        (r".* largest lead, points", lambda r: max(babilong_leads(r))),
        (r"(.*?), (\d+) tokens.*", lambda r, m, n: babilong(r, ARMS[m], int(n))),
        (r"LUCID-PaTH at any length, at most", lambda r: max(babilong(r, "lucid_path", n) for n in PAPER_LENGTHS[5:])),
    ]),
    "figure7": (r"Figure 7|A\.5", [
        (r".* lower by, (\d+) tokens", lambda r, n: lower(r, "context_4k" if n == "4096" else "context_32k")),
        (r".* heads of 16, .*", lambda r: lower(r, "heads_of_16")),
        (r".* lower by, no RoPE, .*", lambda r: lower(r, "no_rope_32k")),
        (r"(softmax|LUCID), loss, no RoPE, .*", lambda r, m: r.loss(f"no_rope_32k-{ARMS[m]}")),
    ]),
    "decoding": ("§2.3", [(r".*", lambda r: decoding(r))]),
    "hit_rate": ("§4.5", [(r"(.*), weight on the answer, (.*)", lambda r, m, x: r.hit_rate(ARMS[m], MEASURES[x]))]),
    **{
        f"table{number}": (f"Table {number}", [
            (r"S-NIAH, (.*), (\d+) tokens", lambda r, m, n: r.sniah(f"64k-{ARMS[m]}", int(n))),
            (r"M-NIAH, (.*), (\d+) tokens", lambda r, m, n: r.mniah(f"64k-{ARMS[m]}", 4, int(n))),
        ])
        for number in (6, 7)
    },
}  # fmt: skip


def speed(runs: Runs, preset: str) -> float:
    softmax, lucid = (
        runs.read(f"models/{preset}-{arm}/summary.json")["median_tokens_per_second"] for arm in ("softmax", "lucid")
    )
    return softmax / lucid


def long_qa(runs: Runs, arm: str, folder: str, task: str, metric: str, scale: float) -> float:
    return scale * runs.score(f"{folder}-{arm}", task, metric)


def babilong(runs: Runs, arm: str, length: int) -> float:
    """The harness's score, as the authors take it, mean of QA1 to QA5. Lengths of published sets are those of files."""
    return 100 * fmean(runs.score(f"babilong-{arm}", f"babilong-qa{task}-{length}", "lax") for task in range(1, 6))


def babilong_leads(runs: Runs) -> list[float]:
    """LUCID-PaTH over softmax attention in points, at every length."""
    return [babilong(runs, "lucid_path", n) - babilong(runs, "softmax", n) for n in PAPER_LENGTHS[5:]]


def lower(runs: Runs, name: str) -> float:
    return runs.loss(f"{name}-softmax") - runs.loss(f"{name}-lucid")


def decoding(runs: Runs) -> str:
    records = runs.read("on_device/on_device.json")["records"]
    found = [(r["sizes"]["model"], r["ratios"]) for r in records if r["sizes"]["what"] == "decoding"]
    return "; ".join(f"{model} {next(iter(ratios.values()))[0]:.3f}" for model, ratios in found)


def main(table: str, runs: Runs) -> None:
    paper = tomllib.loads((Path(__file__).parent / "numbers.toml").read_text())
    where, patterns = RULES.get(table, ("", []))
    rows = []
    for number in (number for section in paper.values() for number in section["numbers"]):
        if not re.fullmatch(where, number["where"]):
            continue
        ours: float | str | None = None
        for pattern, value in patterns:
            if match := re.fullmatch(pattern, number["name"]):
                with suppress(Missing):
                    ours = value(runs, *match.groups())
                break
        rows.append(
            [number["where"], number["name"], number["value"], round(ours, 3) if isinstance(ours, float) else ours]
        )
    print("\n".join(f"{row[1]:<64} paper {row[2]:<8g} ours {'-' if row[3] is None else row[3]}" for row in rows))
    columns = ["where", "what", "paper", "ours"]
    tables = [{"title": "Next to the paper", "columns": columns, "rows": rows, "note": ""}] if rows else []
    done = sum(row[3] is not None for row in rows)
    about = f"{done} of {len(rows)} numbers of the paper have one of ours"
    result = {"format": 1, "kind": "analysis", "name": table, "title": f"{table}: the paper's numbers and ours"}
    result |= {"about": about, "ours": about, "facts": [], "figures": [], "tables": tables}
    file = runs.folder / "compare" / table / "result.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1))


def prompt(file: Path, line: int, out: Path) -> None:
    found = json.loads(file.read_text().splitlines()[line - 1])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".txt").write_text(found["prompt"])
    out.with_suffix(".answer").write_text(found["answer"].strip().rstrip("."))


if __name__ == "__main__":
    if sys.argv[1] == "prompt":
        prompt(Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    else:
        main(sys.argv[1], Runs(Path(sys.argv[2]), [int(length) for length in sys.argv[3].split()]))
