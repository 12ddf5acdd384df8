"""Models without weights for the harness, which say nothing or know the answer, and a way to ask them a task."""

import re
from typing import Any

import lm_eval
from lm_eval.api.group import Group
from lm_eval.api.model import LM

from lucid_lab.evals.evaluate import make_tasks


class Mute(LM):
    """Says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[str] = []

    def generate_until(self, requests: list[Any]) -> list[str]:
        self.prompts += [request.args[0] for request in requests]
        return [self.answer(request) for request in requests]

    def answer(self, request: Any) -> str:
        return ""

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        return [(0.0, False) for _ in requests]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        raise NotImplementedError


class AnswerKey(Mute):
    """Looks the answer up in a field of the document."""

    def __init__(self, field: str) -> None:
        super().__init__()
        self.field = field

    def answer(self, request: Any) -> str:
        answer = request.doc[self.field]
        return f" {answer if isinstance(answer, str) else answer[0]}"

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        right = [request.args[1].lower() == self.answer(request).lower() for request in requests]
        return [(0.0 if is_right else -1.0, is_right) for is_right in right]


class PromptReader(Mute):
    """Finds the values of the keys that the last line asks for, as a person would."""

    def answer(self, request: Any) -> str:
        context, question = request.args[0].rsplit("\n", 1)
        asked = re.search(r"for (.*?) mentioned", question)
        assert asked is not None
        found = [
            re.findall(rf"special magic \w+ for {re.escape(key)} is: (\S+)\.", context)
            for key in re.split(r", and |, ", asked[1])
        ]
        return ", ".join(value for values in found for value in values)


def leaves(names: str, tokenizer: object, **options: Any) -> list[Any]:
    """The tasks of families, without their groups."""
    made = make_tasks(names.split(","), options, str(tokenizer))
    return [leaf for task in made for leaf in (task.get_all_tasks() if isinstance(task, Group) else [task])]


def ask(task: Any, lm: Any, limit: int | None = None) -> list[dict[str, Any]]:
    """The samples of a task, with their scores."""
    results: Any = lm_eval.evaluate(lm, {"tasks": {task.task_name: task}, "groups": {}}, limit=limit, bootstrap_iters=0)
    return list(results["samples"][task.task_name])
