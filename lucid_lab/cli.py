"""`lucid <command>`. Options are declared here; a command imports its room when it runs: --help answers at once."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
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


def _option(metavar: str, text: str, *names: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=text)


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
    # Read when torch is imported: threads that wait leave the CPU to others (docs/costs.md).
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


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
            "Python library: works offline), or hf:NAME (a data set of the hub)"
        ),
    ],
    out: Annotated[Path, typer.Argument(help="folder to write, such as tokens/; an unfinished one is resumed")],
    tokenizer: Annotated[
        str,
        _option(
            "T",
            "train:N (byte-level BPE with N tokens, trained on the source), a folder with a tokenizer.json, or a "
            "name of the hub, such as gpt2",
        ),
    ] = "train:32000",
    validation: Annotated[float, _option("SHARE", "share of the documents to hold out; at least one, unless 0")] = 0.01,
    share: Annotated[float, _option("SHARE", "share of the documents to read, chosen by a hash of their text")] = 1.0,
    field: Annotated[str, _option("NAME", "key or column of the text")] = "text",
    split: Annotated[str, _option("NAME", "split of a data set of the hub")] = "train",
    config: Annotated[str | None, _option("NAME", "configuration of a data set of the hub")] = None,
    limit_tokens: Annotated[int | None, _option("N", "only the first documents that have N tokens together")] = None,
    min_document_tokens: Annotated[
        int, _option("N", "leave out documents with fewer tokens, such as 16384 for long contexts")
    ] = 0,
    seed: Annotated[int | None, _option("N", "take the files in a random order (default: their own)")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="leave out lines of JSON that cannot be read")] = False,
) -> None:
    """Turn text into tokens for training."""
    arguments = locals()
    from .data import tokenize as room

    manifest, is_new = room.tokenize(**arguments)
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
        str | None, _option("NAME", "attention of every layer: softmax, lucid, path, delta, ...")
    ] = None,
    data: Annotated[
        str | None,
        _option(
            "WHAT",
            "folder written by `lucid tokenize`; .jsonl file of prompts with answers; stdlib; or a task, needles "
            "or latest_value",
        ),
    ] = None,
    out: Annotated[Path | None, _option("FOLDER", "folder of the run (default: runs/RECIPE-ATTENTION-SEED)")] = None,
    start: Annotated[str | None, _option("CHECKPOINT", "start from the weights of this checkpoint", "--from")] = None,
    seed: Annotated[int | None, _option("N", "seed of weights and data")] = None,
    changes: Annotated[
        list[str] | None,
        _option(
            "KEY=VALUE",
            "change a field of the recipe, as --show prints it: learning_rate=3e-4, steps=500, batch_size=16 "
            "(sequences per step), sequence_length=1024, model.hidden_size=128, ... (may be repeated)",
            "--set",
        ),
    ] = None,
    parallel: Annotated[
        str,
        _option(
            "ddp|fsdp", "how processes of torchrun share the work: ddp gives each the whole model, fsdp a part of it"
        ),
    ] = "ddp",
    restart: Annotated[
        bool, typer.Option("--restart", help="remove an earlier run in --out instead of resuming it")
    ] = False,
    is_dry: Annotated[
        bool, typer.Option("--dry-run", help="print model size, tokens, steps and memory of each device, and stop")
    ] = False,
    gpus: Annotated[int, typer.Option(metavar="N", min=1, help="number of devices of --dry-run")] = 1,
    gpu_memory: Annotated[
        float | None, typer.Option(metavar="GB", help="of a device: --dry-run fails if the run does not fit")
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="print the recipe with all changes, and stop")] = False,
) -> None:
    """Train a recipe; the same command resumes it."""
    import json
    from dataclasses import asdict

    from .training import run
    from .training.run import distributed_state

    chosen = run.chosen_recipe(recipe, attention=attention, data=data, start=start, seed=seed, changes=changes or [])
    if show:
        return print(json.dumps(asdict(chosen), indent=1))
    if is_dry:
        return print("\n".join(run.dry_run(chosen, gpus, parallel, gpu_memory)))
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

    for name, recipe in RECIPES.items():
        print(f"{name:<13} {recipe.about}")
        print(f"{'':13} {recipe.preset}, {recipe.tokens / 1e6:,.1f}M tokens, learning rate {recipe.learning_rate:g}")


# ------------------------------------------------------------------------------------------------- evaluation


def _list_of(kind: type, example: str) -> Callable[[str], tuple[Any, ...]]:
    """ "2,4,6" -> (2, 4, 6)."""

    def parse(text: str) -> tuple[Any, ...]:
        try:
            values = tuple(kind(part.strip()) for part in text.split(","))
        except ValueError:
            values = (-1,)
        if kind is not str and min(values) < 0:
            raise typer.BadParameter(f"expected numbers separated by commas, such as {example}, got {text!r}")
        return values

    return parse


_NAMES, _INTEGERS = _list_of(str, ""), _list_of(int, "0,3")


def _given(**options: Any) -> dict[str, Any]:
    """The options that the command line has."""
    return {name: value for name, value in options.items() if value is not None}


def _task_options(arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of `lucid eval`: the options of tasks that were given, and how to run."""
    how = {name: arguments.pop(name) for name in ("tokenizer", "batch_size", "limit", "dtype")}
    others = ("folders", "tasks", "out", "task_path")
    return _given(**{name: value for name, value in arguments.items() if name not in others}), how


