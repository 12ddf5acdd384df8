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
from dataclasses import dataclass, replace
from functools import partial
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from ..cells import Cell, EvalError, Options, Record
from ..tokens import count_tokens, load_tokenizer
from .dataset_rows import Row, hub_split, local_lines, zipped_lines

LONGBENCH_HUB = "Xnhyacinth/LongBench"
SCROLLS_HUB = "https://huggingface.co/datasets/tau/scrolls/resolve/main/{name}.zip"
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


@dataclass(frozen=True)
class LongQA:
    """A task. metric: the one in the table. out_of: its best score. length: tokens of the paper's contexts."""

    suite: str
    prompt: str
    metric: str
    out_of: float
    length: int
    answer_tokens: int


TASKS = {
    "2wikimqa": LongQA("longbench", PASSAGES, "qa_f1_score", 1, 16_384, 32),
    "hotpotqa": LongQA("longbench", PASSAGES, "qa_f1_score", 1, 16_384, 32),
    "multifieldqa_en": LongQA("longbench", ONE_TEXT, "qa_f1_score", 1, 16_384, 64),
    "qasper": LongQA("scrolls", QUESTION_LAST, "f1", 100, 8192, 256),
    "qmsum": LongQA("scrolls", QUESTION_LAST, "rouge1", 100, 32_768, 256),
}


def documents(name: str, split: str, data_dir: str = "") -> list[dict[str, Any]]:
    """The documents of a task: {"id", "prompt", "answers", "choices"}.

    choices: "yes" and "no" for a question of Qasper whose answers are all yes or no; else empty.
    split: "train" (the paper's, for fine-tuning), "held_out" (for evaluation), "all" (a whole test set of LongBench).
    data_dir: a folder with NAME.jsonl (LongBench) or NAME/SPLIT.jsonl (SCROLLS); "" for the hub.
    """
    if name not in TASKS:
        raise EvalError(f"a task must be one of {', '.join(TASKS)}, got {name!r}")
    task = TASKS[name]
    read_rows = _longbench_rows if task.suite == "longbench" else _scrolls_rows
    docs = []
    for row in read_rows(name, split, data_dir):
        prompt = task.prompt.format(context=row["context"], question=row["question"])
        choices = YES_NO if name == "qasper" and all(map(is_yes_no, row["answers"])) else []
        docs.append({"id": row["id"], "prompt": prompt, "answers": row["answers"], "choices": choices})
    if not docs:
        raise EvalError(f"{name}: split {split!r} holds no questions")
    return docs


def _file(name: str, split: str) -> str:
    """The path of a split, in --data-dir or in the hub's archive."""
    if TASKS[name].suite == "longbench":
        return f"{name}.jsonl"
    return f"{name}/{'train' if split == 'train' else 'validation'}.jsonl"


def _longbench_rows(name: str, split: str, data_dir: str) -> list[Row]:
    file = _file(name, split)
    if data_dir:
        rows = local_lines(Path(data_dir) / file, (("context",), ("question", "input"), ("answers",)))
    else:
        rows = hub_split(LONGBENCH_HUB, name, "test", f"Without the hub, give a folder with {file} as --data-dir")
    rows = [
        {
            "id": str(row.get("_id", number)),
            "context": row["context"],
            # LongBench's own file has "input", the copy that the harness reads has "question".
            "question": row["question"] if "question" in row else row["input"],
            "answers": list(row["answers"]),
        }
        for number, row in enumerate(rows)
    ]
    if name in HALVED and split != "all":
        training = _half({row["context"] for row in rows}, name)
        return [row for row in rows if (row["context"] in training) == (split == "train")]
    if split == "train":
        raise EvalError(f"{name} is for evaluation only: expected one of {', '.join(HALVED)}")
    return rows


