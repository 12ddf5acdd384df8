"""The prompts of BABILong (Kuratov et al. 2024) in the words of the harness's tasks, and the two ways to score answers.

A prompt is an instruction, two examples, and then the text with its question; the answer follows a space.
"""

from typing import NamedTuple

from .babi.world import GIVERS, OBJECTS, ROOMS

LABELS = dict.fromkeys(("qa1", "qa2", "qa3", "qa4"), ROOMS) | {"qa5": (*GIVERS, *OBJECTS)}


class Prompt(NamedTuple):
    """examples: (text, question, answer)."""

    instruction: str
    examples: tuple[tuple[str, str, str], ...]


_ONLY_FACTS = "You need to answer the question based only on the information from the facts."
_CARRIED = (
    "If a person got an item in the first location and travelled to the second location the item is also in the "
    "second location. If a person dropped an item in the first location and moved to the second location the item "
    "remains in the first location."
)
_FORM = "Always return your answer in the following format:"
_NOTHING_ELSE = "Do not write anything else after that."

PROMPTS = {
    "qa1": Prompt(
        "I will give you context with the facts about positions of different persons hidden in some random text and a "
        f"question. {_ONLY_FACTS} If a person was in different locations, use the latest location to answer the "
        f"question.\n{_FORM}\nThe most recent location of 'person' is 'location'. {_NOTHING_ELSE}",
        (
            (
                "Charlie went to the hallway. Judith come back to the kitchen. Charlie travelled to balcony.",
                "Where is Charlie?",
                "The most recent location of Charlie is balcony.",
            ),
            (
                "Alan moved to the garage. Charlie went to the beach. Alan went to the shop. Rouse travelled to "
                "balcony.",
                "Where is Alan?",
                "The most recent location of Alan is shop.",
            ),
        ),
    ),
    "qa2": Prompt(
        "I will give you context with the facts about locations and actions of different persons hidden in some random "
        f"text and a question. {_ONLY_FACTS} {_CARRIED}\n{_FORM}\nThe 'item' is in 'location'. {_NOTHING_ELSE}",
        (
            (
                "Charlie went to the kitchen. Charlie got a bottle. Charlie moved to the balcony.",
                "Where is the bottle?",
                "The bottle is in the balcony.",
            ),
            (
                "Alan moved to the garage. Alan got a screw driver. Alan moved to the kitchen.",
                "Where is the screw driver?",
                "The screw driver is in the kitchen.",
            ),
        ),
    ),
    "qa3": Prompt(
        "I give you context with the facts about locations and actions of different persons hidden in some random text "
        f"and a question. {_ONLY_FACTS} {_CARRIED}\n{_FORM}\nBefore the $location_1$ the $item$ was in the "
        f"$location_2$. {_NOTHING_ELSE}",
        (
            (
                "John journeyed to the bedroom. Mary grabbed the apple. Mary went back to the bathroom. Daniel "
                "journeyed to the bedroom. Daniel moved to the garden. Mary travelled to the kitchen.",
                "Where was the apple before the kitchen?",
                "Before the kitchen the apple was in the bathroom.",
            ),
            (
                "John went back to the bedroom. John went back to the garden. John went back to the kitchen. Sandra "
                "took the football. Sandra travelled to the garden. Sandra journeyed to the bedroom.",
                "Where was the football before the bedroom?",
                "Before the bedroom the football was in the garden.",
            ),
        ),
    ),
    "qa4": Prompt(
        "I will give you context with the facts about different people, their location and actions, hidden in some "
        f"random text and a question. {_ONLY_FACTS}\nYour answer should contain only one word - location. "
        f"{_NOTHING_ELSE}",
        (
            (
                "The hallway is south of the kitchen. The bedroom is north of the kitchen.",
                "What is the kitchen south of?",
                "bedroom",
            ),
            (
                "The garden is west of the bedroom. The bedroom is west of the kitchen.",
                "What is west of the bedroom?",
                "garden",
            ),
        ),
    ),
    "qa5": Prompt(
        "I will give you context with the facts about locations and their relations hidden in some random text and a "
        f"question. {_ONLY_FACTS}\nYour answer should contain only one word. {_NOTHING_ELSE} Do not explain your "
        "answer.",
        (
            (
                "Mary picked up the apple there. Mary gave the apple to Fred. Mary moved to the bedroom. Bill took the "
                "milk there.",
                "Who did Mary give the apple to?",
                "Fred",
            ),
            (
                "Jeff took the football there. Jeff passed the football to Fred. Jeff got the milk there. Bill "
                "travelled to the bedroom.",
                "Who gave the football?",
                "Jeff",
            ),
        ),
    ),
}


def rendered(task: str, text: str, question: str) -> str:
    """The prompt for a text and a question."""
    prompt = PROMPTS[task]
    examples = "".join(f"{told}\n{asked} {answer}\n\n" for told, asked, answer in prompt.examples)
    return f"{prompt.instruction}\n\n{examples}{text.strip()}\n{question.strip()}"


def strict(task: str, question: str, target: str, output: str) -> float:
    """The original's score: 1 if the answer is the only label in the first sentence that is not in the question."""
    told, asked = output.lower(), question.lower()
    # What follows is no longer the answer: the next sentence, or an example that the model makes up.
    for end in (".", "<context>", "<example>"):
        told = told.split(end)[0]
    labels = {label.lower() for label in LABELS[task]}
    return float({label for label in labels if label in told and label not in asked} == {target.lower()})


def lax(target: str, output: str) -> float:
    """The harness's score: 1 if the answer is anywhere in the output."""
    return float(target.strip().lower() in output.lower())