def _list_option(parser: Callable[[str], Any], text: str, metavar: str = "LIST") -> Any:
    return typer.Option(parser=parser, metavar=metavar, help=text, show_default=False)


Tasks = Annotated[Any, _list_option(_NAMES, "names of tasks, as in sniah,mniah; list shows all")]
Lengths = Annotated[Any, _list_option(_INTEGERS, "lengths in tokens, question and answer included")]
Needles = Annotated[Any, _list_option(_INTEGERS, "numbers of needles")]
Samples = Annotated[int | None, _option("N", "samples for every task, length and number of needles")]
Seed = Annotated[int | None, _option("N", "seed of the samples")]
Variants = Annotated[
    Any, _list_option(_NAMES, "tasks of sniah, mniah, longbench, scrolls, as in multikey_1,multivalue")
]
Stories = Annotated[Any, _list_option(_NAMES, "stories of babilong (default: qa1 to qa5)")]
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
BatchSize = Annotated[int, _option("N", "samples at a time")]
Limit = Annotated[int | None, _option("N", "only the first N samples of every task")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="of the weights; auto: as saved")
]


@command(
    "eval",
    example="lucid eval ./model --tasks mniah --needles 2,4,6 --lengths 2048,4096 --samples 100 --out results",
    extra="eval",
    kept="the same command continues with the samples that are left",
)
@command(
    "compare",
    example="lucid compare ./softmax ./lucid --tasks mniah --needles 4 --lengths 2048 --samples 100",
    extra="eval",
    kept="the same command continues with the samples that are left",
)
def eval_command(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="CHECKPOINT",
            help="folder with config.json and weights, or with results of lucid eval to compare; several are compared "
            "with the first",
            show_default=False,
        ),
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
    out: Annotated[
        Path | None,
        _option(
            "FOLDER",
            "folder to write into (default: results/NAME-HASH); of several checkpoints, each has its own there",
        ),
    ] = None,
    task_path: Annotated[
        bool, typer.Option("--task-path", help="print the folder of our tasks, for lm_eval --include_path, and exit")
    ] = False,
) -> None:
    """Score one checkpoint or several with lm-evaluation-harness.

    Tasks: needles, BABILong, LongBench, SCROLLS, perplexity. Several checkpoints are scored on the same samples, and
    compared with paired standard errors.
    """
    options, how = _task_options(locals())
    from .evals.evaluate import TASK_FOLDER, compare, evaluate, listing, results_table

    if task_path or tasks == ("list",):
        return print(TASK_FOLDER if task_path else listing())
    if folders and len(folders) > 1:
        table = compare(folders, tasks or (), options, out or Path("results"), **how)
        return print(table) if table is not None else None
    if not folders or not tasks:
        raise ValueError("expected a CHECKPOINT and --tasks NAMES; --tasks list shows all tasks")
    done = evaluate(folders[0], tasks, options, out, **how)
    if done.results is not None:
        print(f"{results_table(done.results)}\nresults.json and samples: {done.folder}")
    return None


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
    part: Annotated[
        str | None, _option("PART", "of 2WikiMQA and MultifieldQA: train (a half) or all, as the authors")
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="prompts without instructions, as in the authors' scripts")
    ] = False,
) -> None:
    """Make prompts with answers for fine-tuning.

    No evaluation asks them, except with --part all.
    """
    from .evals.make_data import training_lines, write_lines

    options = _given(
        lengths=lengths, samples=samples, seed=seed, tokenizer=tokenizer, haystack=haystack, needles=needles,
        tasks=tasks, babilong_hub=babilong_hub, data_dir=data_dir, part=part, plain=plain or None,
    )  # fmt: skip
    print(f"{out}: {write_lines(training_lines(kind, options), out)} prompts with answers")


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
            "seeds, a verdict; hours: longer, for claims on words and variants; demo: as in `lucid demo --full`"
        ),
    ] = "small",
    out: Annotated[Path, _option("FOLDER", "folder of the results")] = Path("runs/experiments"),
    processes: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="runs at a time (default: one per core)", show_default=False)
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="run again what is kept")] = False,
    model: Annotated[str, _option("FOLDER", "checkpoint for `recipe`, see tools/get_smollm2.py")] = "",
    texts: Annotated[str, _option("FOLDER", ".txt files for `recipe`, see tools/get_texts.py")] = "",
) -> None:
    """Test a claim of the paper, with a verdict."""
    arguments = locals()
    from .claims import run_experiments

    run_experiments(**arguments)


