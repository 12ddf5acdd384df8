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


@command(
    "tokenize",
    example="lucid tokenize ./texts ./tokens --tokenizer train:32000",
    extra="train",
    kept="finished blocks are kept: the same command resumes",
)
def tokenize(
    source: Annotated[
        str,
        typer.Argument(
            help="file, folder or glob in quotes (text; .jsonl, .json: a document per line; .parquet; also .gz, .zst), "
            "an address (https://...), @LIST (a list of files and addresses, one a line), stdlib (the source of the "
            "Python library: works offline), or hf:NAME[:CONFIG] (a data set of the hub)"
        ),
    ],
    out: Annotated[Path, typer.Argument(help="folder to write, such as tokens/; an unfinished one is resumed")],
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="T",
            help="train:N (byte-level BPE with N tokens, trained on the source), a folder with a tokenizer.json, or a "
            "name of the hub, such as gpt2",
        ),
    ] = "train:32000",
    validation: Annotated[
        float, typer.Option(metavar="SHARE", help="share of the documents to hold out; at least one, unless 0")
    ] = 0.01,
    field: Annotated[str, typer.Option(metavar="NAME", help="key or column of the text")] = "text",
    split: Annotated[str, typer.Option(metavar="NAME", help="split of a data set of the hub")] = "train",
    config: Annotated[
        str | None, typer.Option("--config", "--subset", metavar="NAME", help="configuration of a data set of the hub")
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", help="only the first N documents")] = None,
    limit_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="only the first documents that have N tokens together")
    ] = None,
    min_document_tokens: Annotated[
        int, typer.Option(metavar="N", help="leave out documents with fewer tokens, such as 16384 for long contexts")
    ] = 0,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="take the files in a random order (default: their own)")
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="leave out lines of JSON that cannot be read")] = False,
) -> None:
    """Turn text into tokens for training."""
    from .data import tokenize as room

    manifest, is_new = room.tokenize(
        source,
        out,
        tokenizer=tokenizer,
        validation=validation,
        field=field,
        split=split,
        config=config,
        limit=limit,
        limit_tokens=limit_tokens,
        min_document_tokens=min_document_tokens,
        seed=seed,
        skip_bad=skip_bad,
    )
    print(f"{out}: {'written' if is_new else 'finished before, nothing to do'}")
    for name, counts in manifest["splits"].items():
        print(f"  {name:<10} {counts['tokens']:>14,} tokens in {counts['documents']:,} documents")
    print(f"  vocabulary {manifest['vocab_size']:>14,} tokens")
    if any(manifest["left_out"].values()):
        print("  left out   " + ", ".join(f"{count:,} {name}" for name, count in manifest["left_out"].items()))
    if not manifest["splits"]["validation"]["documents"]:
        print("  No document is held out: `lucid train` needs some. Tokenize into another OUT with --validation 0.1")


# --------------------------------------------------------------------------------------------------- training


@command("train", example="lucid train tiny_lm --attention lucid --set learning_rate=3e-3", extra="train")
def train(
    recipe: Annotated[str, typer.Argument(help="a name that `lucid recipes` lists")],
    attention: Annotated[
        str | None, typer.Option(metavar="NAME", help="attention of every layer: softmax, lucid, path, delta, ...")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT",
            help="folder written by `lucid tokenize`; .jsonl file of prompts with answers; stdlib; or a task, needles "
            "or memory_update",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="folder of the run (default: runs/RECIPE-ATTENTION-SEED)")
    ] = None,
    start: Annotated[
        str | None, typer.Option("--from", metavar="CHECKPOINT", help="start from the weights of this checkpoint")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="seed of weights and data")] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="change a field of the recipe, as --show prints it: learning_rate=3e-4, steps=500, batch_size=16 "
            "(sequences per step), sequence_length=1024, model.hidden_size=128, ... (may be repeated)",
        ),
    ] = None,
    parallel: Annotated[
        str,
        typer.Option(
            metavar="ddp|fsdp",
            help="how processes of torchrun share the work: ddp gives each the whole model, fsdp a part of it",
        ),
    ] = "ddp",
    restart: Annotated[
        bool, typer.Option("--restart", help="remove an earlier run in --out instead of resuming it")
    ] = False,
    is_dry: Annotated[
        bool, typer.Option("--dry-run", help="print model size, tokens, steps and memory of each device, and stop")
    ] = False,
    gpus: Annotated[int, typer.Option(metavar="N", min=1, help="number of devices of --dry-run")] = 1,
    show: Annotated[bool, typer.Option("--show", help="print the recipe with all changes, and stop")] = False,
) -> None:
    """Train a recipe; the same command resumes it."""
    import json
    from dataclasses import asdict

    from .processes import distributed_state
    from .training import run

    chosen = run.chosen_recipe(recipe, attention=attention, data=data, start=start, seed=seed, changes=changes or [])
    if show:
        return print(json.dumps(asdict(chosen), indent=1))
    if is_dry:
        return print("\n".join(run.dry_run(chosen, gpus, parallel)))
    name = chosen.attention if isinstance(chosen.attention, str) else "hybrid"
    folder = out or Path("runs") / f"{recipe}-{name}-{chosen.seed}"
    try:
        summary = run.train(chosen, folder, parallel=parallel, restart=restart)
    except KeyboardInterrupt:
        KEPT["train"] = run.what_is_kept(folder)
        raise
    if distributed_state().is_main_process:
        speed = summary["median_tokens_per_second"]
        print(f"{folder}: validation loss {summary['validation_loss']:.4f} after {summary['steps']} steps", end="")
        print(f", {speed:,.0f} tokens/s" if speed else "")
        print(f"  model {summary['model']}, curve {folder / 'loss.png'}, metrics {folder / 'metrics.jsonl'}")
    return None


@command("recipes", example="lucid recipes", extra="train")
def recipes() -> None:
    """List the recipes."""
    from .training.recipes import RECIPES

    for name, make in RECIPES.items():
        recipe = make()
        print(f"{name:<13} {recipe.about}")
        print(f"{'':13} {recipe.preset}, {recipe.tokens / 1e6:,.1f}M tokens, learning rate {recipe.learning_rate:g}")


# ------------------------------------------------------------------------------------------------- evaluation


# ----------------------------------------------------------------------------------------------------- claims


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
