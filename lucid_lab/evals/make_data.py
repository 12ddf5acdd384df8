"""`lucid make-data`: prompts with answers for fine-tuning, from the training side of the benchmarks."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lucid_attention.files import finish, partial_path

from .babilong import TASKS as STORIES
from .babilong import make_story_sample, published_samples
from .haystacks import warn_of_repeats
from .longqa import HALVED, documents
from .needles import make_needles
from .tokens import TRAINING_SEED, check_sizes, load_tokenizer

Line = dict[str, Any]
# What is made, with the options that it takes and their defaults.
SAMPLED: dict[str, Any] = {"samples": 1000, "seed": 0, "tokenizer": None, "haystack": "prose"}
KINDS: dict[str, dict[str, Any]] = {
    "needles": SAMPLED | {"lengths": (1024, 2048, 4096), "needles": (4,)},
    "babilong": SAMPLED
    | {"lengths": (0, 1024, 2048, 4096), "tasks": tuple(STORIES), "babilong_hub": "", "plain": False},
    "longbench": {"data_dir": "", "plain": False, "part": "train"},
    **{kind: {"data_dir": "", "plain": False} for kind in ("qasper", "qmsum")},
}


def training_lines(kind: str, options: dict[str, Any]) -> Iterator[Line]:
    """Lines {"prompt", "answer"} of a kind. options: those of `KINDS`, by their names on the command line."""
    if kind not in KINDS:
        raise ValueError(f"KIND must be one of {', '.join(KINDS)}, got {kind!r}")
    if unused := [name for name in options if name not in KINDS[kind]]:
        known, flags = (", ".join("--" + name.replace("_", "-") for name in names) for names in (KINDS[kind], unused))
        raise ValueError(f"{kind} takes {known}, and not {flags}")
    options = KINDS[kind] | options
    if options.get("part", "train") not in ("train", "all"):
        raise ValueError(f"--part must be train (the half for training) or all, got {options['part']!r}")
    if "data_dir" in options:
        return question_lines(HALVED if kind == "longbench" else (kind,), **options)
    for length in options["lengths"]:
        check_sizes(options["samples"], length, options["seed"])
    if options.get("babilong_hub"):
        published = ("babilong_hub", "tasks", "lengths", "samples", "plain")
        return published_lines(*(options[name] for name in published))
    if options.get("plain"):
        raise ValueError("--plain is for published stories: expected --babilong-hub")
    if not options["tokenizer"]:
        raise ValueError("--tokenizer is needed: lengths are in its tokens")
    options["tokenizer"] = load_tokenizer(str(options["tokenizer"]))
    what = options["needles"] if kind == "needles" else options["tasks"]
    return sample_lines(what, **{name: options[name] for name in (*SAMPLED, "lengths")})


def sample_lines(
    what: Sequence[int | str], *, tokenizer: Any, lengths: Sequence[int], samples: int, seed: int, haystack: str
) -> Iterator[Line]:
    """`samples` prompts for every length and number of needles, or story of bAbI, with the tokens of the answers.

    No evaluation asks them: needles have other seeds, and stories are of the training split.
    """
    # Lengths alternate, so that the beginning of the file is like the whole.
    for index, length, one in ((index, length, one) for index in range(samples) for length in lengths for one in what):
        how: dict[str, Any] = {"index": index, "haystack": haystack}
        sample: Any
        if isinstance(one, int):
            sample = make_needles(tokenizer, length, one, seed=seed + TRAINING_SEED, **how)
        else:
            sample = make_story_sample(tokenizer, one, length, split="train", seed=seed, **how)
        line = {"prompt": sample.prompt, "answer": f" {sample.answer.strip()}", "answer_spans": sample.answer_spans}
        if sample.haystack_repeats and not index:
            warn_of_repeats(haystack, length, [sample.haystack_repeats])
        yield line | ({"haystack_repeats": sample.haystack_repeats} if sample.haystack_repeats else {})


def published_lines(
    name: str, tasks: Sequence[str], lengths: Sequence[int], samples: int, plain: bool
) -> Iterator[Line]:
    """`samples` prompts for every task at every length, from a published training set of BABILong."""
    sets = [published_samples(name, task, length, samples, plain=plain) for length in lengths for task in tasks]
    for index in range(samples):
        for members in sets:
            if index < len(members):
                yield {"prompt": members[index]["prompt"], "answer": f" {members[index]['answer']}"}


def question_lines(
    tasks: Sequence[str], data_dir: str = "", plain: bool = False, part: str = "train"
) -> Iterator[Line]:
    """The paper's training splits of LongBench and SCROLLS. A question with several answers gets the first."""
    for task in tasks:
        for document in documents(task, part, data_dir, plain=plain):
            yield {"prompt": document["prompt"], "answer": f" {document['answers'][0].strip()}"}


def write_lines(lines: Iterator[Line], out: Path) -> int:
    """Write one JSON object a line; the file gets its name when it is whole. Returns the number of lines."""
    if out.exists():
        raise ValueError(f"OUT must be new, got {str(out)!r}, which exists")
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
