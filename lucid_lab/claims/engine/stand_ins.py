"""What a rehearsal reads in the place of the paper's data: files of the same layouts, from the standard library."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from lucid_attention.files import write_whole

from ...data.sources import open_source
from ...evals.benchmarks.babi import TASKS as STORIES
from ...evals.benchmarks.babi import make_story
from ...evals.benchmarks.haystacks import read_prose

FOLDER = "stand_ins"
DOLMA_LIST, ESSAYS = f"{FOLDER}/dolma/urls.txt", f"{FOLDER}/essays"
BABILONG, LONGQA = f"{FOLDER}/babilong", f"{FOLDER}/longqa"
# Written last: all of the rest is there.
WHOLE = f"{FOLDER}/whole"
# Characters of a file of Dolma, and files of each of its two parts: short documents, and books of several modules.
FILE_CHARACTERS, FILES, BOOK = 1_500_000, 3, 12
# Lengths of BABILong's files, in thousands of tokens. The stand-ins are all short.
THOUSANDS = (0, 2, 4, 8, 16, 32, 64, 128)
ROWS, SENTENCES = 6, 12
LONGBENCH, SCROLLS = ("2wikimqa", "hotpotqa", "multifieldqa_en"), ("qasper", "qmsum")


def make_stand_ins(root: Path) -> None:
    """Write all stand-ins below `root`, unless they are there."""
    if (root / WHOLE).exists():
        return
    _dolma(root / DOLMA_LIST)
    sentences = read_prose("prose").sentences
    for number in range(4):
        _write(root / ESSAYS / f"essay-{number}.txt", " ".join(sentences[number::4]))
    for task in STORIES:
        for thousands in THOUSANDS:
            rows = list(_stories(task, Random(f"{task} {thousands}")))
            _write(root / BABILONG / "data" / task / f"{thousands}k.json", json.dumps(rows))
    for name in LONGBENCH:
        _write(root / LONGQA / f"{name}.jsonl", _lines(_questions(name, sentences)))
    for name in SCROLLS:
        for split in ("train", "validation"):
            rows = [
                {"id": row["_id"], "input": f"{row['input']}\n\n{row['context']}", "output": row["answers"][0]}
                for row in _questions(f"{name} {split}", sentences)
            ]
            _write(root / LONGQA / name / f"{split}.jsonl", _lines(rows))
    _write(root / WHOLE, "")


def _dolma(listing: Path) -> None:
    """A list of compressed files of JSON lines, as Dolma has them: {"id", "text", "source", ...}."""
    source = open_source("stdlib")
    texts = (document.text for part in source.parts(1 << 24) for document in source.documents(part))
    names = []
    for kind, modules in (("web", 1), ("books", BOOK)):
        for number in range(FILES):
            rows: list[dict[str, Any]] = []
            size = 0
            while size < FILE_CHARACTERS and (text := "\n\n".join(_some(texts, modules))):
                rows.append({"id": f"{kind}-{number}-{len(rows)}", "text": text, "source": kind, "metadata": {}})
                size += len(text)
            names.append(f"{kind}/{kind}-{number:04}.json.gz")
            file = listing.parent / names[-1]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(gzip.compress(_lines(rows).encode(), mtime=0))
    _write(listing, "\n".join(names) + "\n")


def _some(texts: Iterator[str], count: int) -> list[str]:
    return [text for text, _ in zip(texts, range(count), strict=False)]


def _stories(task: str, random: Random) -> Iterator[dict[str, str]]:
    for _ in range(ROWS):
        story = make_story(task, random)
        yield {"input": " ".join(story.facts), "question": story.question, "target": story.answer}


def _questions(name: str, sentences: list[str]) -> list[dict[str, Any]]:
    """Rows of LongBench: which sentence of a text follows another one."""
    random, rows = Random(name), []
    for number in range(2 * ROWS):
        text = random.sample(sentences, SENTENCES)
        place = random.randrange(SENTENCES - 1)
        question = f"Which sentence follows this one: {text[place]}"
        rows.append(
            {"_id": f"{name}-{number}", "input": question, "context": " ".join(text), "answers": [text[place + 1]]}
        )
    return rows


def _lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
