"""Runs that several test files share."""

import random
from pathlib import Path

import pytest

from .running import finished, lucid, words


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run that was not interrupted."""
    return finished(words("tiny_needle", tmp_path_factory.mktemp("whole") / "run"))


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder written by `lucid tokenize`."""
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "texts").mkdir()
    chooser = random.Random(0)
    for number in range(24):
        text = " ".join(chooser.choices(["the", "key", "reads", "last", "def", "(", ":", "12", "\n"], k=200))
        (folder / "texts" / f"{number:02d}.txt").write_text(text)
    argv = ["tokenize", str(folder / "texts"), str(folder / "tokens"), "--tokenizer=train:300", "--validation=0.3"]
    ended = lucid(argv)
    assert ended.code == 0, ended
    return folder / "tokens"


@pytest.fixture(scope="session")
def language_model(tmp_path_factory: pytest.TempPathFactory, tokens: Path) -> Path:
    """A small run on the folder `tokens`."""
    argv = words("tiny_lm", tmp_path_factory.mktemp("language") / "run", "--data", str(tokens))
    return finished([word for word in argv if not word.startswith("--set=data_options")])
