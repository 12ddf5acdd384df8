"""Tests with vLLM, in an environment of its own: `make test-vllm`. Elsewhere nothing is collected here."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# The Python with the package's own Transformers, which says what tokens are right.
PACKAGE_PYTHON = os.environ.get("LUCID_PYTHON", str(ROOT / ".venv/bin/python"))
collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]

# Before vLLM is imported. One process: an engine then starts in seconds.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
# vLLM would keep a core for itself, of which there may be only one.
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan() -> None:
    """vLLM reads memory that it has not written, at padding."""


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tiny checkpoints, with the expected tokens in references.json."""
    folder = tmp_path_factory.mktemp("checkpoints")
    command = [PACKAGE_PYTHON, str(Path(__file__).with_name("references.py")), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, env=environment, check=True, timeout=600)
    return folder


@pytest.fixture(scope="session")
def references(checkpoints: Path) -> dict[str, Any]:
    return json.loads((checkpoints / "references.json").read_text())


@pytest.fixture
def engine(checkpoints: Path) -> Callable[..., AbstractContextManager[Any]]:
    """engine(name, **options): vLLM in this process with that checkpoint. Prompts are read in chunks of 48 tokens."""

    @contextmanager
    def start(name: str, **options: Any) -> Iterator[Any]:
        from vllm import LLM
        from vllm.distributed import cleanup_dist_env_and_memory

        settings = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 256,
            "block_size": 32,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 48,
            "disable_log_stats": False,
        }
        llm = None
        try:
            llm = LLM(model=str(checkpoints / name), **{**settings, **options})
            yield llm
        finally:
            if llm is not None:
                llm.llm_engine.engine_core.shutdown()
            cleanup_dist_env_and_memory()

    return start