@command("demo", example="lucid demo --full", extra="train", kept="finished runs are kept, the same command resumes")
def demo(
    full: Annotated[
        bool, typer.Option("--full", help="every attention, several seeds, more lengths: 9 to 16 minutes on two cores")
    ] = False,
    out: Annotated[Path, _option("FOLDER", "folder of results and report")] = Path("runs/demo"),
) -> None:
    """Train and compare attentions in minutes, and write a report.

    Softmax attention, LUCID and DeltaNet learn two tasks (overwritten keys, many needles); the condition number of P is
    measured against length, and the operator's cost against SDPA.
    """
    from .claims import run_demo

    run_demo(full, out)


# --------------------------------------------------------------------------------------------------- analysis


@command(
    "analyze",
    example="lucid analyze ./model --what conditioning,maps --tokens-from stdlib --length 1024 --layers 0,3",
    extra="train",
    kept="the same command starts from the beginning",
)
def analyze(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="folder with config.json and weights")],
    what: Annotated[
        Any,
        _list_option(
            _NAMES,
            "some of conditioning,hit_rate,jacobian,maps,disturbance (default: all that apply but the last)",
            "NAMES",
        ),
    ] = None,
    text: Annotated[str | None, typer.Option(help="file with a text, or the text itself")] = None,
    tokens_from: Annotated[
        str | None, _option("SOURCE", "stdlib, a text file, a folder of texts or of tokens (default: stdlib)")
    ] = None,
    length: Annotated[int | None, typer.Option(help="tokens to analyse (default: 512)")] = None,
    lengths: Annotated[
        Any, _list_option(_INTEGERS, "lengths of prefixes, for κ (default: doubling from 32)", "N,N")
    ] = None,
    find: Annotated[
        list[str] | None, _option("PHRASE", "phrase that the last token should read, for hit_rate (repeatable)")
    ] = None,
    layers: Annotated[Any, _list_option(_INTEGERS, "counted from 0 (default: all)", "N,N")] = None,
    bins: Annotated[int | None, typer.Option(help="rows and columns of the largest map (default: 128)")] = None,
    tokenizer: Annotated[Path | None, _option("FOLDER", "folder with a tokenizer (default: the checkpoint)")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, … (default: an accelerator if there is one)")] = None,
    out: Annotated[Path | None, _option("FOLDER", "folder to write into (default: runs/analysis/NAME)")] = None,
) -> None:
    """Look into the attention of a checkpoint.

    It computes condition numbers κ, hit rates, Jacobians and maps of the weights, which lucid report draws. For a
    softmax model κ is that of the P that LUCID would have, and both maps are equal.
    """
    arguments = locals()
    from .analysis import command

    command.analyze(**arguments)


# ------------------------------------------------------------------------------------------- bench and doctor


@command(
    "bench",
    example="lucid bench solve decode --threads 1 2",
    extra="bench",
    kept="finished points of named cases are kept: --resume continues from there",
)
def bench(
    cases: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CASE",
            show_default=False,
            help="solve, blocks, decode, path, memory, model_training, model_decode, on_device; without any, a "
            "quick look of a minute",
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="run all cases but on_device: more than an hour")] = False,
    threads: Annotated[
        list[int] | None, _option("N", "thread counts, such as --threads 1 2 (default: 1; for --all 1 2)")
    ] = None,
    device: Annotated[str, _option("NAME", "device of on_device (default: an accelerator if there is one)")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="small sizes and few rounds: a test that cases run")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="skip the points whose records are in --out")] = False,
    publish: Annotated[
        bool,
        typer.Option(
            "--publish",
            help="write into records/bench of a checkout, and docs/benchmarks.md from all records; without cases, only "
            "the page",
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="for CASE.json (default: bench_results)", show_default=False)
    ] = None,
) -> None:
    """Measure what LUCID costs on this machine.

    LUCID races torch's softmax attention. Every contestant first has to agree with the defining equation in float64.
    Results are ratios within one run: a busy machine makes them scatter. Some virtual machines need a setting for
    bfloat16, which `make bench` finds.
    """
    options = {name: value for name, value in locals().items() if name not in ("cases", "threads")}
    from .bench.run import run

    # An option takes one value: the other thread counts of `--threads 1 2` arrive among the cases.
    counts = [*(threads or []), *(int(word) for word in cases or [] if word.isdecimal())]
    run([word for word in cases or [] if not word.isdecimal()], thread_counts=counts, **options)


