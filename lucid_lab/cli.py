"""`lucid <command>`. Options are declared here; a command imports its room when it runs: --help answers at once."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from lucid_attention.messages import explain_os_error, first_line, missing_package

app = typer.Typer(
    name="lucid",
    help="LUCID attention: softmax attention over decorrelated values.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
# By command: the extra that installs what it imports, and what survives an interrupt.
EXTRAS: dict[str, str] = {}
KEPT: dict[str, str] = {}


def command(name: str, *, example: str, extra: str, kept: str = "") -> Callable[[Callable[..., None]], Any]:
    """Register a command. Its docstring is its help; the example is shown below the options.

    extra: optional dependencies of the package that it needs. kept: what survives an interrupt, and how to resume.
    """
    EXTRAS[name], KEPT[name] = extra, kept
    return app.command(name, epilog=f"Example: {example}")


# Options that several commands share.
Out = Annotated[Path | None, typer.Option(metavar="FOLDER", help="folder to write into", show_default=False)]


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"lucid-attention {version('lucid-attention')}")
        raise typer.Exit


@app.callback()
def lucid(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the release and exit")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="show the traceback of an error")] = False,
) -> None:
    """LUCID attention: softmax attention over decorrelated values."""


# ---------------------------------------------------------------------------------------------- text to tokens


# --------------------------------------------------------------------------------------------------- training


# ------------------------------------------------------------------------------------------------- evaluation


# ----------------------------------------------------------------------------------------------------- claims


# --------------------------------------------------------------------------------------------------- analysis


# ------------------------------------------------------------------------------------------- bench and doctor


@command(
    "doctor",
    example="lucid doctor --json doctor.json",
    extra="bench",
    kept="nothing was written: run it again",
)
def doctor(
    device: Annotated[
        str, typer.Option(metavar="NAME", help="cpu, cuda, cuda:1 (default: an accelerator if there is one)")
    ] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="a few cases, and no proof for impl='auto'")] = False,
    json: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="write everything as JSON, for a bug report; - for standard output"),
    ] = None,
) -> None:
    """Check every implementation on a device, and prove the Triton kernels for impl='auto'.

    Each one runs twice, with uninitialised memory full of NaN, and is compared with the dense equation in float64. The
    exit code is 1 if one is wrong. impl='auto' uses the Triton kernels where they have been proved for the device and
    the versions of torch, Triton and lucid-attention. The proof is in ~/.cache/lucid_attention (or
    LUCID_ATTENTION_CACHE). `lucid bench` measures what they cost.
    """
    from lucid_attention.doctor import diagnose

    from .devices import find_device

    if not diagnose(find_device(device), quick=quick, json_file=json):
        raise typer.Exit(1)


# ----------------------------------------------------------------------------------------------------- report


# ------------------------------------------------------------------------------------------------ checkpoints


# ---------------------------------------------------------------------------------------- how a command ends


def main(argv: list[str] | None = None) -> int:
    """Run the command of these words (default: those of this process). Returns its exit code.

    0 done, 1 an error in one line, 2 wrong usage, 130 Ctrl-C, 143 SIGTERM.
    """
    words = sys.argv[1:] if argv is None else argv
    from .commands import COMMANDS, run_words

    if words and words[0] in COMMANDS:  # commands that are not below yet
        from .stopping import Stopping

        return run_words(words, Stopping())
    name = next((word for word in words if not word.startswith("-")), "")
    arrived: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        arrived.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, stop)
    try:
        code = int(app(args=words or ["--help"], prog_name="lucid", standalone_mode=False) or 0)
        sys.stdout.flush()
    except typer.TyperException as error:
        print(f"lucid {name}: error: {error.format_message()} (see lucid {name} --help)", file=sys.stderr)
        return error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    except BrokenPipeError:
        # The reader has gone away, as in `lucid recipes | head -1`. Python would flush again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if "--debug" in words:
            raise
        print(f"lucid {name}: error: {_explanation(error, name)}", file=sys.stderr)
        return 1
    if code == 130:  # Typer returns it after a KeyboardInterrupt.
        code = 128 + (arrived or [signal.SIGINT])[0]
        kept = f"; {KEPT[name]}" if KEPT.get(name) else ""
        print(f"\nlucid {name}: stopped by {'Ctrl-C' if code == 130 else 'SIGTERM'}{kept}", file=sys.stderr)
    return code if words else 2


def _explanation(error: Exception, name: str) -> str:
    """One line about an error: what happened, and what the user can do about it."""
    if package := missing_package(error):
        return f"needs the package {package!r}: install the extra [{EXTRAS.get(name, 'train')}] of lucid-attention"
    if isinstance(error, OSError):
        return explain_os_error(error)
    if isinstance(error, ValueError | TypeError):
        return str(error).strip() or type(error).__name__
    return f"{type(error).__name__}: {first_line(error)} (lucid --debug {name} … shows where)"


if __name__ == "__main__":
    sys.exit(main())
