"""`lucid <command>`. Options are declared here; a command imports its room when it runs: --help answers at once."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

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


def _counts(text: str) -> tuple[int, ...]:
    """ "2,4,6" -> (2, 4, 6)."""
    return tuple(int(part) for part in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    """ "qa1,qa2" -> ("qa1", "qa2")."""
    return tuple(part.strip() for part in text.split(","))


def _given(**options: Any) -> dict[str, Any]:
    """The options that the command line has."""
    return {name: value for name, value in options.items() if value is not None}


def _list_option(parser: Callable[[str], tuple[Any, ...]], text: str) -> Any:
    return typer.Option(parser=parser, metavar="LIST", help=text, show_default=False)


def _option(metavar: str, text: str) -> Any:
    return typer.Option(metavar=metavar, help=text, show_default=False)


Tasks = Annotated[Any, _list_option(_names, "names of tasks, as in sniah,mniah; list shows all")]
Lengths = Annotated[Any, _list_option(_counts, "lengths in tokens, question and answer included")]
Needles = Annotated[Any, _list_option(_counts, "numbers of needles")]
Samples = Annotated[int | None, _option("N", "samples for every task, length and number of needles")]
Seed = Annotated[int | None, _option("N", "seed of the samples")]
Variants = Annotated[Any, _list_option(_names, "tasks of sniah and mniah, as in multikey_1,multivalue (default: all)")]
Stories = Annotated[Any, _list_option(_names, "stories of babilong (default: qa1 to qa5)")]
Hay = Annotated[
    str | None,
    _option("WHAT", "noise, needles, prose (Python's docstrings), essays or pg19 (from the hub), or a text or folder"),
]
AnswerTokens = Annotated[int | None, _option("N", "tokens for the answer (default: the benchmark's)")]
Published = Annotated[
    str | None,
    _option("NAME", "published stories on PG19, RMT-team/babilong-1k-samples or a folder with its data/, not our own"),
]
DataDir = Annotated[str | None, _option("FOLDER", "folder with the files of LongBench and SCROLLS (default: the hub)")]
Part = Annotated[str | None, _option("PART", "of 2WikiMQA and MultifieldQA: held_out (the half not trained on) or all")]
MaxLength = Annotated[
    int | None, _option("N", "tokens of LongBench and SCROLLS; longer prompts lose their middle (default: the paper's)")
]
Text = Annotated[str | None, _option("FILE", "text to take losses on: a text, .jsonl or .parquet file, or a folder")]
TokenizerFolder = Annotated[Path | None, _option("FOLDER", "tokenizer for a checkpoint that has none")]
BatchSize = Annotated[int, typer.Option(metavar="N", help="samples at a time")]
Limit = Annotated[int | None, _option("N", "only the first N samples of every task")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="of the weights; auto: as saved")
]
ComparedOut = Annotated[Path, typer.Option(metavar="FOLDER", help="gets a folder NAME-HASH for each checkpoint")]


@command(
    "eval",
    example="lucid eval ./model --tasks mniah --needles 2,4,6 --lengths 2048,4096 --samples 100 --out results",
    extra="eval",
    kept="the same command continues with the samples that are left",
)
def eval_command(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(metavar="CHECKPOINT", help="folder with config.json and weights", show_default=False),
    ] = None,
    tasks: Tasks = None,
    lengths: Lengths = None,
    needles: Needles = None,
    samples: Samples = None,
    seed: Seed = None,
    variants: Variants = None,
    haystack: Hay = None,
    answer_tokens: AnswerTokens = None,
    qa: Stories = None,
    babilong_hub: Published = None,
    data_dir: DataDir = None,
    part: Part = None,
    max_length: MaxLength = None,
    text: Text = None,
    tokenizer: TokenizerFolder = None,
    batch_size: BatchSize = 1,
    limit: Limit = None,
    dtype: Dtype = "auto",
    out: Out = None,
    task_path: Annotated[
        bool, typer.Option("--task-path", help="print the folder of our tasks, for lm_eval --include_path, and exit")
    ] = False,
) -> None:
    """Score a checkpoint with lm-evaluation-harness: needles, BABILong, LongBench, SCROLLS, perplexity."""
    from .evals.evaluate import TASK_FOLDER, evaluate, listing, results_table

    if task_path or tasks == ("list",):
        print(TASK_FOLDER if task_path else listing())
        return
    if checkpoint is None or not tasks:
        raise ValueError("expected a CHECKPOINT and --tasks NAMES; --tasks list shows all tasks")
    options = _given(
        lengths=lengths, needles=needles, samples=samples, seed=seed, variants=variants, haystack=haystack,
        answer_tokens=answer_tokens, qa=qa, babilong_hub=babilong_hub, data_dir=data_dir, part=part,
        max_length=max_length, text=text,
    )  # fmt: skip
    how: dict[str, Any] = {"tokenizer": tokenizer, "batch_size": batch_size, "limit": limit, "dtype": dtype}
    done = evaluate(checkpoint, tasks, options, out, **how)
    if done.results is not None:
        print(f"{results_table(done.results)}\nresults.json and samples: {done.folder}")


@command(
    "compare",
    example="lucid compare ./softmax ./lucid --tasks mniah --needles 4 --lengths 2048 --samples 100",
    extra="eval",
    kept="the same command continues with the samples that are left",
)
def compare_command(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER...", help="checkpoints, or results of lucid eval; compared to the first one"),
    ],
    tasks: Tasks = None,
    lengths: Lengths = None,
    needles: Needles = None,
    samples: Samples = None,
    seed: Seed = None,
    variants: Variants = None,
    haystack: Hay = None,
    answer_tokens: AnswerTokens = None,
    qa: Stories = None,
    babilong_hub: Published = None,
    data_dir: DataDir = None,
    part: Part = None,
    max_length: MaxLength = None,
    text: Text = None,
    tokenizer: TokenizerFolder = None,
    batch_size: BatchSize = 1,
    limit: Limit = None,
    dtype: Dtype = "auto",
    out: ComparedOut = Path("results"),
) -> None:
    """Score checkpoints on the same samples, and print the differences with paired standard errors."""
    from .evals.compare import compare

    options = _given(
        lengths=lengths, needles=needles, samples=samples, seed=seed, variants=variants, haystack=haystack,
        answer_tokens=answer_tokens, qa=qa, babilong_hub=babilong_hub, data_dir=data_dir, part=part,
        max_length=max_length, text=text,
    )  # fmt: skip
    how: dict[str, Any] = {"tokenizer": tokenizer, "batch_size": batch_size, "limit": limit, "dtype": dtype}
    table = compare(folders, tasks or (), options, out, **how)
    if table is not None:
        print(table)


@command(
    "make-data",
    example="lucid make-data babilong data/train.jsonl --tasks qa1,qa2 --lengths 0,1024 --tokenizer ./model",
    extra="eval",
    kept="nothing was written",
)
def make_data_command(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="needles, babilong, longbench, qasper or qmsum")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help=".jsonl file to be written")],
    lengths: Lengths = None,
    samples: Samples = None,
    seed: Seed = None,
    tokenizer: Annotated[Path | None, _option("FOLDER", "tokenizer of the model that is to be trained")] = None,
    haystack: Hay = None,
    needles: Needles = None,
    tasks: Stories = None,
    babilong_hub: Published = None,
    data_dir: DataDir = None,
) -> None:
    """Make prompts with answers for fine-tuning, which no evaluation asks."""
    from .evals.make_data import training_lines, write_lines

    options = _given(
        lengths=lengths, samples=samples, seed=seed, tokenizer=tokenizer, haystack=haystack, needles=needles,
        tasks=tasks, babilong_hub=babilong_hub, data_dir=data_dir,
    )  # fmt: skip
    print(f"{out}: {write_lines(training_lines(kind, options), out)} prompts with answers")


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