def _half(texts: set[str], name: str) -> set[str]:
    """Half of the texts. It depends on their content alone, not on their order or on duplicates in a file."""
    ordered = sorted(texts, key=lambda text: sha256(f"{SPLIT_SEED}/{name}/{text}".encode()).digest())
    return set(ordered[: len(ordered) // 2])


def _scrolls_rows(name: str, split: str, data_dir: str) -> list[Row]:
    file = _file(name, split)
    if data_dir:
        rows = local_lines(Path(data_dir) / file, (("id",), ("input",), ("output",)))
    else:
        url = SCROLLS_HUB.format(name=name)
        rows = zipped_lines(url, file, f"Without the hub, give a folder with {file} as --data-dir")
    merged: dict[str, Row] = {}
    for row in rows:
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
    raise EvalError(f"--max-length must leave room for a prompt, got {room} tokens")


def dataset(
    *,
    name: str,
    part: str,
    length: int,
    answer_tokens: int,
    tokenizer: str,
    samples: int = 0,
    data_dir: str = "",
    **_: Any,
) -> dict[str, Any]:
    """The harness's `custom_dataset`. The arguments are the cell's metadata. samples: 0 for all."""
    from datasets import Dataset

    loaded, room = load_tokenizer(tokenizer), length - answer_tokens
    docs = documents(name, part, data_dir)[: samples or None]
    return {"test": Dataset.from_list([{**doc, "prompt": cut_middle(doc["prompt"], loaded, room)} for doc in docs])}


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


def score_qasper(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """F1, 0 to 100. An empty output counts as "Unanswerable"."""
    return {"f1": 100 * best_f1(results[0] if results[0].strip() else "Unanswerable", doc["answers"])}


def score_qmsum(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """ROUGE-1, 2 and L without stemming, 0 to 100, each for the summary that fits best."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(ROUGES, use_stemmer=False)
    scores = [scorer.score(answer, results[0]) for answer in doc["answers"]]
    return {name: 100 * max(score[name].fmeasure for score in scores) for name in ROUGES}


def longbench(options: Options) -> list[Cell]:
    """2WikiMQA, HotpotQA and MultifieldQA."""
    return _cells("longbench", options)


def scrolls(options: Options) -> list[Cell]:
    """Qasper and QMSum."""
    return _cells("scrolls", options)


def _cells(suite: str, options: Options) -> list[Cell]:
    """A cell for every task of a suite."""
    if options.part not in PARTS:
        raise EvalError(f"--part must be one of {', '.join(PARTS)}, got {options.part!r}")
    if options.data_dir and not Path(options.data_dir).is_dir():
        raise EvalError(f"--data-dir must be a folder, got {options.data_dir!r}, which is not a folder")
    cells = []
    for name, task in TASKS.items():
        if task.suite != suite:
            continue
        length = options.max_length or task.length
        room = options.answer_tokens or task.answer_tokens
        if length < 2 * room:
            raise EvalError(f"--max-length must be at least {2 * room} for {name}, got {length}")
        metadata = {
            "name": name,
            "part": options.part if name in HALVED else "all" if suite == "longbench" else "held_out",
            "length": length,
            "answer_tokens": room,
            "tokenizer": options.tokenizer,
            "samples": options.questions,
            "data_dir": options.data_dir,
            "data_sha256": _file_sha256(name, options.data_dir),
        }
        cell = Cell(
            labels={"task": name},
            metric=task.metric,
            task=f"lucid_{name}",
            metadata=metadata,
            answer_tokens=room,
            length=length,
            out_of=task.out_of,
        )
        cells.append(_with_choices(cell) if name == "qasper" else cell)
    return cells


def _file_sha256(name: str, data_dir: str) -> str:
    """The hash of a local file, whose content may change; "" for the hub."""
    if not data_dir:
        return ""
    file = Path(data_dir) / _file(name, "held_out")
    if not file.is_file():
        raise EvalError(f"--data-dir: there is no file {str(file)!r}")
    with file.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()


def _with_choices(cell: Cell) -> Cell:
    """The cell, with `evaluate_with_choices` in the place of the harness's loop."""
    total = len(documents(cell.metadata["name"], cell.metadata["part"], cell.metadata["data_dir"]))
    samples = min(cell.metadata["samples"] or total, total)
    return replace(cell, evaluate=partial(evaluate_with_choices, cell), samples=samples)


def evaluate_with_choices(
    cell: Cell, model: Any, tokenizer: Any, indices: Sequence[int], batch_size: int
) -> Iterator[Record]:
    """The `Cell.evaluate` of Qasper. cell: the cell with its harness task.

    As in the harness, the answer to a yes-or-no question is the likelier choice; nothing is generated.
    """
    from ..harness import HarnessCell, HarnessModel

    return ask_with_choices(HarnessCell(cell, HarnessModel(model, tokenizer, batch_size)), indices, batch_size)


def ask_with_choices(asked: Any, indices: Sequence[int], batch_size: int) -> Iterator[Record]:
    """Ask the questions without choices through `asked`, a `HarnessCell`, and choose the answers to the others."""
    docs = asked.task.eval_docs
    without_choices = [index for index in indices if not docs[index]["choices"]]
    if without_choices:
        yield from asked(without_choices, batch_size)
    for index in indices:
        if docs[index]["choices"]:
            yield _choose(asked, index)


def _choose(asked: Any, index: int) -> Record:
    from lm_eval.api.instance import Instance

    from ..harness import quiet

    doc = asked.task.eval_docs[index]
    requests = [
        Instance("loglikelihood", doc, (doc["prompt"], f" {choice}"), number)
        for number, choice in enumerate(doc["choices"])
    ]
    with quiet():
        yes, no = (likelihood for likelihood, _ in asked.lm.loglikelihood(requests))
    # If both are equally likely, the harness takes the last.
    output = doc["choices"][0] if yes > no else doc["choices"][1]
    metrics = asked.task.process_results(doc, [output])
    return {
        "id": index,
        "score": float(metrics[asked.cell.metric]),
        "output": output,
        "target": doc["answers"],
        "metrics": metrics,
    }
