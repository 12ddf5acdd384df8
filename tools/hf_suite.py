"""Run a pinned selection of Transformers' own model and generation tests against LUCID, beside sdpa.

The tests are read from the user's clone of Transformers at the tag of the installed version; nothing of it is copied
here. Each column of the table is one process of pytest in that clone, with `hf_suite_plugin` in it. An outcome that
differs from that of sdpa needs a reason in hf_suite_reasons.toml, and every reason must still have a difference.
"""

import argparse
import fnmatch
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import transformers

TOOLS = Path(__file__).resolve().parent
REASONS = TOOLS / "hf_suite_reasons.toml"
OUTCOMES = ("passed", "failed", "skipped")
PARALLEL = 1

# Not in the selection: what needs several processes or devices, a compiler for minutes, files of the Hub, or compares
# two softmax implementations that it asks for by name.
LEFT_OUT = (
    "test_fsdp*",
    "test_tp_*",
    "test_cp_*",
    "test_ep_*",
    "*tensor_parallel*",
    "*compil*",
    "*dynamo*",
    "*export*",
    "test_eager_matches_sdpa*",
    "test_flash*",
    "test_pipeline_*",
    "test_training*",
    "test_from_pretrained_no_checkpoint",
    "test_bc_torch_dtype",
)


@dataclass(frozen=True)
class Column:
    """One run. tests: a class of tests in the clone, None for those of the own decoder."""

    name: str
    beside: str
    tests: str | None = None
    attn_implementation: str | None = None
    attention: str | list[str] | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def target(self) -> str:
        return str(TOOLS / "hf_suite_decoder.py") if self.tests is None else f"tests/models/{self.tests}"


def dropin(name: str, tests: str, **fields: Any) -> list[Column]:
    """An architecture with sdpa and with LUCID."""
    base = Column(f"{name} sdpa", f"{name} sdpa", tests, fields=fields)
    return [base, Column(f"{name} lucid", base.name, tests, "lucid", fields=fields)]


COLUMNS = [
    *dropin("llama", "llama/test_modeling_llama.py::LlamaModelTest"),
    *dropin("qwen3", "qwen3/test_modeling_qwen3.py::Qwen3ModelTest"),
    *dropin("gemma3", "gemma3/test_modeling_gemma3.py::Gemma3TextModelTest"),
    *dropin("phi3", "phi3/test_modeling_phi3.py::Phi3ModelTest", sliding_window=None),
    *dropin("granite", "granite/test_modeling_granite.py::GraniteModelTest"),
    *dropin("mistral", "mistral/test_modeling_mistral.py::MistralModelTest", sliding_window=None),
    Column("decoder lucid", "llama sdpa", attention="lucid"),
    Column("decoder lucid_path", "llama sdpa", attention="lucid_path"),
    Column("decoder delta", "llama sdpa", attention="delta"),
    Column("decoder mix", "llama sdpa", attention=["delta", "lucid"]),
]


def check_clone(folder: Path, any_version: bool) -> None:
    """Stop unless the folder is a clone of Transformers at the tag of the installed version."""
    version = transformers.__version__
    how = f"git clone --depth 1 --branch v{version} https://github.com/huggingface/transformers"
    source = folder / "src" / "transformers" / "__init__.py"
    if not source.is_file() or not (folder / "tests" / "causal_lm_tester.py").is_file():
        sys.exit(f"HF_TESTS must be a clone of Transformers' repository, got {str(folder)!r}. Get it with: {how}")
    found = re.search(r'^__version__ = "(.+)"', source.read_text(encoding="utf-8"), re.MULTILINE)
    got = found[1] if found else "unknown"
    if got != version and not any_version:
        sys.exit(
            f"HF_TESTS must be at version {version}, which is installed, got {got}. Get it with: {how} "
            "(or run with ARGS=--any-version)"
        )


