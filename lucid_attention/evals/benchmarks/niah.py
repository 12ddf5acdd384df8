"""S-NIAH and M-NIAH (§4.2) as cells of a table."""

import hashlib
from dataclasses import asdict
from typing import Any

from ..runs import EvalError, Labels, Options, Run
from ..spans import load_tokenizer
from .haystacks import KINDS, read_prose
from .needles import Needles, check_fits, room_for_answer

# RULER's niah_single_1 to 3; --haystack is what stands for its essays.
SINGLE: dict[str, tuple[str | None, str]] = {
    "noise, numbers": ("noise", "numbers"),
    "prose, numbers": (None, "numbers"),
    "prose, uuids": (None, "uuids"),
}
KEPT = ("tokens", "needles", "answer_spans")


def single(options: Options) -> list[Run]:
    """S-NIAH: one needle, three kinds of text and value, at every length."""
    return [
        _run("lucid_sniah", {"variant": name, "length": length}, options, hay or options.haystack, kind, length, 1)
        for name, (hay, kind) in SINGLE.items()
        for length in options.lengths or (2048, 4096)
    ]


def multiple(options: Options) -> list[Run]:
    """M-NIAH: one key of many is asked for (or `queries` of them), for every number of needles and length."""
    return [
        _run("lucid_mniah", {"needles": n, "length": length}, options, options.haystack, options.kind, length, n)
        for n in options.needles or (2, 4, 6, 8, 10)
        for length in options.lengths or (2048, 4096)
    ]


def _run(task: str, labels: Labels, options: Options, haystack: str, kind: str, length: int, n: int) -> Run:
    many = task == "lucid_mniah"
    needles = Needles(
        length=length,
        needles=n,
        queries=options.queries if many else 1,
        values=options.values if many else 1,
        keys=options.keys,
        kind=kind,
        haystack=haystack,
        answer_tokens=options.answer_tokens,
        seed=options.seed,
    )
    if options.samples < 1:
        raise EvalError(f"--samples must be at least 1, got {options.samples}")
    tokenizer = load_tokenizer(options.tokenizer)
    check_fits(needles, tokenizer, options.samples)
    metadata: dict[str, Any] = {
        "tokenizer": options.tokenizer,
        "samples": options.samples,
        "settings": asdict(needles),
        "haystack_sha256": _text_hash(haystack),
    }
    room = room_for_answer(needles, tokenizer)
    return Run(labels, "score", task, metadata=metadata, answer_tokens=room, length=length, keep=KEPT)


def _text_hash(haystack: str) -> str:
    """Of the prose: docstrings are others in another Python, and a file may be changed between two runs."""
    if haystack in KINDS[:2]:
        return ""
    return hashlib.sha256("\n".join(read_prose(haystack).sentences).encode()).hexdigest()
