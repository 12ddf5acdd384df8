"""`lucid make-data`: prompts with answers for fine-tuning, from the training side of the benchmarks."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lucid_attention.files import finish, partial_path

from .benchmarks.babi import TASKS as STORIES
from .benchmarks.babilong import Babilong, published_samples
from .benchmarks.babilong import make_sample as make_story_sample
from .benchmarks.haystacks import warn_of_repeats
from .benchmarks.longqa import HALVED, documents
from .benchmarks.needles import Needles
from .benchmarks.needles import make_sample as make_needle_sample
from .cells import LONGEST, TRAINING_SEED, EvalError, check_seed
from .command import flags
from .tokens import load_tokenizer

Line = dict[str, Any]
# Prompts for each task and length: more than a training needs.
MOST_SAMPLES = 10_000_000


def _load_tokenizer(samples: int, lengths: tuple[int, ...], seed: int, tokenizer: str) -> Any:
    """The tokenizer, after a check of the arguments that both kinds of samples have."""
    check_seed(seed)
    if samples < 1:
        raise EvalError(f"--samples must be at least 1, got {samples}")
    if samples > MOST_SAMPLES:
        raise EvalError(f"--samples must be at most {MOST_SAMPLES}, got {samples}")
    if max(lengths) > LONGEST:
        raise EvalError(f"--lengths must be at most {LONGEST}, got {max(lengths)}")
    if not tokenizer:
        raise EvalError("--tokenizer is needed: lengths are in its tokens")
    return load_tokenizer(tokenizer)


def _repeats(sample: Line, haystack: str, length: int) -> Line:
    """{"haystack_repeats"} of a sample whose haystack was too short, which is said for the first one; else {}."""
    repeats = sample["haystack_repeats"]
    if repeats and not sample["index"]:
        warn_of_repeats(haystack, length, [repeats])
    return {"haystack_repeats": repeats} if repeats else {}


def babilong_lines(
    *,
    tasks: tuple[str, ...],
    lengths: tuple[int, ...],
    samples: int,
    seed: int,
    tokenizer: str,
    haystack: str = "prose",
) -> Iterator[Line]:
    """`samples` prompts for every task at every length. No evaluation asks about one of their stories."""
    loaded = _load_tokenizer(samples, lengths, seed, tokenizer)
    settings = [Babilong(task, length, "train", haystack, seed=seed) for length in lengths for task in tasks]
    # Tasks and lengths alternate, so that the beginning of the file is like the whole.
    for index in range(samples):
        for setting in settings:
            sample = make_story_sample(setting, loaded, index)
            line = {"prompt": sample["prompt"], "answer": f" {sample['answer']}"}
            yield line | _repeats(sample, haystack, setting.length)


def published_lines(name: str, tasks: tuple[str, ...], lengths: tuple[int, ...], samples: int) -> Iterator[Line]:
    """`samples` prompts for every task at every length, from a published training set of BABILong."""
    if samples < 1:
        raise EvalError(f"--samples must be at least 1, got {samples}")
    # Tasks and lengths alternate, as above.
    sets = [published_samples(name, task, length, samples) for length in lengths for task in tasks]
    for index in range(samples):
        for members in sets:
            if index < len(members):
                yield {"prompt": members[index]["prompt"], "answer": f" {members[index]['answer'].strip()}"}


def needle_lines(
    *,
    needles: tuple[int, ...],
    lengths: tuple[int, ...],
    samples: int,
    seed: int,
    tokenizer: str,
    haystack: str = "prose",
) -> Iterator[Line]:
    """`samples` prompts for every number of needles at every length, with the tokens that hold the answers."""
    loaded = _load_tokenizer(samples, lengths, seed, tokenizer)
    training_seed = seed + TRAINING_SEED
    settings = [
        Needles(length, count, haystack=haystack, seed=training_seed) for length in lengths for count in needles
    ]
    for index in range(samples):
        for setting in settings:
            sample = make_needle_sample(setting, loaded, index)
            answer = f" {', '.join(sample['outputs'])}."
            prompt = f"{sample['input']} {sample['gen_prefix']}"
            line = {"prompt": prompt, "answer": answer, "answer_spans": sample["answer_spans"]}
            yield line | _repeats(sample, haystack, setting.length)


def question_lines(tasks: tuple[str, ...], data_dir: str = "") -> Iterator[Line]:
    """The paper's training splits of LongBench and SCROLLS. A question with several answers gets the first."""
    for task in tasks:
        for document in documents(task, "train", data_dir):
            yield {"prompt": document["prompt"], "answer": f" {document['answers'][0].strip()}"}


# The options of every kind, with their defaults.
SAMPLES: dict[str, Any] = {
    "lengths": (0, 1024, 2048, 4096),
    "samples": 1000,
    "seed": 0,
    "tokenizer": "",
    "haystack": "prose",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "needles": SAMPLES | {"needles": (4,)},
    "babilong": SAMPLES | {"tasks": tuple(STORIES), "babilong_hub": ""},
    **{kind: {"data_dir": ""} for kind in ("longbench", "qasper", "qmsum")},
}


def _with_defaults(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments with the defaults of their kind. An option that the kind does not take is an error."""
    defaults = OPTIONS[args.kind]
    given = {name: value for name, value in vars(args).items() if value is not None and name not in ("kind", "out")}
    if unused := [name for name in given if name not in defaults]:
        raise EvalError(f"{args.kind} takes {flags(defaults)}, and not {flags(unused)}")
    return argparse.Namespace(kind=args.kind, out=args.out, **(defaults | given))


def _babilong(args: argparse.Namespace) -> Iterator[Line]:
    if args.babilong_hub:
        return published_lines(args.babilong_hub, args.tasks, args.lengths, args.samples)
    return babilong_lines(tasks=args.tasks, **_sample_arguments(args))


def _needles(args: argparse.Namespace) -> Iterator[Line]:
    return needle_lines(needles=args.needles, **_sample_arguments(args))


def _sample_arguments(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in ("lengths", "samples", "seed", "tokenizer", "haystack")}


# The lines {"prompt", "answer"} of every name in `arguments.KINDS`.
MAKERS: dict[str, Callable[[argparse.Namespace], Iterator[Line]]] = {
    "needles": _needles,
    "babilong": _babilong,
    "longbench": lambda args: question_lines(HALVED, args.data_dir),
    "qasper": lambda args: question_lines(("qasper",), args.data_dir),
    "qmsum": lambda args: question_lines(("qmsum",), args.data_dir),
}


def write_lines(lines: Iterator[Line], out: Path) -> int:
    """Write one JSON object a line; the file gets its name when it is whole. Gives the number of lines."""
    if out.exists():
        raise EvalError(f"OUT must be new, got {str(out)!r}, which exists")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial, number = partial_path(out), 0
    try:
        with partial.open("wb") as file:
            for line in tqdm(lines, desc=out.name, unit=" prompts", delay=5, leave=False):
                # json.dumps writes ASCII only, so that no character of a text ends a line.
                file.write(json.dumps(line).encode() + b"\n")
                number += 1
            finish(file, out)
    finally:
        partial.unlink(missing_ok=True)
    return number


def run(args: argparse.Namespace) -> int:
    """`lucid make-data`."""
    try:
        number = write_lines(MAKERS[args.kind](_with_defaults(args)), args.out)
    except ValueError as error:
        print(f"lucid make-data: error: {error}", file=sys.stderr)
        return 1
    print(f"{args.out}: {number} prompts with answers")
    return 0
