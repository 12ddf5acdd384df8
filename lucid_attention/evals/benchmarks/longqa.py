"""LongBench (2WikiMQA, HotpotQA, MultifieldQA) and SCROLLS (Qasper, QMSum): questions about long documents.

Prompts and metrics are the harness's, whose own tasks need packages beyond it (LongBench) or parts of Transformers
that are gone (SCROLLS). Rows come from the hub, or from local files of the same format. The paper's splits (A.6): one
half of 2WikiMQA and of MultifieldQA is for training, the other one for evaluation; HotpotQA is for evaluation; of
SCROLLS the training split is for training and the validation split for evaluation.
"""

from dataclasses import dataclass, replace
from functools import partial
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from ..runs import EvalError, Options, Run
from ..spans import count, load_tokenizer
from .hub_rows import Row, hub_split, local_lines, zipped_lines
from .longqa_choices import evaluate
from .longqa_scores import is_yes_no

LONGBENCH_HUB = "Xnhyacinth/LongBench"
SCROLLS_HUB = "https://huggingface.co/datasets/tau/scrolls/resolve/main/{name}.zip"
# Of the halves. It is no option: a half that is not the same everywhere would leak.
SPLIT_SEED = 0
HALVED = ("2wikimqa", "multifieldqa_en")
PARTS = ("held_out", "all")
YES_NO = ["yes", "no"]

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
    """A task. metric: the one that the table shows. out_of: its best score. length: of the paper's contexts."""

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
    """The documents of a task: {"id", "prompt", "answers", "choices"}. choices: "yes", "no" where all answers are.

    split: "train" (the paper's, for fine-tuning), "held_out" (what is evaluated), "all" (a whole test set of
    LongBench). data_dir: a folder with NAME.jsonl (LongBench) or NAME/SPLIT.jsonl (SCROLLS); "" for the hub.
    """
    if name not in TASKS:
        raise EvalError(f"a task must be one of {', '.join(TASKS)}, got {name!r}")
    task = TASKS[name]
    read = _longbench if task.suite == "longbench" else _scrolls
    found = []
    for row in read(name, split, data_dir):
        prompt = task.prompt.format(context=row["context"], question=row["question"])
        choices = YES_NO if name == "qasper" and all(is_yes_no(each) for each in row["answers"]) else []
        found.append({"id": row["id"], "prompt": prompt, "answers": row["answers"], "choices": choices})
    if not found:
        raise EvalError(f"{name}: split {split!r} holds no questions")
    return found


def _file(name: str, split: str) -> str:
    """Where a split is, in a folder or in the hub's archive."""
    if TASKS[name].suite == "longbench":
        return f"{name}.jsonl"
    return f"{name}/{'train' if split == 'train' else 'validation'}.jsonl"


def _longbench(name: str, split: str, data_dir: str) -> list[Row]:
    file = _file(name, split)
    if data_dir:
        rows = local_lines(Path(data_dir) / file, (("context",), ("question", "input"), ("answers",)))
    else:
        rows = hub_split(LONGBENCH_HUB, name, "test", f"Without the hub, give a folder with {file} as --data-dir")
    rows = [
        {
            "id": str(row.get("_id", number)),
            "context": row["context"],
            # The file of LongBench says input, the copy that the harness reads says question.
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
    """Half of the texts, by their content: the order and the doubles of a file do not matter."""
    ordered = sorted(texts, key=lambda text: sha256(f"{SPLIT_SEED}/{name}/{text}".encode()).digest())
    return set(ordered[: len(ordered) // 2])


def _scrolls(name: str, split: str, data_dir: str) -> list[Row]:
    file = _file(name, split)
    if data_dir:
        rows = local_lines(Path(data_dir) / file, (("id",), ("input",), ("output",)))
    else:
        url = SCROLLS_HUB.format(name=name)
        rows = zipped_lines(url, file, f"Without the hub, give a folder with {file} as --data-dir")
    merged: dict[str, Row] = {}
    for row in rows:
        # A question that several people answered is there several times.
        if row["id"] in merged:
            merged[row["id"]]["answers"].append(row["output"])
            continue
        question, _, context = row["input"].partition("\n\n")
        merged[row["id"]] = {"id": row["id"], "context": context, "question": question, "answers": [row["output"]]}
    return list(merged.values())


def fitted(prompt: str, tokenizer: Any, room: int) -> str:
    """The prompt in at most `room` tokens: of a longer one the middle is left out, as in LongBench."""
    if count(tokenizer, prompt) <= room:
        return prompt
    offsets = tokenizer(prompt, return_offsets_mapping=True, add_special_tokens=False, verbose=False)["offset_mapping"]
    # A cut may take a token or two more than it should.
    for spare in range(0, room, 2):
        half = (room - spare) // 2
        cut = prompt[: offsets[half - 1][1]] + prompt[offsets[len(offsets) - half][0] :] if half else ""
        if count(tokenizer, cut) <= room:
            return cut
    raise EvalError(f"--max-length leaves {room} tokens for a prompt, too few")


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
    """What the harness's `custom_dataset` asks for. The arguments are the task's metadata. samples: 0 for all."""
    from datasets import Dataset

    loaded, room = load_tokenizer(tokenizer), length - answer_tokens
    found = documents(name, part, data_dir)
    chosen = found[:samples] if samples else found
    return {"test": Dataset.from_list([{**each, "prompt": fitted(each["prompt"], loaded, room)} for each in chosen])}


def _runs(suite: str, options: Options) -> list[Run]:
    """A cell for every task of a suite."""
    if options.part not in PARTS:
        raise EvalError(f"--part must be one of {', '.join(PARTS)}, got {options.part!r}")
    if options.data_dir and not Path(options.data_dir).is_dir():
        raise EvalError(f"--data-dir must be a folder, got {options.data_dir!r}, which is none")
    made = []
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
            "data_sha256": _digest(name, options.data_dir),
        }
        run = Run(
            labels={"task": name},
            metric=task.metric,
            task=f"lucid_{name}",
            metadata=metadata,
            answer_tokens=room,
            length=length,
            out_of=task.out_of,
        )
        made.append(_with_choices(run) if name == "qasper" else run)
    return made


def _digest(name: str, data_dir: str) -> str:
    """Of a local file: other content makes other samples."""
    if not data_dir:
        return ""
    file = Path(data_dir) / _file(name, "held_out")
    if not file.is_file():
        raise EvalError(f"--data-dir: there is no file {str(file)!r}")
    with file.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()


def _with_choices(run: Run) -> Run:
    """The run, of which some questions are not answered by generation."""
    there = len(documents(run.metadata["name"], run.metadata["part"], run.metadata["data_dir"]))
    samples = min(run.metadata["samples"] or there, there)
    return replace(run, task=None, evaluate=partial(evaluate, run), samples=samples)


def longbench(options: Options) -> list[Run]:
    """2WikiMQA, HotpotQA and MultifieldQA."""
    return _runs("longbench", options)


def scrolls(options: Options) -> list[Run]:
    """Qasper and QMSum."""
    return _runs("scrolls", options)
