"""`lucid make-data`: prompts with answers for fine-tuning, from the training side of what `lucid eval` evaluates."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .benchmarks.babi import TASKS as STORIES
from .benchmarks.babilong import Babilong, make_sample
from .benchmarks.longqa import HALVED, documents
from .benchmarks.needles import Needles
from .benchmarks.needles import make_sample as make_needles
from .runs import EvalError, counts, names
from .spans import load_tokenizer

Line = dict[str, Any]
# Far from those of evaluations, which are small numbers.
TRAINING_SEED = 1_000_003


class Maker(NamedTuple):
    """about: in a line. lines: from the arguments to {"prompt", "answer"}."""

    about: str
    lines: Callable[[argparse.Namespace], Iterator[Line]]


def _checked(samples: int, tokenizer: str) -> Any:
    """The tokenizer."""
    if samples < 1:
        raise EvalError(f"--samples must be at least 1, got {samples}")
    if not tokenizer:
        raise EvalError("--tokenizer is needed: lengths are in its tokens")
    return load_tokenizer(tokenizer)


def babilong_lines(
    *,
    tasks: tuple[str, ...],
    lengths: tuple[int, ...],
    samples: int,
    seed: int,
    tokenizer: str,
    haystack: str = "prose",
) -> Iterator[Line]:
    """`samples` samples of every task at every length. None of their stories is ever in an evaluation."""
    loaded = _checked(samples, tokenizer)
    cells = [Babilong(task, length, "train", haystack, seed=seed) for length in lengths for task in tasks]
    # One of each in turn: the beginning of the file is like the whole.
    for index in range(samples):
        for cell in cells:
            sample = make_sample(cell, loaded, index)
            yield {"prompt": sample["prompt"], "answer": f" {sample['answer']}"}


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
    loaded = _checked(samples, tokenizer)
    own = seed + TRAINING_SEED
    cells = [Needles(length, count, haystack=haystack, seed=own) for length in lengths for count in needles]
    for index in range(samples):
        for cell in cells:
            sample = make_needles(cell, loaded, index)
            answer = f" {', '.join(sample['outputs'])}."
            prompt = f"{sample['input']} {sample['gen_prefix']}"
            yield {"prompt": prompt, "answer": answer, "answer_spans": sample["answer_spans"]}


def question_lines(tasks: tuple[str, ...], data_dir: str = "") -> Iterator[Line]:
    """The paper's training splits of LongBench and SCROLLS. Of several answers, the first."""
    for task in tasks:
        for each in documents(task, "train", data_dir):
            yield {"prompt": each["prompt"], "answer": f" {each['answers'][0].strip()}"}


def _babilong(args: argparse.Namespace) -> Iterator[Line]:
    return babilong_lines(tasks=args.tasks, **_of_both(args))


def _needles(args: argparse.Namespace) -> Iterator[Line]:
    return needle_lines(needles=args.needles, **_of_both(args))


def _of_both(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in ("lengths", "samples", "seed", "tokenizer", "haystack")}


MAKERS = {
    "needles": Maker("needles of RULER in a haystack, with the places of the answers", _needles),
    "babilong": Maker("stories of bAbI in a long text", _babilong),
    "longbench": Maker("half of 2WikiMQA and of MultifieldQA", lambda args: question_lines(HALVED, args.data_dir)),
    "qasper": Maker("Qasper's training split", lambda args: question_lines(("qasper",), args.data_dir)),
    "qmsum": Maker("QMSum's training split", lambda args: question_lines(("qmsum",), args.data_dir)),
}


def write_lines(lines: Iterator[Line], out: Path) -> int:
    """Write them, one a line; the file is there when it is whole. Gives their number."""
    if out.exists():
        raise EvalError(f"OUT must be new, got {str(out)!r}, which exists")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial, number = out.with_name(out.name + ".partial"), 0
    try:
        with partial.open("w", encoding="utf-8") as file:
            # ASCII only: no character of a text ends a line.
            for line in lines:
                file.write(json.dumps(line) + "\n")
                number += 1
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
    return number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `lucid make-data`."""
    known = "; ".join(f"{name}: {maker.about}" for name, maker in MAKERS.items())
    parser.add_argument("kind", metavar="KIND", choices=list(MAKERS), help=known)
    parser.add_argument("out", metavar="OUT", type=Path, help=".jsonl file to be written")
    parser.add_argument(
        "--data-dir", default="", metavar="FOLDER", help="with the files of LongBench or SCROLLS; default: the hub"
    )
    stories = parser.add_argument_group("of babilong and needles")
    stories.add_argument(
        "--tasks", type=names, default=tuple(STORIES), metavar="LIST", help="of babilong; default: all, qa1 to qa5"
    )
    stories.add_argument("--needles", type=counts, default=(4,), metavar="LIST", help="how many (default: 4)")
    stories.add_argument(
        "--lengths",
        type=counts,
        default=(0, 1024, 2048, 4096),
        metavar="LIST",
        help="in tokens; of babilong, 0 for no background",
    )
    stories.add_argument("--samples", type=int, default=1000, metavar="N", help="of each task and length")
    stories.add_argument("--seed", type=int, default=0, metavar="N")
    stories.add_argument("--tokenizer", default="", metavar="FOLDER", help="of the model that is to be trained")
    stories.add_argument(
        "--haystack", default="prose", metavar="WHAT", help="noise, prose, essays, or a text file or folder"
    )


def run(args: argparse.Namespace) -> int:
    """`lucid make-data`."""
    try:
        number = write_lines(MAKERS[args.kind].lines(args), args.out)
    except EvalError as error:
        print(f"lucid make-data: error: {error}", file=sys.stderr)
        return 1
    print(f"{args.out}: {number} prompts with answers")
    return 0
