"""The rehearsal of a full recipe: its very commands, each made small by one function, `rehearsed`.

| at the paper's scale | in a rehearsal |
|---|---|
| 8 GPUs | 2 processes with gloo, on the CPU |
| a model | its preset with a width of 96, 2 layers (6 for Gemma's mix) and few heads, of the same size |
| a training | 2 steps of 2 sequences in float32 (CPUs are slow in bfloat16), each evaluated and saved |
| a length above 1024 tokens | 1024 tokens and a 64th of the rest: all lengths stay different, and in order |
| samples, questions | 1 of each cell, with answers of 4 tokens |
| a vocabulary | an eighth of it |
| Dolma, essays, BABILong, LongBench, SCROLLS | files of the same layout from Python's standard library |
| a benchmark | `--quick`; an experiment at `--scale small`: `--scale smoke` |
"""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

from lucid_attention.models.decoder.presets import OWN_VOCABULARY

from ...bench.models import LENGTHS as BENCH_LENGTHS
from ...bench.models import PAPER_CONTEXT, QUICK_CONTEXT, QUICK_LENGTH
from ...data.sources import DOLMA
from ...training.inputs import new_config
from .stand_ins import BABILONG, DOLMA_LIST, ESSAYS, LONGQA
from .steps import Step

PROCESSES, SAMPLES = 2, "1"
# Lengths up to this one stay. Needles and stories of any number fit into it.
SHORT, SHRINK = 1024, 64
# Presets with sliding windows have another attention in every sixth layer.
LAYERS, MIXED_LAYERS, FEWER_HEADS = 2, 6, 4
FEWER_TOKENS = 8
MODEL = ("model.hidden_size=96", "model.intermediate_size=96")
TRAINING = (
    *("steps=2", "batch_size=2", "micro_batch_size=1", "evaluation_sequences=2", "loss_rows=64"),
    *("log_every=1", "evaluate_every=1", "save_every=1", "workers=0", "precision=float32"),
)
LENGTHS = ("--lengths", "--length", "--mean-lengths")
# What is appended to the words of each command; of `lucid eval`, by its task.
MORE = {
    "tokenize": ("--shard-tokens=250000", "--validation=0.1", "--workers=2"),
    "bench": ("--quick",),
}
EVALUATION = {
    "longbench": ("--max-length=1024", "--questions=2", f"--data-dir={LONGQA}"),
    "scrolls": ("--max-length=1024", "--questions=2", f"--data-dir={LONGQA}"),
}
# Tasks that generate an answer.
ANSWERS = ("mniah", "sniah", "babilong", "longbench", "scrolls")
OPTION = re.compile(r"(--[a-z-]+)=(.*)", re.DOTALL)


def shorter(length: int) -> int:
    """The length that stands for one of the paper's."""
    return length if length <= SHORT else SHORT + (length - SHORT) // SHRINK


# Sizes in the results of a rehearsal, and the paper's that they stand for.
SIZES = {shorter(1024 * thousands): 1024 * thousands for thousands in (2, 4, 6, 8, 16, 32, 64, 128)} | {
    QUICK_LENGTH: BENCH_LENGTHS[0],
    QUICK_CONTEXT: PAPER_CONTEXT,
}


def rehearsed(step: Step) -> Step:
    """The small command that stands for a command of a full recipe."""
    words = _pairs(step.words)
    published = "--babilong-hub" in words
    small = [words[0]]
    for option, word in pairwise(words):
        # The files of a published set are named for lengths: those of the stand-in hold short texts.
        keep = published and option in LENGTHS
        small.append(word if keep or option not in VALUES else VALUES[option](word))
    small = [f"@{DOLMA_LIST}" if word == DOLMA else word for word in small]
    return Step((*small, *_more(words)), min(step.processes, PROCESSES))


def _pairs(words: Sequence[str]) -> list[str]:
    """`--option=value` as two words."""
    pairs: list[str] = []
    for word in words:
        match = OPTION.fullmatch(word)
        pairs += match.groups() if match else [word]
    return pairs


def _each_shorter(text: str) -> str:
    """Every number of a list, such as 2048,4096 or 2048-8192, as `shorter` has it."""
    return re.sub(r"\d+", lambda number: str(shorter(int(number[0]))), text)


def _fewer(text: str) -> str:
    """One sample. `lucid analyze --samples` has a file instead of a number."""
    return SAMPLES if text.isdigit() else text


def _smaller_tokenizer(text: str) -> str:
    return re.sub(r"(?<=^train:)\d+", lambda size: str(int(size[0]) // FEWER_TOKENS), text)


# The options whose values become smaller, or local.
VALUES: dict[str, Callable[[str], str]] = {
    **dict.fromkeys(LENGTHS, _each_shorter),
    "--samples": _fewer,
    "--limit": _fewer,
    "--limit-tokens": lambda text: str(min(int(text), 1_000_000)),
    "--tokenizer": _smaller_tokenizer,
    "--haystack": lambda text: ESSAYS if text == "essays" else text,
    "--babilong-hub": lambda text: BABILONG,
    "--scale": lambda text: "smoke",
}


def _more(words: Sequence[str]) -> tuple[str, ...]:
    """The words that a command of a rehearsal has besides."""
    command = words[0]
    if command == "train":
        return tuple(word for change in _changes(words) for word in ("--set", change))
    if command == "make-data":
        return () if words[1] in ("needles", "babilong") else (f"--data-dir={LONGQA}",)
    if command == "eval":
        tasks = words[words.index("--tasks") + 1].split(",")
        answers = ("--answer-tokens=4",) if set(tasks) & set(ANSWERS) else ()
        return (*answers, *(word for task in tasks for word in EVALUATION.get(task, ())))
    return MORE.get(command, ())


def _changes(words: Sequence[str]) -> list[str]:
    """The changes of a recipe. A later change of a field replaces an earlier one."""
    step = Step(tuple(words))
    recipe = step.recipe()
    assert recipe is not None
    changes = [*TRAINING, f"sequence_length={shorter(recipe.sequence_length)}"]
    if recipe.data.endswith(".jsonl"):
        # Of a few prompts, the usual share for validation would be none.
        changes.append("data_options.validation=0.4")
    if "--from" in words:
        return changes
    config = new_config(recipe)
    heads = config.num_key_value_heads or config.num_attention_heads
    # Diff attention has an even number of them.
    fewer = max(min(heads, 2), heads // FEWER_HEADS)
    model = {
        "num_hidden_layers": MIXED_LAYERS if recipe.preset.startswith("gemma3") else LAYERS,
        "num_attention_heads": fewer * max(1, config.num_attention_heads // heads // FEWER_HEADS),
        "num_key_value_heads": fewer,
        "head_dim": config.head_dim,
    }
    if recipe.preset in OWN_VOCABULARY:
        model["vocab_size"] = config.vocab_size // FEWER_TOKENS
    return [*changes, *MODEL, *(f"model.{name}={size}" for name, size in model.items())]
