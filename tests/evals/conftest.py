"""Checkpoints and a tokenizer, made once for all tests of evaluation."""

from pathlib import Path

import pytest

from .checkpoints import write_checkpoint, write_needle_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_needle_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def lucid_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("lucid"), tokenizer_folder)


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), tokenizer_folder, "llama")


@pytest.fixture(autouse=True)
def no_list_of_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness records the environment by `pip list`, which takes seconds."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
