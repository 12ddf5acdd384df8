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


# ----------------------------------------------------------------------------------------------------- report


# ------------------------------------------------------------------------------------------------ checkpoints


@command(
    "convert",
    example="lucid convert ./Llama-3.2-1B ./Llama-3.2-1B-lucid --sharpness 64",
    extra="transformers",
    kept="nothing was written",
)
def convert(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="folder with config.json and weights")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="folder to be written; must not exist or be empty")],
    to: Annotated[
        str, typer.Option(metavar="lucid|softmax", help="softmax: the plain checkpoint, which every program reads")
    ] = "lucid",
    auto_map: Annotated[
        bool,
        typer.Option(
            "--auto-map/--no-auto-map",
            help="add a file through which programs open OUT with trust_remote_code=True, where lucid-attention is "
            "installed",
        ),
    ] = True,
    layers: Annotated[str | None, typer.Option(metavar="LIST", help="all, or as in 0,2,8-11")] = None,
    layers_from: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="choose the layers by their cost, from analysis.json of `lucid analyze CHECKPOINT --what "
            "disturbance`: the largest set that costs at most --most-change",
        ),
    ] = None,
    most_change: Annotated[
        float | None,
        typer.Option(metavar="NATS", help="by how much the loss may rise when these layers become LUCID at once"),
    ] = None,
    strength: Annotated[
        float | None,
        typer.Option(metavar="S", help="from 0, exactly the original model, to 1, LUCID (default)", show_default=False),
    ] = None,
    sharpness: Annotated[
        float | None,
        typer.Option(
            metavar="C",
            help="c of the preconditioner (default: √D). Start at 64 and let `lucid train --set sharpness_steps=0.5`, "
            "or SharpnessRamp, lower it in training",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Copy a pretrained checkpoint, with LUCID switched on, or off again."""
    from lucid_attention.models.convert import convert_and_report

    convert_and_report(
        checkpoint,
        out,
        to=to,
        auto_map=auto_map,
        layers=layers,
        layers_from=layers_from,
        most_change=most_change,
        strength=strength,
        sharpness=sharpness,
    )


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
