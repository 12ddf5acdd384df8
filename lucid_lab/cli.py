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


@command(
    "experiment",
    example="lucid experiment memory_update --scale small",
    extra="eval",
    kept="finished runs are kept, the same command resumes",
)
def experiment(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME", help="one or several of `lucid experiment list`, or all")
    ],
    scale: Annotated[
        str,
        typer.Option(
            help="smoke: does it run (seconds); quick: as in `lucid demo`; small: minutes on two cores, several "
            "seeds, a verdict; hours: needle_lm, babilong and variants for longer; demo: as in `lucid demo --full`"
        ),
    ] = "small",
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="folder of the results")] = Path("runs/experiments"),
    processes: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="runs at a time (default: one per core)", show_default=False)
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="run again what is kept")] = False,
    model: Annotated[
        str, typer.Option(metavar="FOLDER", help="checkpoint for `pretrained`, see tools/get_smollm2.py")
    ] = "",
    texts: Annotated[
        str,
        typer.Option(metavar="FOLDER", help="long .txt files for `pretrained`, see tools/get_texts.py"),
    ] = "",
) -> None:
    """Test a claim of the paper, with a verdict."""
    from .claims import run_experiments

    run_experiments(names, scale=scale, out=out, processes=processes, restart=restart, model=model, texts=texts)


@command("demo", example="lucid demo --full", extra="train", kept="finished runs are kept, the same command resumes")
def demo(
    full: Annotated[
        bool, typer.Option("--full", help="every attention, several seeds, more lengths: 9 to 16 minutes on two cores")
    ] = False,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="folder of results and report")] = Path("runs/demo"),
) -> None:
    """Train and compare attentions in minutes, and write a report.

    Softmax attention, LUCID and DeltaNet learn two tasks (overwritten keys, many needles); the condition number of P is
    measured against length, and the operator's cost against SDPA.
    """
    from .claims import run_demo

    run_demo(full, out)


# --------------------------------------------------------------------------------------------------- analysis


# ------------------------------------------------------------------------------------------- bench and doctor


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
