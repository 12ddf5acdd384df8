"""Tests of a model: needles in real text, memory update in words, and the loss by position.

A context is read once; its questions then continue from the same cache, so ten needles are ten questions for the price
of one context. An answer is right if every token of the value is the likeliest one after the tokens before it, that is,
if greedy decoding answers with the value at once. RULER's score also takes a value that comes later in the answer, so
this one is the stricter of the two. The questions of one context are not independent: `contexts` says how many there
are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from lucid_attention.models.checkpoint import load_model

from ...evals.benchmarks.haystacks import most_units
from ...evals.benchmarks.needles import Needles, draft, write
from ...evals.tokens import count_tokens, encode
from ..engine.jobs import Job, Record, Work
from .given import TEST, Given, hay_of, open_model, open_tokenizer, read_tokens

# Seeds of needles: tests and training have different ones.
TEST_SEED, TRAIN_SEED = 0, 1_000_003
BOXES = ("red", "blue", "green", "black", "white", "small", "large", "old", "new", "round")
THINGS = (
    "key",
    "book",
    "map",
    "ring",
    "coin",
    "lamp",
    "letter",
    "stone",
    "cup",
    "knife",
    "rope",
    "clock",
    "ball",
    "shoe",
)
# Positions over which a loss is averaged: from each of them to the next.
EDGES = (0, 128, 512, 1024, 2048, 4096, 8192)
LOGIT_ROWS = 512


@dataclass(frozen=True)
class Question:
    """ids: the rest of the prompt. answer: the tokens of the value. stale: the first tokens of values that were
    overwritten. span: the tokens of the value in the whole prompt."""

    ids: list[int]
    answer: list[int]
    stale: tuple[int, ...] = ()
    span: tuple[int, int] = (0, 1)


@dataclass(frozen=True)
class Context:
    """ids: the tokens that all questions share."""

    ids: list[int]
    questions: list[Question]


class Haystacks:
    """The files of prose of a corpus."""

    def __init__(self, work: Work, corpus: Job) -> None:
        self.work, self.corpus = work, corpus

    def file(self, split: str) -> str:
        """The prose of TRAIN or of TEST."""
        return hay_of(self.work, self.corpus, split)


def needle_prompts(
    tokenizer: Any, haystack: str, length: int, needles: int, index: int, *, asked: int, seed: int = TEST_SEED
) -> Context:
    """Context `index` of RULER's niah_multikey_1 (niah_single_2 for one needle), asked for several of its keys.

    length: tokens of the context with its longest question and answer, about. asked: at most, the number of questions.
    """
    settings = Needles(length=length, needles=needles, haystack=haystack, seed=seed)
    drawn = draft(settings, index)

    def tokens(units: int) -> int:
        question, prefix, _ = write(settings, drawn, units)
        return count_tokens(tokenizer, f"{question} {prefix}")

    units = most_units(tokens, length - 12, length // 64, lambda base: f"{needles} needles take {base} tokens")
    keys = Random(f"asked/{index}").sample(list(zip(drawn.keys, drawn.values, strict=True)), min(asked, needles))
    prompts, spans = [], []
    for key, value in keys:
        question, prefix, _ = write(settings, replace(drawn, query=key), units)
        text = f"{question} {prefix}"
        at = text.index(f"for {key} is: {value}") + len(f"for {key} is: ")
        first, last = encode(tokenizer, text).span(at, at + len(value))
        prompts.append(_ids(tokenizer, text))
        spans.append((first, last))
    answers = [answer_ids(tokenizer, f" {value}") for _, value in keys]
    return _shared(prompts, answers, spans=spans)


def update_prompts(tokenizer: Any, boxes: int, writes: int, index: int) -> Context:
    """Boxes whose content changes `writes` times each, in random order; asked for the last content of every box."""
    random = Random(f"boxes/{boxes}/{writes}/{index}")
    names = random.sample(BOXES, boxes)
    order = [name for name in names for _ in range(writes)]
    random.shuffle(order)
    history: dict[str, list[str]] = {name: [] for name in names}
    lines = []
    for name in order:
        thing = random.choice([thing for thing in THINGS if thing not in history[name]])
        history[name].append(thing)
        lines.append(f"Now the {name} box holds the {thing}.")
    text = "Things are put into boxes. A new thing takes the place of the old one.\n" + "\n".join(lines)
    prompts = [
        f"{text}\nWhat does the {name} box hold at the end? At the end the {name} box holds the" for name in names
    ]
    answers = [answer_ids(tokenizer, f" {history[name][-1]}") for name in names]
    stale = [tuple(answer_ids(tokenizer, f" {thing}")[0] for thing in history[name][:-1]) for name in names]
    return _shared([_ids(tokenizer, prompt) for prompt in prompts], answers, stale)


def _shared(
    prompts: list[list[int]],
    answers: list[list[int]],
    stale: Sequence[tuple[int, ...]] | None = None,
    spans: Sequence[tuple[int, int]] | None = None,
) -> Context:
    """A context of the tokens that all prompts begin with."""
    shortest = min(map(len, prompts))
    same = next((at for at in range(shortest) if len({prompt[at] for prompt in prompts}) > 1), shortest - 1)
    questions = [
        Question(
            prompt[same:], answer, () if stale is None else stale[number], (0, 1) if spans is None else spans[number]
        )
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    return Context(prompts[0][:same], questions)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, verbose=False)["input_ids"])


def answer_ids(tokenizer: Any, text: str) -> list[int]:
    """The tokens of an answer, without special tokens."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def answered(model: Any, context: Context) -> list[Record]:
    """{"right", "stale", "loss"} of every question: whether the answer is right, is one that was overwritten, and its
    mean loss in nats a token."""
    records = []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        read = model(torch.tensor([context.ids]), use_cache=True, logits_to_keep=1)
        cache = read.past_key_values
        for question in context.questions:
            tokens = [*question.ids, *question.answer]
            keep = len(question.answer) + 1
            logits = model(torch.tensor([tokens]), past_key_values=cache, logits_to_keep=keep).logits[0, :-1].float()
            cache.crop(-len(tokens))
            expected = torch.tensor(question.answer)
            likeliest = logits.argmax(-1)
            loss = torch.nn.functional.cross_entropy(logits, expected).item()
            stale = int(likeliest[0]) in question.stale and int(likeliest[0]) != question.answer[0]
            records.append({"right": bool((likeliest == expected).all()), "stale": stale, "loss": loss})
    return records


