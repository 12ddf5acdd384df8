"""The command line: help, errors, and how a command ends. What a command does is tested with its room."""

import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pickle import UnpicklingError

import pytest
import typer

from lucid_lab import cli

COMMANDS = {info.name: info for info in cli.app.registered_commands if info.name}
HEAVY = {"torch", "transformers", "numpy", "datasets", "matplotlib", "tokenizers", "pyarrow", "lm_eval", "psutil"}


@pytest.fixture
def failing() -> Iterator[list[BaseException]]:
    """A command `fail` that raises what the list holds."""
    errors: list[BaseException] = []

    @cli.command("fail", example="lucid fail", extra="train", kept="the same command resumes")
    def fail() -> None:
        """Raise an error."""
        raise errors[0]

    yield errors
    cli.app.registered_commands.pop()


def test_no_command_shows_the_overview_and_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_teaches_with_an_example_that_parses(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main([name, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"Usage: lucid {name}" in shown
    example = shlex.split(shown.partition("Example: ")[2])
    assert example[:2] == ["lucid", name]
    group = typer.main.get_command(cli.app)
    command = group.commands[name]  # type: ignore[attr-defined]
    command.make_context(name, example[2:])


def test_an_unknown_command_is_refused_with_the_nearest(
    failing: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["fial"]) == 2
    assert "Did you mean 'fail'?" in capsys.readouterr().err


def test_an_empty_argument_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tokenize", "stdlib", ""]) == 2
    assert "expected a value for every argument, got an empty one" in capsys.readouterr().err


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"lucid-attention {version('lucid-attention')}"


def test_help_imports_nothing_heavy() -> None:
    program = "import sys; from lucid_lab import cli; cli.main(['--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not HEAVY & set(done.stderr.split())


ERRORS: dict[str, tuple[BaseException, int, str]] = {
    "a wrong value": (ValueError("steps must be positive, got 0"), 1, "error: steps must be positive, got 0"),
    "a missing file": (FileNotFoundError(2, "", "x.txt"), 1, "error: x.txt: no such file or folder: check the path"),
    "a missing package": (
        ModuleNotFoundError("no", name="tokenizers"),
        1,
        "error: needs the package 'tokenizers': in a checkout of lucid-attention, pip install '.[train]'",
    ),
    "a pickle": (
        UnpicklingError("use weights_only=False"),
        1,
        "error: a file that is read is damaged, or holds something other than tensors, which could run code",
    ),
    "a bug": (KeyError("q"), 1, "error: KeyError: 'q' (lucid --debug fail … shows where)"),
    "Ctrl-C": (KeyboardInterrupt(), 130, "stopped by Ctrl-C; the same command resumes"),
}


@pytest.mark.parametrize(("error", "code", "line"), ERRORS.values(), ids=ERRORS)
def test_a_command_that_fails_ends_with_one_line(
    error: BaseException, code: int, line: str, failing: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    failing.append(error)
    assert cli.main(["fail"]) == code
    assert capsys.readouterr().err.strip() == f"lucid fail: {line}"


def test_debug_shows_the_traceback(failing: list[BaseException]) -> None:
    failing.append(KeyError("q"))
    with pytest.raises(KeyError):
        cli.main(["--debug", "fail"])


def test_sigterm_ends_a_command_with_one_line_and_143() -> None:
    program = (
        "import os, sys; from lucid_lab import cli\n"
        "@cli.command('wait', example='', extra='', kept='nothing was written')\n"
        "def wait() -> None:\n    os.kill(os.getpid(), 15)\n    input()\n"
        "sys.exit(cli.main(['wait']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, stdin=subprocess.PIPE)
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stderr.strip() == "lucid wait: stopped by SIGTERM; nothing was written"


def test_a_reader_that_goes_away_is_no_error() -> None:
    program = f"{sys.executable} -m lucid_lab.cli --help | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.strip() in ("0", "1", "141")
