"""Run a pinned selection of Transformers' own model and generation tests against LUCID, next to sdpa.

The tests are read from the user's clone of Transformers at the tag of the installed version; nothing of it is copied
here. Each column of the table is one process of pytest in that clone, with this file as a plugin (`-p hf_suite`), which
gets the column in the environment. An outcome that differs from that of sdpa needs a reason in hf_suite_reasons.toml,
and every reason must still have a difference.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import transformers

from lucid_attention.models.subclasses import lucid_config_class, lucid_model_class

TOOLS = Path(__file__).resolve().parent
REASONS = TOOLS / "hf_suite_reasons.toml"
OUTCOMES = ("passed", "failed", "skipped")

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
    """One run. tests: a class of tests in the clone; fields: of the configuration."""

    name: str
    beside: str
    tests: str = ""
    lucid: bool = False
    fields: dict[str, Any] = field(default_factory=dict)


def dropin(name: str, tests: str, **fields: Any) -> list[Column]:
    """An architecture with sdpa and with LUCID."""
    base = Column(f"{name} sdpa", f"{name} sdpa", tests, fields=fields)
    return [base, Column(f"{name} lucid", base.name, tests, lucid=True, fields=fields)]


COLUMNS = [
    *dropin("llama", "llama/test_modeling_llama.py::LlamaModelTest"),
    *dropin("qwen3", "qwen3/test_modeling_qwen3.py::Qwen3ModelTest"),
    *dropin("gemma3", "gemma3/test_modeling_gemma3.py::Gemma3TextModelTest"),
    *dropin("phi3", "phi3/test_modeling_phi3.py::Phi3ModelTest", sliding_window=None),
    *dropin("granite", "granite/test_modeling_granite.py::GraniteModelTest"),
    *dropin("mistral", "mistral/test_modeling_mistral.py::MistralModelTest", sliding_window=None),
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
        "HF_SUITE_COLUMN": json.dumps(asdict(column)),
        "HF_SUITE_OUTPUT": str(file),
        "PYTHONPATH": os.pathsep.join(part for part in python_path if part),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    empty = output / "empty.ini"
    empty.write_text("[pytest]\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "hf_suite", "-p", "no:cacheprovider", "-W", "ignore"]
    command += ["-c", str(empty), "--rootdir", str(clone), "--timeout", str(timeout), "--tb", "short"]
    command.append(f"tests/models/{column.tests}")
    with file.with_suffix(".log").open("w", encoding="utf-8") as log:
        subprocess.run(command, cwd=clone, env=environment, stdout=log, stderr=log, check=False)
    if not file.is_file():
        sys.exit(f"the tests of {column.name!r} did not run to their end: see {file.with_suffix('.log')}")
    outcomes = json.loads(file.read_text(encoding="utf-8"))
    if not outcomes:
        sys.exit(f"no test was collected for {column.name!r}: see {file.with_suffix('.log')}")
    print(f"  {column.name}: {sum(one['seconds'] for one in outcomes.values()):.0f} s", flush=True)
    return outcomes


# The plugin, in the processes that `run` starts.

recorded: dict[str, dict[str, Any]] = {}


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Keep the selection, and let the tests make models with the fields of the column."""
    column = json.loads(os.environ["HF_SUITE_COLUMN"])
    left_out = [item for item in items if any(fnmatch.fnmatch(item.name, pattern) for pattern in LEFT_OUT)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    for module in {item.module for item in items}:
        testers = [one for name, one in vars(module).items() if name.endswith("Tester")]
        for tester in testers:
            if hasattr(tester, "_verify_and_infer_model_attributes") and tester.base_model_class is not None:
                tester._verify_and_infer_model_attributes()
            for name, value in column["fields"].items():
                setattr(tester, name, value)
        if column["lucid"]:
            for test in {item.cls for item in items if item.module is module}:
                # No attention weights are computed, so tests must not ask for them.
                test.has_attentions = False
                if test.all_model_classes:
                    test.all_model_classes = tuple(map(as_lucid, test.all_model_classes))
            for owner in (module, *testers):
                for name in dir(owner):
                    found = getattr(owner, name)
                    if isinstance(found, type) and (made := as_lucid(found)) is not found:
                        setattr(owner, name, made)


def as_lucid(stock: Any) -> Any:
    """LUCID's class of a configuration or a model of Transformers; others as they are."""
    if issubclass(stock, transformers.PreTrainedConfig) and stock.model_type in transformers.CONFIG_MAPPING:
        return lucid_config_class(stock.model_type)
    if issubclass(stock, transformers.PreTrainedModel) and stock.config_class is not None:
        return lucid_model_class(stock, lucid_config_class(stock.config_class.model_type))  # type: ignore[arg-type]
    return stock


def pytest_runtest_setup() -> None:
    """The same weights and tokens in every run."""
    transformers.set_seed(0)


def pytest_runtest_logreport(report: Any) -> None:
    name = report.nodeid.split("::")[-1]
    entry = recorded.setdefault(name, {"outcome": "passed", "message": "", "seconds": 0.0})
    entry["seconds"] = round(entry["seconds"] + report.duration, 2)
    if report.outcome != "passed" and entry["outcome"] != "failed":
        entry["outcome"] = report.outcome
        crash = getattr(report.longrepr, "reprcrash", None)
        entry["message"] = str(crash.message if crash is not None else report.longrepr)[:400]


def pytest_sessionfinish() -> None:
    Path(os.environ["HF_SUITE_OUTPUT"]).write_text(json.dumps(recorded), encoding="utf-8")


# The judgement.


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
    """Tests that do not pass where others do with sdpa, with their outcome. Both columns must have the test."""
    beside, own = results[column.beside], results[column.name]
    return {
        test: own[test]["outcome"]
        for test in sorted(own.keys() & beside.keys())
        if own[test]["outcome"] not in ("passed", beside[test]["outcome"])
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
    print(f"{len(columns)} columns; logs in {output}", flush=True)
    results = {column.name: run(column, clone, output, arguments.timeout) for column in columns}
    said, wrong = judge(columns, results, read_reasons())
    print("\n" + table(columns, results) + "\n")
    print("\n".join(said))
    if wrong:
        sys.exit("\nNot as it should be:\n" + "\n".join(wrong))


if __name__ == "__main__":
    main()
