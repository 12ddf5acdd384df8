"""LongBench (2WikiMQA, HotpotQA, MultifieldQA) and SCROLLS (Qasper, QMSum): questions about long documents.

Prompts and metrics are the harness's. Its own tasks need more packages (LongBench) or parts of Transformers that no
longer exist (SCROLLS). Rows come from the hub, or from local files of the same format. The paper's splits (A.6): one
half of 2WikiMQA and of MultifieldQA is for training, the other half for evaluation; HotpotQA is for evaluation; the
training split of SCROLLS is for training and its validation split for evaluation.
"""

import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

from .haystacks import check_fields, read_rows
from .tokens import count_tokens, task_tokenizer

LONGBENCH_HUB = "Xnhyacinth/LongBench"
SCROLLS_HUB = "https://huggingface.co/datasets/tau/scrolls/resolve/main/{name}.zip"
Row = dict[str, Any]
# The seed of the halves is not an option: with another half, a model could be evaluated on its training texts.
SPLIT_SEED = 0
HALVED = ("2wikimqa", "multifieldqa_en")
PARTS = ("held_out", "all")
YES_NO = ["yes", "no"]
ROUGES = ("rouge1", "rouge2", "rougeL")
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)

_ONLY_ANSWER = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words."
)
PASSAGES = (
    f"{_ONLY_ANSWER}\n\nThe following are given passages.\n{{context}}\n\n{_ONLY_ANSWER}\n\n"
    "Question: {question}\nAnswer:"
)
ONE_TEXT = (
    "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question based on the "
    "above text, only give me the answer and do not output any other words.\n\nQuestion: {question}\nAnswer:"
)
QUESTION_LAST = "{context}\n\nQuestion: {question}\nAnswer:"
PLAIN = {"longbench": "{context}{question}", "scrolls": "{question}\n\n{context}"}


@dataclass(frozen=True)
class LongQA:
    """A task. length: tokens of the paper's contexts."""

    suite: str
    prompt: str
    length: int
    answer_tokens: int


TASKS = {
    "2wikimqa": LongQA("longbench", PASSAGES, 16_384, 32),
    "hotpotqa": LongQA("longbench", PASSAGES, 16_384, 32),
    "multifieldqa_en": LongQA("longbench", ONE_TEXT, 16_384, 64),
    "qasper": LongQA("scrolls", QUESTION_LAST, 8192, 256),
    "qmsum": LongQA("scrolls", QUESTION_LAST, 32_768, 256),
}


def documents(name: str, split: str, data_dir: str = "", *, plain: bool = False) -> list[dict[str, Any]]:
    """The documents of a task: {"id", "prompt", "answers", "choices"}.

    choices: "yes" and "no" for a question of Qasper whose answers are all yes or no; else empty.
    split: "train" (the paper's, for fine-tuning), "held_out" (for evaluation), "all" (a whole test set of LongBench).
    data_dir: a folder with NAME.jsonl (LongBench) or NAME/SPLIT.jsonl (SCROLLS); "" for the hub.
    plain: prompts without instructions, as the authors train: text and question.
    """
    if name not in TASKS:
        raise ValueError(f"a task must be one of {', '.join(TASKS)}, got {name!r}")
    task = TASKS[name]
    read_rows = _longbench_rows if task.suite == "longbench" else _scrolls_rows
    docs = []
    for row in read_rows(name, split, data_dir):
        prompt = (PLAIN[task.suite] if plain else task.prompt).format(context=row["context"], question=row["question"])
        choices = YES_NO if name == "qasper" and all(map(is_yes_no, row["answers"])) else []
        docs.append({"id": row["id"], "prompt": prompt, "answers": row["answers"], "choices": choices})
    if not docs:
        raise ValueError(f"{name}: split {split!r} holds no questions")
    return docs


def _rows(name: str, file: str, data_dir: str, *hub: str, **how: Any) -> Iterator[Row]:
    """Rows of a local file, or of the hub."""
    if not data_dir:
        return read_rows(
            f"{name}, {file}", *hub, advice=f"Without the hub, give a folder with {file} as --data-dir", **how
        )
    path = Path(data_dir) / file
    if not path.is_file():
        raise ValueError(f"--data-dir: there is no file {str(path)!r}")
    return read_rows(f"--data-dir: {str(path)!r}", "json", data_files=str(path), split="train")


def _longbench_rows(name: str, split: str, data_dir: str) -> list[Row]:
    rows = []
    for number, row in enumerate(_rows(name, f"{name}.jsonl", data_dir, LONGBENCH_HUB, name, split="test")):
        # LongBench's own file has "input", the copy that the harness reads has "question".
        check_fields(row, f"a row of {name}", ("context",), ("question", "input"), ("answers",))
        question = row["question"] if "question" in row else row["input"]
        row_id, answers = str(row.get("_id", number)), list(row["answers"])
        rows.append({"id": row_id, "context": row["context"], "question": question, "answers": answers})
    if name in HALVED and split != "all":
        training = _half({row["context"] for row in rows}, name)
        return [row for row in rows if (row["context"] in training) == (split == "train")]
    if split == "train":
        raise ValueError(f"{name} is for evaluation only: expected one of {', '.join(HALVED)}")
    return rows


