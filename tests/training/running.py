"""`lucid train` in processes of its own, which are forks: two seconds of imports for every run would be too many."""

import gc
import hashlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# What a run imports: forks have it then.
import matplotlib.pyplot  # noqa: F401
import safetensors.torch
import torch
import transformers  # noqa: F401
from accelerate import PartialState
from torch.utils import tensorboard  # noqa: F401

from lucid_attention import cli
from lucid_attention.training import command, sharded  # noqa: F401
from lucid_attention.training import run as runs
from lucid_attention.training.trainer import LucidTrainer
from lucid_attention.training.watching import METRICS, read_metrics

# Needles among 33 tokens, a model of two small layers: 50 steps a second.
SMALL: dict[str, Any] = {
    "steps": 8,
    "sequence_length": 33,
    "micro_batch_size": 4,
    "batch_size": 4,
    "model.hidden_size": 32,
    "model.intermediate_size": 48,
    "data_options.n": [2, 4, 8],
    "log_every": 1,
    "save_every": 2,
    "evaluate_every": 0,
    "evaluation_sequences": 4,
}

Action = Callable[[], None] | None
Hook = Callable[..., None]


class Ended(NamedTuple):
    """How a process ended (negative: by a signal) and what it wrote."""

    code: int
    out: str
    err: str


def words(recipe: str, out: Path, *more: str, small: bool = True, **changes: Any) -> list[str]:
    """The command line of a small run. changes: of the recipe; a__b is a.b."""
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    settings = {**(SMALL if small else {}), **changes}
    return ["train", recipe, "--out", str(out), *more, *(f"--set={key}={value}" for key, value in settings.items())]


def lucid(
    argv: list[str], *, processes: int = 1, before: Action = None, seconds: float = 100, draw: bool = False
) -> Ended:
    """`lucid ...` in one process, or in several as torchrun starts them.

    before: done first in each, such as a patch. seconds: that it may take. draw: really draw the loss, which takes as
    long as everything else.
    """
    context = multiprocessing.get_context("fork")
    folder = Path(argv[argv.index("--out") + 1]) if "--out" in argv else Path.cwd()
    folder.parent.mkdir(parents=True, exist_ok=True)
    said = [folder.with_name(f"{folder.name}.said.{rank}") for rank in range(processes)]
    port = _free_port()
    children = [
        context.Process(target=_child, args=(argv, rank, processes, port, str(said[rank]), before, draw))
        for rank in range(processes)
    ]
    for child in children:
        child.start()
    try:
        for child in children:
            child.join(seconds)
            assert child.exitcode is not None, f"{argv} has not ended after {seconds} s"
            if child.exitcode and len(children) > 1:
                # As torchrun does: one that fails takes the others with it.
                break
    finally:
        for child in children:
            if child.is_alive():
                child.kill()
            child.join()
    codes = [child.exitcode or 0 for child in children]
    texts = [Path(f"{said[0]}.{name}").read_text() for name in ("out", "err")]
    return Ended(next((code for code in codes if code), 0), *texts)


def _child(argv: list[str], rank: int, processes: int, port: int, said: str, before: Action, draw: bool) -> None:
    # What the parent has is not looked through, and so not copied, by every collection.
    gc.freeze()
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{said}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    # pytest has its own in their place.
    sys.stdin = open(os.devnull)  # noqa: SIM115
    sys.stdout, sys.stderr = open(1, "w", buffering=1, closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    code = 70
    try:
        # A test command in the background of a script ignores Ctrl-C, and so would its children.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.set_num_threads(1)
        # As its user has it, not as tests/conftest.py does.
        torch.use_deterministic_algorithms(False)
        # A test in this process may have counted its processes.
        PartialState._reset_state()
        if processes > 1:
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
            os.environ |= {name: str(value) for name, value in names.items()}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if not draw:
            runs.draw_loss = lambda entries, path, *others: path.write_bytes(b"")  # type: ignore[assignment]
        if before is not None:
            before()
        code = cli.main(argv)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def around(owner: Any, name: str, *, call: int, do: Hook, after: bool = False, about: str = "") -> None:
    """From now on a call of owner.name does something more, before or after: `do`, with its arguments.

    call: which, counted from 1 among those that have `about` at the end of one of their arguments.
    """
    original = getattr(owner, name)
    calls = 0

    def patched(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        meant = not about or any(str(arg).endswith(about) for arg in args)
        calls += meant
        now = meant and calls == call
        if now and not after:
            do(*args, **kwargs)
        result = original(*args, **kwargs)
        if now and after:
            do(*args, **kwargs)
        return result

    setattr(owner, name, patched)


def die(*_: Any, **__: Any) -> None:
    """kill -9, from within."""
    os.kill(os.getpid(), signal.SIGKILL)


def killed(argv: list[str], step: int, **options: Any) -> Path:
    """The folder of a run that was killed in a step, counted from 1."""

    def before() -> None:
        around(LucidTrainer, "training_step", call=step, do=die)

    ended = lucid(argv, before=before, **options)
    assert ended.code == -signal.SIGKILL, ended
    return Path(argv[argv.index("--out") + 1])


def finished(argv: list[str], **options: Any) -> Path:
    """The folder of a run that came to its end."""
    ended = lucid(argv, **options)
    assert ended.code == 0, ended
    return Path(argv[argv.index("--out") + 1])


def losses(run: Path) -> dict[int, float]:
    """Step by step. No step is there twice."""
    entries = [entry for entry in read_metrics(run / METRICS) if "loss" in entry]
    steps = [entry["step"] for entry in entries]
    assert len(set(steps)) == len(steps), steps
    return {entry["step"]: entry["loss"] for entry in entries}


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Of the finished model."""
    return safetensors.torch.load_file(run / "model" / "model.safetensors")


def assert_same(run: Path, whole: Path) -> None:
    """Loss for loss and bit for bit the other run."""
    assert losses(run) == losses(whole)
    ours, theirs = weights(run), weights(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert summary(run)["validation_loss"] == summary(whole)["validation_loss"]


def summary(run: Path) -> dict[str, Any]:
    """What a finished run says of itself."""
    read: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return read


def list_again(checkpoint: Path) -> None:
    """Write the list of a checkpoint's files as they are now, as somebody would who means harm."""
    listed = json.loads((checkpoint / "complete.json").read_text())
    for name in listed["files"]:
        content = (checkpoint / name).read_bytes()
        listed["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (checkpoint / "complete.json").write_text(json.dumps(listed))