def open_asked(work: Work, source: Given, model: dict[str, Any] | None) -> tuple[Any, Any]:
    """A model and its tokenizer.

    model: None for the one that was given; {"label", "function", "arguments", "folder"} for what a job has written.
    """
    tokenizer = open_tokenizer(work, source)
    if model is None:
        return open_model(work, source), tokenizer
    job = Job(model["function"], model["arguments"], model["label"])
    return load_model(work.folder_of(job) / model["folder"], torch.float32), tokenizer


def ask_job(
    source: Given, corpus: Job, model: dict[str, Any] | None, task: str, length: int, count: int, contexts: int
) -> Job:
    """`ask` as a job."""
    arguments: dict[str, Any] = {"source": source.arguments, "corpus": dict(corpus.arguments), "model": model}
    arguments |= {"task": task, "length": length, "count": count, "contexts": contexts}
    name = "as given" if model is None else model["label"]
    what = f"{count} needles, {length} tokens" if task == "needles" else f"boxes, {count} writes"
    seconds = 6 + contexts * (length / 250 + 3) if source.model else 0.5
    return Job("real.questions:ask", arguments, f"{what}, {name}", seconds)


def ask(
    work: Work,
    source: dict[str, str],
    corpus: dict[str, Any],
    model: dict[str, Any] | None,
    task: str,
    length: int,
    count: int,
    contexts: int,
) -> Record:
    """The job: {"right", "stale", "loss"}, each a list of lists, by context and question.

    task: "needles", count of them in `length` tokens; or "boxes", `length` of them, each written `count` times.
    """
    origin = Given(**source)
    loaded, tokenizer = open_asked(work, origin, model)
    hay = Haystacks(work, Job("real.given:corpus", corpus)).file(TEST)
    records = []
    for index in range(contexts):
        if task == "needles":
            context = needle_prompts(tokenizer, hay, length, count, index, asked=count)
        else:
            context = update_prompts(tokenizer, length, count, index)
        records.append(answered(loaded, context))
    return {name: [[one[name] for one in asked] for asked in records] for name in ("right", "stale", "loss")}


def loss_job(source: Given, corpus: Job, model: dict[str, Any] | None, texts: int, length: int) -> Job:
    """`position_losses` as a job."""
    arguments: dict[str, Any] = {"source": source.arguments, "corpus": dict(corpus.arguments), "model": model}
    arguments |= {"texts": texts, "length": length}
    name = "as given" if model is None else model["label"]
    seconds = 6 + texts * length / 200 if source.model else 0.5
    return Job("real.questions:position_losses", arguments, f"loss by position, {name}", seconds)


def position_losses(
    work: Work, source: dict[str, str], corpus: dict[str, Any], model: dict[str, Any] | None, texts: int, length: int
) -> Record:
    """The job: {"edges", "loss"}: the mean loss between positions, for each of the long test texts."""
    origin = Given(**source)
    loaded, _ = open_asked(work, origin, model)
    tokens = read_tokens(work, Job("real.given:corpus", corpus))[TEST]
    edges = [edge for edge in EDGES if edge < length] + [length]
    rows = []
    for text in range(texts):
        losses = token_losses(loaded, tokens[text : text + 1, : length + 1])
        rows.append([losses[first:last].mean().item() for first, last in pairwise(edges)])
    return {"edges": edges, "loss": rows}


def token_losses(model: Any, ids: Tensor) -> Tensor:
    """The loss of every token but the first, in nats: [T − 1]. ids: [1, T]. Few rows have logits at a time."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        hidden = model.base_model(ids[:, :-1], use_cache=False).last_hidden_state[0]
        losses = []
        for start in range(0, hidden.shape[0], LOGIT_ROWS):
            logits = model.get_output_embeddings()(hidden[start : start + LOGIT_ROWS]).float()
            targets = ids[0, 1 + start : 1 + start + LOGIT_ROWS]
            losses.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
    return torch.cat(losses)


def saved(job: Job, folder: str, label: str) -> dict[str, Any]:
    """What `open_asked` needs to load a model that a job has written."""
    return {"label": label, "function": job.function, "arguments": dict(job.arguments), "folder": Path(folder).name}
