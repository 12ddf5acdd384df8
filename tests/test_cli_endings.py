"""How a command ends that cannot go on: Ctrl-C, SIGTERM, errors of the system, a reader that went away."""

import argparse
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from lucid_attention import cli, commands
from lucid_attention.base.locks import FolderInUse, locked
from lucid_attention.training import recipes

# `lucid train` with a module that sends a signal to its own process.
PROGRAM = """
import os, signal, sys, types
from lucid_attention import cli, commands

def stop():
    os.kill(os.getpid(), signal.{signal})

def import_module(name, package):
    if name != ".training.command":
        return real(name, package)
    {importing}
    return types.SimpleNamespace(run=run)

def run(args):
    {running}
    return 0

real, commands.import_module = commands.import_module, import_module
sys.argv = ["lucid", "train", "tiny_lm"]
code = cli.main()
{ending}
sys.exit(code)
"""
SWALLOWED = "\n    try:\n        stop()\n    except BaseException as error:\n        raise ImportError('no') from None"
IN_A_FORK = """
    import multiprocessing
    child = multiprocessing.get_context("fork").Process(target=stop)
    child.start()
    child.join()
    print(child.exitcode)"""


def lucid(number: signal.Signals, **moments: str) -> subprocess.CompletedProcess[str]:
    """`lucid train` in a process of its own. moments: what happens while it imports, runs and ends."""
    filled = {"importing": "pass", "running": "pass", "ending": "", **moments}
    program = PROGRAM.replace("{signal}", number.name)
    for name, text in filled.items():
        program = program.replace(f"{{{name}}}", text)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("number", "name", "code"), [(signal.SIGINT, "Ctrl-C", 130), (signal.SIGTERM, "SIGTERM", 143)], ids=["INT", "TERM"]
)
@pytest.mark.parametrize(
    "moment",
    [
        {"importing": "stop()"},
        {"importing": SWALLOWED},
        {"running": "stop()"},
        {"running": SWALLOWED},
        {"running": "stop()", "ending": "stop()"},
    ],
    ids=["importing", "importing, swallowed", "running", "running, swallowed", "a second time while it ends"],
)
def test_a_signal_ends_a_command_with_one_line(
    number: signal.Signals, name: str, code: int, moment: dict[str, str]
) -> None:
    done = lucid(number, **moment)
    assert done.stderr == f"lucid train: stopped by {name}; the same command resumes from the last checkpoint\n"
    assert done.returncode == code


