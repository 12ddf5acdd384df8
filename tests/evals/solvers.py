"""Models of the harness that look the answer up in the prompt, or say nothing."""

import re
from collections import Counter
from typing import Any

from lm_eval.api.model import LM


class Mute(LM):
    """Says nothing."""

    length = 0

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return [self.answer(request.args[0]) for request in requests]

    def answer(self, prompt: str) -> str:
        return ""

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        raise AssertionError("needles are answered, not weighed")

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        raise AssertionError("needles are answered, not weighed")


class Perfect(Mute):
    """Reads the prompt as a person would."""

    def answer(self, prompt: str) -> str:
        if "special magic" in prompt:
            return needles(prompt)
        if "VAR" in prompt:
            return tracked(prompt)
        if "numbered list" in prompt:
            found = re.findall(r"\d+\. (\S+)", prompt.rsplit("numbered list of words", 1)[1].split("\nQuestion")[0])
            return " ".join(word for word, _ in Counter(found).most_common(10))
        coded = prompt.split("coded words. ", 1)[1].split("\nQuestion")[0].split()
        return " ".join(word for word, _ in Counter(word for word in coded if word != "...").most_common(3))


def needles(prompt: str) -> str:
    """The values of the keys that the last line asks for."""
    context, question = prompt.rsplit("\n", 1)
    found = re.search(r"for (.*?) mentioned", question)
    assert found is not None
    keys = re.split(r", and |, ", found[1])
    return ", ".join(
        value for key in keys for value in re.findall(rf"special magic \w+ for {re.escape(key)} is: (\S+)\.", context)
    )


def tracked(prompt: str) -> str:
    """Variables with the value that is asked for."""
    # Before it is an example, with variables of its own.
    text = prompt.rsplit("Memorize and track", 1)[1]
    asked = re.search(r"assigned the value (\d+)", text)
    assert asked is not None
    known = re.findall(rf"VAR (\w+) = {asked[1]}\b", text)
    for before in known:
        known += re.findall(rf"VAR (\w+) = VAR {before}\b", text)
    return " ".join(known)
