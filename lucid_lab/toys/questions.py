"""Questions to a language model: needles in real text, and memory update in words; and its loss on a text.

A context is read once; its questions then continue from the same cache, so ten needles are ten questions for the price
of one context. An answer is right if every token of the value is the likeliest one after the tokens before it, that is,
if greedy decoding answers with the value at once. RULER's score also accepts a value that comes later in the answer, so
this one is stricter. The questions about one context are not independent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..evals.needles import make_needles
from .lab import Record

# Seeds of needles: tests and training have different ones.
TEST_SEED, TRAIN_SEED = 0, 1_000_003
# Tokens of a context that are left for an answer, and for keys that are longer than the one it was made for.
ANSWER = 24
BOXES = ("red", "blue", "green", "black", "white", "small", "large", "old", "new", "round")
THINGS = (
    *("key", "book", "map", "ring", "coin", "lamp", "letter"),
    *("stone", "cup", "knife", "rope", "clock", "ball", "shoe"),
)
# Logits of as many tokens are in memory at a time.
LOGIT_ROWS = 512


@dataclass(frozen=True)
class Question:
    """ids: the rest of the prompt. answer: tokens of the value. stale: first tokens of values that were overwritten."""

    ids: list[int]
    answer: list[int]
    stale: tuple[int, ...] = ()


@dataclass(frozen=True)
class Context:
    """ids: the tokens that all questions share."""

    ids: list[int]
    questions: list[Question]


def needle_context(
    tokenizer: Any, haystack: str, length: int, needles: int, index: int, *, asked: int, seed: int = TEST_SEED
) -> Context:
    """Context `index` of RULER's niah_multikey_1 (niah_single_2 for one needle), asked for several of its keys.

    haystack: a file of prose. length: tokens of the context with one question and answer, about.
    asked: the largest number of questions.
    """
    sample = make_needles(tokenizer, length, needles, seed=seed, index=index, haystack=haystack, answer_tokens=ANSWER)
    chosen = Random(f"asked/{index}").sample(sample.needles, min(asked, needles))
    prompts = [sample.asking(needle.key).prompt for needle in chosen]
    return _context(tokenizer, prompts, [needle.value for needle in chosen])


def update_context(tokenizer: Any, boxes: int, writes: int, index: int) -> Context:
    """Boxes whose content changes `writes` times each, in random order; asked for the last content of every box."""
    random = Random(f"boxes/{boxes}/{writes}/{index}")
    names = random.sample(BOXES, boxes)
    order = [name for name in names for _ in range(writes)]
    random.shuffle(order)
    history: dict[str, list[str]] = {name: [] for name in names}
    lines = ["Things are put into boxes. A new thing takes the place of the old one."]
    for name in order:
        history[name].append(random.choice([thing for thing in THINGS if thing not in history[name]]))
        lines.append(f"Now the {name} box holds the {history[name][-1]}.")
    text = "\n".join(lines)
    prompts = [
        f"{text}\nWhat does the {name} box hold at the end? At the end the {name} box holds the" for name in names
    ]
    values = [history[name][-1] for name in names]
    return _context(tokenizer, prompts, values, [history[name][:-1] for name in names])


def _context(
    tokenizer: Any, prompts: Sequence[str], values: Sequence[str], stale: Sequence[Sequence[str]] | None = None
) -> Context:
    """A context of the tokens that all prompts begin with. stale: overwritten values of every question."""
    ids = [list(tokenizer(prompt, verbose=False)["input_ids"]) for prompt in prompts]
    shortest = min(map(len, ids))
    shared = next((at for at in range(shortest) if len({prompt[at] for prompt in ids}) > 1), shortest - 1)
    questions = [
        Question(prompt[shared:], answer_ids(tokenizer, value), tuple(answer_ids(tokenizer, one)[0] for one in others))
        for prompt, value, others in zip(ids, values, stale or [()] * len(values), strict=True)
    ]
    return Context(ids[0][:shared], questions)


def answer_ids(tokenizer: Any, value: str) -> list[int]:
    """The tokens of a value as an answer, without special tokens."""
    return list(tokenizer(f" {value}", add_special_tokens=False, verbose=False)["input_ids"])


@torch.no_grad()
def answers(model: Any, context: Context) -> list[Record]:
    """{"right", "stale", "loss"} of every question: whether the answer is right, whether it is an overwritten value,
    and the loss of the right one in nats a token. Products are in bfloat16."""
    records = []
    with torch.autocast("cpu", torch.bfloat16):
        cache = model(torch.tensor([context.ids]), use_cache=True, logits_to_keep=1).past_key_values
        for question in context.questions:
            tokens, expected = [*question.ids, *question.answer], torch.tensor(question.answer)
            kept = len(expected) + 1
            logits = model(torch.tensor([tokens]), past_key_values=cache, logits_to_keep=kept).logits[0, :-1].float()
            cache.crop(-len(tokens))
            likeliest = logits.argmax(-1)
            right = bool((likeliest == expected).all())
            stale = int(likeliest[0]) in question.stale and int(likeliest[0]) != question.answer[0]
            records.append({"right": right, "stale": stale, "loss": F.cross_entropy(logits, expected).item()})
    return records


@torch.no_grad()
def token_losses(model: Any, ids: Tensor) -> Tensor:
    """The loss of every token but the first, in nats: [T − 1]. ids: [1, T]. Products are in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.base_model(ids[:, :-1], use_cache=False).last_hidden_state[0]
        losses = [
            F.cross_entropy(model.get_output_embeddings()(rows).float(), targets, reduction="none")
            for rows, targets in zip(hidden.split(LOGIT_ROWS), ids[0, 1:].split(LOGIT_ROWS), strict=True)
        ]
    return torch.cat(losses)