# `lucid` with a hook that sends Ctrl-C when a module begins to be imported, and prints what was imported before it.
EARLY = """
import _signal, os, sys

def hook(event, arguments):
    if event == "import" and arguments[0] == {module!r}:
        os.write(1, " ".join(set(sys.modules) - before).encode())
        os.kill(os.getpid(), _signal.SIGINT)

before = set(sys.modules)
sys.addaudithook(hook)
sys.argv = ["lucid", "train", "--help"]
from lucid_attention.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize("module", ["lucid_attention.commands", "argparse", "typing", "lucid_attention.base.messages"])
def test_ctrl_c_is_handled_before_anything_but_the_handler_is_imported(module: str) -> None:
    # Without the site, which imports modules of its own.
    command = [sys.executable, "-S", "-c", EARLY.format(module=module)]
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (130, "lucid: stopped by Ctrl-C\n")
    if module == "lucid_attention.commands":
        ours = {"lucid_attention", "lucid_attention.base", "lucid_attention.base.stopping", "lucid_attention.cli"}
        assert set(done.stdout.split()) - {"atexit"} == ours


def test_sigterm_cleans_up_like_ctrl_c() -> None:
    running = "\n    try:\n        stop()\n    except KeyboardInterrupt:\n        print('cleaned up')\n        raise"
    done = lucid(signal.SIGTERM, running=running)
    assert (done.returncode, done.stdout) == (143, "cleaned up\n")


def test_a_forked_worker_is_ended_by_sigterm_as_usual() -> None:
    done = lucid(signal.SIGTERM, running=IN_A_FORK)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{-signal.SIGTERM}\n", "")


def test_handlers_are_restored_when_the_command_has_ended() -> None:
    ending = "print([signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)])"
    expected = f"{[signal.default_int_handler, signal.SIG_DFL]}\n"
    assert lucid(signal.SIGTERM, ending=ending).stdout == expected


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    ignoring = "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    program = ignoring + "".join(("from lucid_attention import cli\n", "cli.main()\n", "os.kill(os.getpid(), 2)"))
    command = [sys.executable, "-c", f"import os, signal\n{program}", "--version"]
    assert subprocess.run(command, capture_output=True).returncode == 0


def test_no_handler_is_installed_for_a_caller_with_arguments() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert cli.main(["--version"]) == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


Raise = Callable[[BaseException], None]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Raise:
    """Makes `lucid recipes` and `lucid train` raise an error."""

    def fail_with(error: BaseException) -> None:
        def run(args: argparse.Namespace) -> int:
            raise error

        module = ModuleType("failing")
        module.run = run  # type: ignore[attr-defined]
        real = commands.import_module
        monkeypatch.setattr(
            commands, "import_module", lambda name, package: real(name, package) if "arguments" in name else module
        )

    return fail_with


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left"), "runs/x: the disk is full: make room"),
        (OSError(errno.EROFS, "Read-only", "/cd/out"), "/cd/out: the file system is read-only: choose another place"),
        (PermissionError(errno.EACCES, "denied", "a/b"), "a/b: permission denied: change its permissions"),
        (FileExistsError(errno.EEXIST, "exists", "a"), "a: a file is where a folder is expected: remove it"),
        (NotADirectoryError(errno.ENOTDIR, "not", "a/b"), "a/b: a file is where a folder is expected"),
        (IsADirectoryError(errno.EISDIR, "is", "a"), "a: a folder is where a file is expected: name a file"),
        (OSError(errno.ENAMETOOLONG, "too long", "a" * 300), ": the name is too long: choose a shorter one"),
        (FileNotFoundError(errno.ENOENT, "none", b"a"), "a: no such file or folder: check the path"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), "error: Connection refused\n"),
        (OSError("We couldn't connect\nto the hub.\n"), "error: We couldn't connect to the hub.\n"),
        (FolderInUse("runs/x is being written by another"), "error: runs/x is being written by another\n"),
        (ModuleNotFoundError("no", name="tensorboard"), "'tensorboard'. Install it with: pip install \"lucid-att"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_error_of_the_system_is_one_line_with_the_path_and_what_to_do(
    error: Exception, message: str, failing: Raise, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(error)
    assert cli.main(["train", "tiny_lm", "--out", "runs/x"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("lucid train: error: ")
    assert message in shown
    assert shown.count("\n") == 1


def test_after_a_full_disk_the_line_says_what_is_kept(failing: Raise, capsys: pytest.CaptureFixture[str]) -> None:
    failing(OSError(errno.ENOSPC, "No space left on device", "runs/x/a.bin"))
    assert cli.main(["train", "tiny_lm"]) == 1
    assert capsys.readouterr().err.endswith(". The same command resumes from the last checkpoint\n")


@pytest.mark.parametrize("error", [MemoryError(), ZeroDivisionError(), ModuleNotFoundError(name="lucid_attention.x")])
def test_an_error_of_ours_shows_its_traceback(error: Exception, failing: Raise) -> None:
    failing(error)
    with pytest.raises(type(error)):
        cli.main(["recipes"])


def test_two_commands_in_one_folder_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        with locked(tmp_path, "lucid recipes"):
            return 0

    monkeypatch.setattr(recipes, "run", run)
    with locked(tmp_path, "lucid train"):
        assert cli.main(["recipes"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(f"lucid recipes: error: {tmp_path} is being written by another `lucid train`")
    assert shown.count("\n") == 1


def printing(words: list[str], out: int) -> subprocess.CompletedProcess[str]:
    """`lucid` with its output to a file handle, buffered as usual."""
    command = [sys.executable, "-m", "lucid_attention.cli", *words]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.parametrize("words", [["--help"], ["eval", "--help"], ["recipes"]], ids=" ".join)
def test_a_reader_that_goes_away_ends_the_command_quietly(words: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    done = printing(words, write)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_on_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = printing(["--help"], full.fileno())
    assert done.returncode == 1
    assert done.stderr.startswith("lucid: error: standard output: the disk is full: make room")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        "train tiny_needle --set steps=1 --out {file}",
        "make-data longbench {file}/a.jsonl --data-dir {folder}",
        "report {folder}/result.json --out {file}/a.html",
        "experiment memory_update --scale smoke --out {file}",
    ],
    ids=lambda text: text.split()[0],
)
def test_a_file_in_the_place_of_a_folder_is_named(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert cli.main([word.format(file=file, folder=tmp_path) for word in words.split()]) == 1
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_what_the_encoding_of_a_terminal_lacks_is_shown_as_an_escape(encoding: str) -> None:
    command = [sys.executable, "-m", "lucid_attention.cli", "analyze", "--help"]
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run(command, capture_output=True, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\u03ba" in done.stdout


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_stream_takes_nothing(closed: str) -> None:
    command = f"{sys.executable} -m lucid_attention.cli {{}} {closed}"
    for words, code in (("--help", 0), ("nonsense", 2)):
        done = subprocess.run(command.format(words), shell=True, capture_output=True)
        assert done.returncode == code
        assert b"Traceback" not in done.stderr
