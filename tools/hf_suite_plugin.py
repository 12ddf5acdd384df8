"""A pytest plugin of `tools/hf_suite.py`: makes Transformers' own model tests use the attention of one column.

It is loaded by name (`-p hf_suite_plugin`) in a process of pytest that runs in the user's clone of Transformers. The
column comes in the environment, and the outcome of every test goes to a file, both as JSON.
"""

import fnmatch
import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import transformers

from lucid_attention import enable_lucid

COLUMN = json.loads(os.environ["HF_SUITE_COLUMN"])
OUTCOMES: dict[str, dict[str, Any]] = {}


def pytest_configure() -> None:
    """Let every configuration that a tester makes have the fields and the attention of the column."""
    enable_lucid()
    tester = import_module("tests.causal_lm_tester").CausalLMModelTester
    original = tester.get_config

    def get_config(self: Any) -> Any:
        config = original(self)
        for name, value in COLUMN["fields"].items():
            setattr(config, name, value)
        if COLUMN["attn_implementation"] is not None:
            config._attn_implementation = COLUMN["attn_implementation"]
        return config

    tester.get_config = get_config


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the selection."""
    left_out = [item for item in items if any(fnmatch.fnmatch(item.name, pattern) for pattern in COLUMN["left_out"])]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_runtest_setup() -> None:
    """The same weights and tokens in every run."""
    transformers.set_seed(0)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = report.nodeid.split("::")[-1]
    entry = OUTCOMES.setdefault(name, {"outcome": "passed", "message": "", "seconds": 0.0})
    entry["seconds"] = round(entry["seconds"] + report.duration, 2)
    if report.outcome != "passed" and entry["outcome"] != "failed":
        entry["outcome"] = report.outcome
        crash = getattr(report.longrepr, "reprcrash", None)
        entry["message"] = str(crash.message if crash is not None else report.longrepr)[:400]


def pytest_sessionfinish() -> None:
    Path(os.environ["HF_SUITE_OUTPUT"]).write_text(json.dumps(OUTCOMES), encoding="utf-8")
