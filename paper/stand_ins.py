"""Stand-ins for the data of the paper's scripts, in the layouts of the real ones: python paper/stand_ins.py FOLDER

dolma/files.txt and its .json.gz files    documents of the Python library, as lines of JSON
essays/                                   text files
babilong/data/TASK/LENGTH.json            stories, a list of {"input", "question", "target"}
longqa/NAME.jsonl, longqa/NAME/SPLIT.jsonl   LongBench and SCROLLS
"""

import gzip
import json
import sys
from pathlib import Path
from random import Random

from lucid_lab.data.text import documents
from lucid_lab.evals.babilong import TASKS, make_story
from lucid_lab.evals.haystacks import read_prose

DOCUMENTS, QUESTIONS = 60, 12


def lines(rows: list[dict[str, object]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())


def main(folder: Path) -> None:
    texts = [text[:20_000] for _, text in zip(range(DOCUMENTS), documents("stdlib"), strict=False)]
    for part in range(2):
        rows = [{"id": str(i), "text": text, "source": "stdlib"} for i, text in enumerate(texts) if i % 2 == part]
        write(folder / "dolma" / f"part-{part}.json.gz", lines(rows))
    write(folder / "dolma" / "files.txt", "part-0.json.gz\npart-1.json.gz\n")
    prose, random = read_prose("prose").sentences, Random(0)
    for part in range(2):
        write(folder / "essays" / f"{part}.txt", " ".join(prose[500 * part : 500 * (part + 1)]))
    for number in range(1, 11):
        task = f"qa{number}" if f"qa{number}" in TASKS else "qa1"
        for length in ("32k", "64k", "128k"):
            stories = [make_story(task, random) for _ in range(3)]
            facts = [" ".join([*story.facts, *random.sample(prose, 5)]) for story in stories]
            rows = [
                {"input": text, "question": f"{story.question} ", "target": story.answer}
                for text, story in zip(facts, stories, strict=True)
            ]
            write(folder / "babilong" / "data" / f"qa{number}" / f"{length}.json", json.dumps(rows))

    def question(number: int) -> tuple[str, str, str]:
        word = random.choice(("one", "two", "three"))
        return " ".join([*random.sample(prose, 6), f"Item {number} is {word}."]), f"What is item {number}?", word

    for name in ("2wikimqa", "hotpotqa", "multifieldqa_en"):
        asked = [question(number) for number in range(QUESTIONS)]
        rows = [{"_id": q, "context": text, "input": q, "answers": [answer]} for text, q, answer in asked]
        write(folder / "longqa" / f"{name}.jsonl", lines(rows))
    for name in ("qasper", "qmsum"):
        for split in ("train", "validation"):
            asked = [question(number) for number in range(QUESTIONS)]
            rows = [{"id": q, "pid": q, "input": f"{q}\n\n{text}", "output": answer} for text, q, answer in asked]
            write(folder / "longqa" / name / f"{split}.jsonl", lines(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
