"""Run `lucid train` in forked processes: a new process would spend two seconds on imports."""

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

# Imported before the fork, so that no child imports them again.
import matplotlib.pyplot  # noqa: F401
import safetensors.torch
import torch
import transformers  # noqa: F401
from accelerate import PartialState
from torch.utils import tensorboard  # noqa: F401

from lucid_lab import cli
from lucid_lab.training import command, sharded  # noqa: F401
from lucid_lab.training import run as runs
from lucid_lab.training.metrics import METRICS, read_metrics
from lucid_lab.training.trainer import LucidTrainer

# Needles in 33 tokens, a model of two small layers: 50 steps per second.
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
    """The exit code of a process (negative: the signal that ended it) and its output."""

    code: int
    out: str
    err: str


def words(recipe: str, out: Path, *more: str, small: bool = True, **changes: Any) -> list[str]:
    """The command line of a small run. changes: of the recipe; a__b means a.b."""
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    settings = {**(SMALL if small else {}), **changes}
    return ["train", recipe, "--out", str(out), *more, *(f"--set={key}={value}" for key, value in settings.items())]


def lucid(
    argv: list[str], *, processes: int = 1, before: Action = None, seconds: float = 100, draw: bool = False
) -> Ended:
    """`lucid ...` in one process, or in several as torchrun starts them.

    before: called first in each process, for example to patch something. seconds: the time limit. draw: draw the loss
    curve, which takes as long as the rest of the run.
    """
    context = multiprocessing.get_context("fork")
    folder = Path(argv[argv.index("--out") + 1]) if "--out" in argv else Path.cwd()
    folder.parent.mkdir(parents=True, exist_ok=True)
    outputs = [folder.with_name(f"{folder.name}.output.{rank}") for rank in range(processes)]
    port = _free_port()
    children = [
        context.Process(target=_child, args=(argv, rank, processes, port, str(outputs[rank]), before, draw))
        for rank in range(processes)
    ]
    for child in children:
        child.start()
    try:
        for child in children:
            child.join(seconds)
            assert child.exitcode is not None, f"{argv} has not ended after {seconds} s"
            if child.exitcode and len(children) > 1:
                # As torchrun does: if one process fails, end the others.
                break
    finally:
        for child in children:
            if child.is_alive():
                child.kill()
            child.join()
    codes = [child.exitcode or 0 for child in children]
    texts = [Path(f"{outputs[0]}.{name}").read_text() for name in ("out", "err")]
    return Ended(next((code for code in codes if code), 0), *texts)


def _child(argv: list[str], rank: int, processes: int, port: int, output: str, before: Action, draw: bool) -> None:
    # Garbage collections then skip the parent's objects and do not copy their memory pages.
    gc.freeze()
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{output}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    # pytest has replaced these streams.
    sys.stdin = open(os.devnull)  # noqa: SIM115
    sys.stdout, sys.stderr = open(1, "w", buffering=1, closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    code = 70
    try:
        # If pytest runs in the background of a script, it ignores Ctrl-C, and children inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.set_num_threads(1)
        # As for a user: tests/conftest.py switches deterministic algorithms on.
        torch.use_deterministic_algorithms(False)
        # The parent may have created a state for its own processes.
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
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def around(owner: Any, name: str, *, call: int, do: Hook, after: bool = False, about: str = "") -> None:
    """Patch owner.name: one of its calls also calls `do`, with the same arguments, before or after.

    call: which call, counted from 1 among those with an argument that ends in `about`.
    """
    original = getattr(owner, name)
    calls = 0

    def patched(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        counts = not about or any(str(arg).endswith(about) for arg in args)
        calls += counts
        is_chosen = counts and calls == call
        if is_chosen and not after:
            do(*args, **kwargs)
        result = original(*args, **kwargs)
        if is_chosen and after:
            do(*args, **kwargs)
        return result

    setattr(owner, name, patched)


def die(*_: Any, **__: Any) -> None:
    """kill -9 of this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def killed(argv: list[str], step: int, **options: Any) -> Path:
    """The folder of a run that is killed in a step, counted from 1."""

    def before() -> None:
        around(LucidTrainer, "training_step", call=step, do=die)

    ended = lucid(argv, before=before, **options)
    assert ended.code == -signal.SIGKILL, ended
    return Path(argv[argv.index("--out") + 1])


def finished(argv: list[str], **options: Any) -> Path:
    """The folder of a run that finishes."""
    ended = lucid(argv, **options)
    assert ended.code == 0, ended
    return Path(argv[argv.index("--out") + 1])


def losses(run: Path) -> dict[int, float]:
    """The loss of every logged step. No step is logged twice."""
    entries = [entry for entry in read_metrics(run / METRICS) if "loss" in entry]
    steps = [entry["step"] for entry in entries]
    assert len(set(steps)) == len(steps), steps
    return {entry["step"]: entry["loss"] for entry in entries}


def weights(run: Path) -> dict[str, torch.Tensor]:
    """The weights of the finished model."""
    return safetensors.torch.load_file(run / "model" / "model.safetensors")


# Entries that depend on the machine and the time.
COSTS = ("_second", "_runtime", "memory_gb")


def lines(run: Path) -> list[dict[str, Any]]:
    """All lines of metrics.jsonl, without speed, time and memory."""
    entries = read_metrics(run / METRICS)
    return [{key: entry[key] for key in sorted(entry) if not key.endswith(COSTS)} for entry in entries]


def assert_same(run: Path, whole: Path, *, same_lines: bool = False) -> None:
    """Both runs have the same losses and, bit for bit, the same weights. same_lines: and the same metrics.jsonl."""
    assert losses(run) == losses(whole)
    if same_lines:
        assert lines(run) == lines(whole)
    ours, theirs = weights(run), weights(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert summary(run)["validation_loss"] == summary(whole)["validation_loss"]


def summary(run: Path) -> dict[str, Any]:
    """The content of summary.json."""
    content: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return content


def list_again(checkpoint: Path) -> None:
    """Update complete.json to the files as they are now, as an attacker would."""
    listed = json.loads((checkpoint / "complete.json").read_text())
    for name in listed["files"]:
        content = (checkpoint / name).read_bytes()
        listed["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (checkpoint / "complete.json").write_text(json.dumps(listed))
