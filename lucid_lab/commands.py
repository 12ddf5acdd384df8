"""The table of commands, each imported when it is called, and how a command ends."""

import argparse
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import NamedTuple

from lucid_attention.messages import did_you_mean, explain_os_error, missing_package

from .stopping import Stopping

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# The exit code that shells give to a program whose reader has gone away.
BROKEN_PIPE = 141


class Command(NamedTuple):
    """A command.

    module: has `run(args) -> exit code`. `arguments` in the same package has the function `<command>_arguments`.
    extra: installs what it imports.
    kept: what is left of a command that was stopped, and how to go on.
    """

    module: str
    summary: str
    example: str
    extra: str = "train"
    kept: str = ""


COMMANDS = {
    "convert": Command(
        "lucid_attention.models.convert",
        "copy a pretrained checkpoint, with LUCID switched on, or off again",
        "lucid convert ./Llama-3.2-1B ./Llama-3.2-1B-lucid --sharpness 64",
        "transformers",
        kept="nothing was written",
    ),
    "run": Command(
        "lucid_attention.models.run_tool",
        "run lm_eval, transformers, trl or a script, so that it opens checkpoints with LUCID",
        "lucid run lm_eval --model hf --model_args pretrained=./model --tasks arc_easy",
        "transformers",
    ),
    "serve": Command(
        "lucid_attention.serving.command",
        "serve a checkpoint to programs that speak OpenAI's API, many requests at a time",
        "lucid serve ./model --port 8000 --cb-num-blocks 64",
        "serve",
    ),
}


def run_words(words: list[str], stopping: Stopping) -> int:
    """Run the command that the words name. Returns its exit code."""
    with _flushed_output():
        is_command = bool(words) and words[0] in COMMANDS
        return _run(words[0], words[1:], stopping) if is_command else _answer(words)


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a command. Nothing heavy is imported, so that help and misspelt options answer at once."""
    module = import_module(f"{COMMANDS[name].module.rpartition('.')[0]}.arguments")
    getattr(module, f"{name.replace('-', '_')}_arguments")(parser)


def _answer(words: list[str]) -> int:
    """What `lucid` says without a command."""
    overview = _overview()
    word = words[0] if words else ""
    if word == "--version":
        from importlib.metadata import version

        print(f"lucid-attention {version('lucid-attention')}")
        return 0
    if word not in ("", "-h", "--help"):
        overview.error(f"unknown command {word!r}{did_you_mean(word, COMMANDS)}: expected one of {', '.join(COMMANDS)}")
    overview.print_help()
    return 0 if words else 2


def _run(name: str, words: list[str], stopping: Stopping) -> int:
    command = COMMANDS[name]
    stopping.line = f"lucid {name}: stopped by {{signal}}" + (f"; {command.kept}" if command.kept else "")
    parser = argparse.ArgumentParser(
        prog=f"lucid {name}",
        description=f"{command.summary[0].upper()}{command.summary[1:]}.",
        epilog=f"example: {command.example}",
    )
    add_arguments(name, parser)
    args = parser.parse_args(words)
    try:
        module = import_module(command.module)
        stopping.begin()
        return int(module.run(args))
    except BaseException as error:
        code = stopping.exit_code if stopping.number or isinstance(error, KeyboardInterrupt) else 1
        stopping.end(code)
        # If the output cannot be written, the line is about that: this raises the error again.
        sys.stdout.flush()
        if code != 1:
            # Ctrl-C leaves the cursor behind ^C or a progress bar.
            line = "\n" * sys.stderr.isatty() + stopping.message()
        elif reason := _explanation(error, command, getattr(args, "out", None)):
            line = f"lucid {name}: error: {reason}"
        else:
            raise
        print(line, file=sys.stderr, flush=True)
        return code


def _explanation(error: BaseException, command: Command, out: object) -> str:
    """What the user can do about an error that is not ours; empty for other errors, which show a traceback.

    out: where the command writes.
    """
    if package := missing_package(error):
        return f'needs the package {package!r}. Install it with: pip install "lucid-attention[{command.extra}]"'
    # Only now: it imports a package, too.
    from .locks import FolderInUse

    if isinstance(error, FolderInUse):
        return str(error)
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
        kept = f". {command.kept[0].upper()}{command.kept[1:]}" if command.kept and error.errno in DISK_FULL else ""
        return explain_os_error(error, out) + kept
    return ""


@contextmanager
def _flushed_output() -> Iterator[None]:
    """Write out what was printed. A reader that has gone away, as in `lucid recipes | head -1`, ends the program."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        raise SystemExit(BROKEN_PIPE) from None
    except OSError as error:
        # Python would try again at its end.
        _discard_output()
        print(f"lucid: error: {explain_os_error(error, 'standard output')}", file=sys.stderr)
        raise SystemExit(1) from None


def _discard_output() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _overview() -> argparse.ArgumentParser:
    rows = "\n".join(f"  {name:<10} {command.summary}" for name, command in COMMANDS.items())
    return argparse.ArgumentParser(
        prog="lucid",
        usage="lucid COMMAND [arguments]",
        description="LUCID attention: softmax attention over decorrelated values.",
        epilog=f"commands:\n{rows}\n\n`lucid COMMAND --help` shows its arguments; `lucid --version` shows the release.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