def run(column: Column, clone: Path, output: Path, timeout: int) -> dict[str, Any]:
    """The outcome of every test of the column."""
    file = output / f"{column.name.replace(' ', '_')}.json"
    python_path = [str(clone), str(TOOLS), str(TOOLS.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "HF_SUITE_COLUMN": json.dumps(asdict(column) | {"left_out": LEFT_OUT}),
        "HF_SUITE_OUTPUT": str(file),
        "PYTHONPATH": os.pathsep.join(part for part in python_path if part),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    empty = output / "empty.ini"
    empty.write_text("[pytest]\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "hf_suite_plugin", "-p", "no:cacheprovider", "-W", "ignore"]
    command += ["-c", str(empty), "--rootdir", str(clone), "--timeout", str(timeout), "--tb", "short", column.target]
    with file.with_suffix(".log").open("w", encoding="utf-8") as log:
        subprocess.run(command, cwd=clone, env=environment, stdout=log, stderr=log, check=False)
    if not file.is_file():
        sys.exit(f"the tests of {column.name!r} did not run to their end: see {file.with_suffix('.log')}")
    outcomes = json.loads(file.read_text(encoding="utf-8"))
    if not outcomes:
        sys.exit(f"no test was collected for {column.name!r}: see {file.with_suffix('.log')}")
    print(f"  {column.name}: {sum(one['seconds'] for one in outcomes.values()):.0f} s", flush=True)
    return outcomes


def read_reasons(file: Path = REASONS) -> list[dict[str, Any]]:
    """The known differences: tests and columns as patterns, the outcome, and the reason."""
    reasons = tomllib.loads(file.read_text(encoding="utf-8")).get("difference", [])
    for one in reasons:
        if set(one) != {"tests", "columns", "outcome", "reason"} or one["outcome"] not in OUTCOMES:
            raise ValueError(f"{file.name}: expected tests, columns, outcome ({OUTCOMES}) and reason, got {one}")
    return reasons


def matches(reason: dict[str, Any], column: str, test: str, outcome: str) -> bool:
    return (
        outcome == reason["outcome"]
        and any(fnmatch.fnmatch(column, pattern) for pattern in reason["columns"])
        and any(fnmatch.fnmatch(test, pattern) for pattern in reason["tests"])
    )


def differences(column: Column, results: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Tests whose outcome is not that of sdpa, with their outcome. Both columns must have the test."""
    beside, own = results[column.beside], results[column.name]
    return {
        test: own[test]["outcome"]
        for test in sorted(own.keys() & beside.keys())
        if own[test]["outcome"] != beside[test]["outcome"]
    }


def table(columns: list[Column], results: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'':20}" + "".join(f"{outcome:>9}" for outcome in OUTCOMES) + f"{'differs':>9}  beside"]
    for column in columns:
        found = [one["outcome"] for one in results[column.name].values()]
        counts = "".join(f"{found.count(outcome):9}" for outcome in OUTCOMES)
        lines.append(f"{column.name:20}{counts}{len(differences(column, results)):9}  {column.beside}")
    return "\n".join(lines)


def judge(
    columns: list[Column], results: dict[str, dict[str, Any]], reasons: list[dict[str, Any]]
) -> tuple[list[str], list[str]]:
    """What to say about each difference, and what is wrong: differences without reason, reasons without difference."""
    said, wrong, used = [], [], set()
    for column in columns:
        for test, outcome in differences(column, results).items():
            found = [index for index, one in enumerate(reasons) if matches(one, column.name, test, outcome)]
            used.update(found)
            what = f"{column.name}: {test} {outcome}, {results[column.beside][test]['outcome']} with sdpa"
            if found:
                said.append(f"{what}: {reasons[found[0]]['reason']}")
            else:
                wrong.append(f"{what}, without a reason: {results[column.name][test]['message'] or 'no message'}")
    names = [column.name for column in columns]
    for index, one in enumerate(reasons):
        concerned = any(fnmatch.fnmatch(name, pattern) for name in names for pattern in one["columns"])
        if concerned and index not in used:
            wrong.append(f"a reason that no longer applies: {one['tests']} in {one['columns']}: {one['reason']}")
    return said, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clone", type=Path, help="a clone of Transformers' repository")
    parser.add_argument("--columns", nargs="+", default=["*"], help="patterns of columns, such as 'llama *'")
    parser.add_argument("--any-version", action="store_true", help="accept a clone of another version")
    parser.add_argument("--timeout", type=int, default=60, help="seconds for one test")
    parser.add_argument("--output", type=Path, help="a folder for logs and outcomes; default: a new one")
    arguments = parser.parse_args()
    clone = arguments.clone.resolve()
    check_clone(clone, arguments.any_version)
    wanted = [one for one in COLUMNS if any(fnmatch.fnmatch(one.name, pattern) for pattern in arguments.columns)]
    columns = [one for one in COLUMNS if one in wanted or one.name in {each.beside for each in wanted}]
    if not columns:
        sys.exit(f"no column matches {arguments.columns}: expected some of {[one.name for one in COLUMNS]}")
    output = arguments.output or Path(tempfile.mkdtemp(prefix="hf_suite_"))
    output.mkdir(parents=True, exist_ok=True)
    print(f"{len(columns)} columns, {PARALLEL} at a time; logs in {output}", flush=True)
    with ThreadPoolExecutor(PARALLEL) as pool:
        found = pool.map(lambda column: run(column, clone, output, arguments.timeout), columns)
        results = dict(zip([one.name for one in columns], found, strict=True))
    said, wrong = judge(columns, results, read_reasons())
    print("\n" + table(columns, results) + "\n")
    print("\n".join(said))
    if wrong:
        sys.exit("\nNot as it should be:\n" + "\n".join(wrong))


if __name__ == "__main__":
    main()
