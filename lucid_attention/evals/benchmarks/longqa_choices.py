"""Qasper's questions of yes and no: as in the harness, the likelier answer counts, and nothing is generated."""

from collections.abc import Iterator, Sequence
from typing import Any

from ..runs import Record, Run


def evaluate(run: Run, model: Any, tokenizer: Any, indices: Sequence[int], batch_size: int) -> Iterator[Record]:
    """A record for every index, as `Run.evaluate` wants it. run: the same one, with its harness task."""
    from ..harness import Asked, Prompted, quiet

    with quiet():
        lm = Prompted(model, tokenizer, batch_size)
    return answered(Asked(run, lm), indices, batch_size)


def answered(asked: Any, indices: Sequence[int], batch_size: int) -> Iterator[Record]:
    """Open questions through `asked`; of those with choices, the likelier one. asked: an `Asked` of the harness."""
    docs = asked.task.eval_docs
    open_questions = [index for index in indices if not docs[index]["choices"]]
    if open_questions:
        yield from asked(open_questions, batch_size)
    for index in indices:
        if docs[index]["choices"]:
            yield _chosen(asked, index)


def _chosen(asked: Any, index: int) -> Record:
    from lm_eval.api.instance import Instance

    from ..harness import quiet

    doc = asked.task.eval_docs[index]
    requests = [
        Instance("loglikelihood", doc, (doc["prompt"], f" {choice}"), number)
        for number, choice in enumerate(doc["choices"])
    ]
    with quiet():
        likely = [score for score, _ in asked.lm.loglikelihood(requests)]
    # Of equals the last, as in the harness.
    output = doc["choices"][0] if likely[0] > likely[1] else doc["choices"][1]
    metrics = asked.task.process_results(doc, [output])
    return {
        "id": index,
        "score": float(metrics[asked.run.metric]),
        "output": output,
        "target": doc["answers"],
        "metrics": metrics,
    }