def _half(texts: set[str], name: str) -> set[str]:
    """Half of the texts. It depends on their content alone, not on their order or on duplicates in a file."""
    ordered = sorted(texts, key=lambda text: sha256(f"{SPLIT_SEED}/{name}/{text}".encode()).digest())
    return set(ordered[: len(ordered) // 2])


def _scrolls_rows(name: str, split: str, data_dir: str) -> list[Row]:
    file = f"{name}/{'train' if split == 'train' else 'validation'}.jsonl"
    archive = f"zip://{file}::{SCROLLS_HUB.format(name=name)}"
    merged: dict[str, Row] = {}
    for row in _rows(name, file, data_dir, "json", data_files=archive, split="train"):
        check_fields(row, f"a row of {name}", ("id",), ("input",), ("output",))
        # A question that several people answered has several rows.
        if row["id"] in merged:
            merged[row["id"]]["answers"].append(row["output"])
            continue
        question, _, context = row["input"].partition("\n\n")
        merged[row["id"]] = {"id": row["id"], "context": context, "question": question, "answers": [row["output"]]}
    return list(merged.values())


def cut_middle(prompt: str, tokenizer: Any, room: int) -> str:
    """The prompt in at most `room` tokens. A longer one loses its middle, as in LongBench."""
    if count_tokens(tokenizer, prompt) <= room:
        return prompt
    offsets = tokenizer(prompt, return_offsets_mapping=True, add_special_tokens=False, verbose=False)["offset_mapping"]
    # Special tokens and the new neighbours at the cut may add tokens: take fewer until the prompt fits.
    for spare in range(0, room, 2):
        half = (room - spare) // 2
        cut = prompt[: offsets[half - 1][1]] + prompt[offsets[len(offsets) - half][0] :] if half else ""
        if count_tokens(tokenizer, cut) <= room:
            return cut
    raise ValueError(f"--max-length must leave room for a prompt, got {room} tokens")


def dataset(
    *,
    name: str,
    part: str = "held_out",
    max_length: int = 0,
    answer_tokens: int = 0,
    data_dir: str = "",
    **metadata: Any,
) -> dict[str, Any]:
    """The documents of the task `lucid_NAME`. The arguments are the metadata of the task, and its dataset_kwargs.

    max_length: tokens of prompt and answer; a longer prompt loses its middle; 0 for the paper's.
    """
    from datasets import Dataset

    if part not in PARTS:
        raise ValueError(f"--part must be one of {', '.join(PARTS)}, got {part!r}")
    if answer_tokens < 0:
        raise ValueError(f"--answer-tokens must not be negative, got {answer_tokens}")
    length, room = max_length or TASKS[name].length, answer_tokens or TASKS[name].answer_tokens
    if length < 2 * room:
        raise ValueError(f"--max-length must be at least {2 * room} for {name}, got {length}")
    tokenizer = task_tokenizer(metadata)
    docs = []
    for doc in documents(name, part, data_dir):
        prompt = cut_middle(doc["prompt"], tokenizer, length - room)
        size = {"tokens": count_tokens(tokenizer, prompt), "answer_tokens": room}
        docs.append(doc | {"prompt": prompt} | size)
    return {"test": Dataset.from_list(docs)}


def normalized_words(text: str) -> list[str]:
    """Words in lower case, without punctuation and articles, as in SQuAD."""
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


def is_yes_no(answer: str) -> bool:
    """Whether an answer is yes or no and nothing else."""
    return normalized_words(answer) in (["yes"], ["no"])


def word_f1(output: str, answer: str) -> float:
    """The harmonic mean of precision and recall of the words; 0 if no word is shared."""
    output_words, answer_words = normalized_words(output), normalized_words(answer)
    shared = sum((Counter(output_words) & Counter(answer_words)).values())
    return 2 * shared / (len(output_words) + len(answer_words)) if shared else 0.0


def best_f1(output: str, answers: Sequence[str]) -> float:
    """The F1 of the answer that fits best."""
    return max(word_f1(output, answer) for answer in answers)


def score_longbench(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """F1, 0 to 1."""
    return {"qa_f1_score": best_f1(results[0].strip(), doc["answers"])}


def score_qasper(doc: dict[str, Any], results: list[Any]) -> dict[str, float]:
    """F1, 0 to 100. An empty output counts as "Unanswerable". With choices, results are their likelihoods."""
    if doc["choices"]:
        (yes, _), (no, _) = results
        # If both are equally likely, the harness takes the last.
        output = doc["choices"][0] if yes > no else doc["choices"][1]
    else:
        output = results[0] if results[0].strip() else "Unanswerable"
    return {"f1": 100 * best_f1(output, doc["answers"])}


def score_qmsum(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """ROUGE-1, 2 and L without stemming, 0 to 100, each for the summary that fits best."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(ROUGES, use_stemmer=False)
    scores = [scorer.score(answer, results[0]) for answer in doc["answers"]]
    return {name: 100 * max(score[name].fmeasure for score in scores) for name in ROUGES}


class Qasper(ConfigurableTask):
    """As in the harness, the answer to a yes-or-no question is the likelier choice; nothing is generated."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config={name: value for name, value in config.items() if name != "class"})

    def construct_requests(self, doc: dict[str, Any], ctx: str, **kwargs: Any) -> Any:
        """A request for every choice, or one for an answer."""
        if not doc["choices"]:
            return super().construct_requests(doc, ctx, **kwargs)
        return [
            Instance("loglikelihood", doc, (ctx, f" {choice}"), number, metadata=kwargs["metadata"])
            for number, choice in enumerate(doc["choices"])
        ]
