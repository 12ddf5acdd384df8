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
    "tokenize": Command(
        "lucid_lab.data.tokenize",
        "turn text into tokens for training",
        "lucid tokenize ./texts ./tokens --tokenizer train:32000",
        kept="finished parts are kept: the same command resumes",
    ),
    "train": Command(
        "lucid_lab.training.command",
        "train a recipe; the same command resumes it",
        "lucid train tiny_lm --attention lucid --set learning_rate=3e-3",
        kept="the same command resumes from the last checkpoint",
    ),
    "recipes": Command("lucid_lab.training.recipes", "list the recipes", "lucid recipes"),
    "eval": Command(
        "lucid_lab.evals.command",
        "score a checkpoint: needles, BABILong, LongBench, SCROLLS, perplexity",
        "lucid eval ./model --tasks mniah --needles 2,4,6 --lengths 2048,4096 --samples 100 --out results",
        "eval",
        kept="the same command continues with the samples that are left",
    ),
    "compare": Command(
        "lucid_lab.evals.compare",
        "score several checkpoints on the same samples, with differences",
        "lucid compare ./softmax ./lucid --tasks mniah --needles 4 --lengths 2048 --samples 100",
        "eval",
        kept="the same command continues with the samples that are left",
    ),
    "make-data": Command(
        "lucid_lab.evals.make_data",
        "make prompts with answers for fine-tuning",
        "lucid make-data babilong data/babilong_train.jsonl --tasks qa1,qa2 --lengths 0,1024 --tokenizer ./model",
        "eval",
        kept="nothing was written",
    ),
    "demo": Command(
        "lucid_lab.claims.engine.demo",
        "train and compare attentions in minutes, and write a report",
        "lucid demo --full",
        kept="finished jobs stay, the same command continues from there",
    ),
    "experiment": Command(
        "lucid_lab.claims.engine.command",
        "test a claim of the paper, with a verdict",
        "lucid experiment memory_update --scale small",
        "eval",
        kept="finished jobs stay, the same command continues from there",
    ),
    "analyze": Command(
        "lucid_lab.analysis.command",
        "look into the attention of a checkpoint: condition numbers, hit rates, Jacobians, maps",
        "lucid analyze ./model --what conditioning,maps --tokens-from stdlib --length 1024 --layers 0,3",
        kept="the same command starts from the beginning",
    ),
    "bench": Command(
        "lucid_lab.bench.command",
        "measure what LUCID costs on this machine next to softmax attention",
        "lucid bench solve decode --threads 1 2",
        "bench",
        kept="finished cases of named benchmarks are kept: --resume continues from there",
    ),
    "doctor": Command(
        "lucid_lab.bench.doctor",
        "check every implementation on this machine's device, and say what impl='auto' uses there",
        "lucid doctor --json doctor.json",
        "bench",
        kept="results of the checks so far are not kept",
    ),
    "report": Command(
        "lucid_lab.report.command",
        "show experiments, training runs and evaluations as a page",
        "lucid report runs/experiments --out report.html",
        "plot",
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
