"""No code in a checkpoint folder is ever run."""

import json
import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from .running import Ended, killed, list_again, lucid, words


class Harm:
    """A pickle that makes a folder when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in step 3 and has the checkpoint 2."""
    return killed(words("tiny_needle", tmp_path_factory.mktemp("stopped") / "run"), 3)


@pytest.mark.parametrize("zipped", [True, False], ids=["torch", "pickle"])
@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_harmful_pickle_in_a_checkpoint_is_not_run(name: str, zipped: bool, stopped: Path, tmp_path: Path) -> None:
    marker, run = tmp_path / "marker", shutil.copytree(stopped, tmp_path / "run")
    file = run / "checkpoint-2" / name
    if zipped:
        torch.save(Harm(marker), file)
    else:
        file.write_bytes(pickle.dumps(Harm(marker)))
    list_again(run / "checkpoint-2")
    ended = lucid(words("tiny_needle", run))
    assert ended.code != 0
    assert "resuming from" in ended.out
    assert not marker.exists()
    # Without weights_only the pickle does run.
    torch.load(file, weights_only=False) if zipped else pickle.loads(file.read_bytes())
    assert marker.exists()


def print_loads() -> None:
    """Print how every pickle is read."""
    load, unpickler = torch.load, pickle.Unpickler

    def print_and_load(*args: Any, **kwargs: Any) -> Any:
        print(f"torch.load weights_only={kwargs.get('weights_only')}")
        return load(*args, **kwargs)

    class PrintingUnpickler(unpickler):  # type: ignore[misc,valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            print("an unpickler")
            super().__init__(*args, **kwargs)

    def refused(*_: Any, **__: Any) -> Any:
        print("a pickle")

    torch.load = print_and_load
    pickle.Unpickler, pickle.load, pickle.loads = PrintingUnpickler, refused, refused  # type: ignore[misc]


def test_a_resumed_run_reads_every_pickle_with_weights_only(stopped: Path, tmp_path: Path) -> None:
    run = shutil.copytree(stopped, tmp_path / "run")
    ended = lucid(words("tiny_needle", run), before=print_loads)
    assert ended.code == 0, ended
    assert ended.out.count("torch.load weights_only=True") == 3
    assert "weights_only=False" not in ended.out
    assert "weights_only=None" not in ended.out
    assert "an unpickler" not in ended.out
    assert "a pickle" not in ended.out


def test_a_run_writes_weights_as_safetensors_and_no_pickled_arguments(whole: Path) -> None:
    files = {path.name for path in whole.rglob("*") if path.is_file()}
    assert "training_args.bin" not in files
    assert not any(name.endswith((".bin", ".pkl")) for name in files)
    assert {path.parent.name for path in whole.rglob("model.safetensors")} == {"checkpoint-6", "checkpoint-8", "model"}


def remote(folder: Path, marker: Path) -> Path:
    """A checkpoint with code of its own."""
    folder.mkdir()
    classes = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": classes}))
    (folder / "own.py").write_text(f"import os\nos.mkdir({str(marker)!r})\nclass Config: ...\nclass Model: ...\n")
    return folder


def test_code_in_a_checkpoint_is_not_run_and_the_user_is_not_asked(tmp_path: Path) -> None:
    start = remote(tmp_path / "start", tmp_path / "marker")

    def before() -> None:
        # Any question is answered with yes.
        read, write = os.pipe()
        os.write(write, b"y\n" * 9)
        os.dup2(read, 0)
        sys.stdin = os.fdopen(0)
        os.environ["HF_HOME"] = os.environ["HF_MODULES_CACHE"] = str(tmp_path / "cache")

    argv = words("tiny_needle", tmp_path / "run", "--from", str(start))
    ended: Ended = lucid([word for word in argv if not word.startswith("--set=model.")], before=before)
    assert ended.code == 1, ended
    assert not (tmp_path / "marker").exists()
    assert "[y/N]" not in ended.out + ended.err
    assert "Traceback" not in ended.err