@command("doctor", example="lucid doctor --json doctor.json", extra="bench", kept="nothing was written: run it again")
def doctor(
    device: Annotated[str, _option("NAME", "cpu, cuda, cuda:1 (default: an accelerator if there is one)")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="a few cases, and no proof for impl='auto'")] = False,
    json: Annotated[
        str | None, _option("FILE", "write everything as JSON, for a bug report; - for standard output")
    ] = None,
) -> None:
    """Check every implementation on a device.

    Each one runs twice, with uninitialised memory full of NaN, and is compared with the dense equation in float64. The
    exit code is 1 if one is wrong. impl='auto' uses the Triton kernels where they have been proved for the device and
    the versions of torch, Triton and lucid-attention. The proof is in ~/.cache/lucid_attention (or
    LUCID_ATTENTION_CACHE). `lucid bench` measures what they cost.
    """
    from lucid_attention.doctor import diagnose, find_device

    if not diagnose(find_device(device), quick=quick, json_file=json):
        raise typer.Exit(1)


# ----------------------------------------------------------------------------------------------------- report


@command("report", example="lucid report runs/experiments --out report.html", extra="plot")
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUNS", help="folders, searched at any depth, or files of other commands")
    ],
    out: Annotated[Path | None, _option("FILE", "HTML page (default: report.html)")] = None,
    markdown: Annotated[Path | None, _option("FILE", "write the tables as Markdown")] = None,
    title: Annotated[str | None, typer.Option(help="title of the page")] = None,
) -> None:
    """Show runs and results as one page that opens offline.

    It reads result.json of lucid experiment and lucid demo; metrics.jsonl and trainer_state.json of trainings;
    results.json and results_*.json of lm-eval; analysis.json and maps.json of lucid analyze.
    """
    from .report.page import write_files

    write_files(runs, out, markdown, title)


# ------------------------------------------------------------------------------------------------ checkpoints


@command(
    "convert",
    example="lucid convert ./Llama-3.2-1B ./Llama-3.2-1B-lucid --calibrate ./texts",
    extra="train",
    kept="nothing was written",
)
def convert(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="folder with config.json and weights")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="folder to be written; must not exist or be empty")],
    to: Annotated[str, _option("lucid|softmax", "softmax: the plain checkpoint, which every program reads")] = "lucid",
    auto_map: Annotated[
        bool,
        typer.Option(
            "--auto-map/--no-auto-map",
            help="add a file through which programs open OUT with trust_remote_code=True, where lucid-attention is "
            "installed",
        ),
    ] = True,
    layers: Annotated[str | None, _option("LIST", "all, or as in 0,2,8-11")] = None,
    strength: Annotated[float | None, _option("S", "from 0, exactly the original model, to 1, LUCID (default)")] = None,
    sharpness: Annotated[
        float | None, _option("C", "c of the preconditioner (default: √D); a larger one acts less")
    ] = None,
    keys: Annotated[
        Literal["whitened", "centered", "raw"] | None,
        typer.Option(
            help="what P is made of: keys without what they have in common (whitened, the default, or centered, by "
            "calibration), or raw, which breaks most models",
            show_default=False,
        ),
    ] = None,
    calibrate: Annotated[
        str | None,
        _option(
            "TEXTS",
            "source of texts for the calibration, as in lucid tokenize: about 5000 tokens are used (default: the help "
            "texts of Python)",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="where the model is calibrated and measured")] = "auto",
) -> None:
    """Copy a pretrained checkpoint with LUCID on, or off again.

    LUCID is calibrated on texts, and the loss of the model before and after is printed.
    """
    arguments = locals()
    from .analysis.conversion import convert_and_report

    convert_and_report(**arguments)


# ---------------------------------------------------------------------------------------- how a command ends


def main(argv: list[str] | None = None) -> int:
    """Run the command of these words (default: those of this process). Returns its exit code.

    0 done, 1 an error in one line, 2 wrong usage, 130 Ctrl-C, 143 SIGTERM.
    """
    words = sys.argv[1:] if argv is None else argv
    name = next((word for word in words if not word.startswith("-")), "")
    arrived: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        arrived.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, stop)
    try:
        if "" in words:
            raise typer.BadParameter("expected a value for every argument, got an empty one")
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
        extra = EXTRAS.get(name, "train")
        return f"needs the package {package!r}: in a checkout of lucid-attention, pip install '.[{extra}]'"
    if isinstance(error, OSError):
        return explain_os_error(error)
    if isinstance(error, UnpicklingError):
        # torch's own text advises weights_only=False, with which the file could run code.
        return "a file that is read is damaged, or holds something other than tensors, which could run code"
    if isinstance(error, ValueError | TypeError):
        return str(error).strip() or type(error).__name__
    return f"{type(error).__name__}: {first_line(error)} (lucid --debug {name} … shows where)"


if __name__ == "__main__":
    sys.exit(main())
