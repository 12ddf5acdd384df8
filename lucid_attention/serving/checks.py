"""What is wrong with a request to the server, in a sentence, before it reaches the model."""

from typing import Any

# Endpoints whose requests are checked, with the field that holds the text.
TEXT_FIELDS = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}
# Numbers in a request: the smallest and the largest value.
NUMBERS = {"temperature": (0.0, 100.0), "top_p": (0.0, 1.0)}


def problem(path: str, body: Any) -> str | None:
    """Why a request to this path cannot be answered; None if nothing is known to be wrong.

    body: the JSON that came, read.
    """
    if path not in TEXT_FIELDS:
        return None
    if not isinstance(body, dict):
        return f"the body must be a JSON object, got {type(body).__name__}"
    field = TEXT_FIELDS[path]
    found = _wrong_prompt(body.get(field)) if field == "prompt" else _wrong_messages(body.get(field))
    return found or _wrong_numbers(body)


def _wrong_prompt(prompt: Any) -> str | None:
    if not isinstance(prompt, str) or not prompt:
        return f"prompt must be a string that is not empty, got {_shown(prompt)}"
    return None


def _wrong_messages(messages: Any) -> str | None:
    if not isinstance(messages, list) or not messages:
        return f"messages must be a list that is not empty, got {_shown(messages)}"
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"messages[{index}] must be an object with a role, got {_shown(message)}"
        content = message.get("content")
        if not isinstance(content, (str, list)) and "tool_calls" not in message:
            return f"messages[{index}].content must be a string, or a list of parts, got {_shown(content)}"
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict) or not isinstance(part.get("type"), str):
                return f"messages[{index}].content must have parts that are objects with a type, got {_shown(part)}"
    return None


def _wrong_numbers(body: dict[str, Any]) -> str | None:
    for field in ("max_tokens", "max_completion_tokens"):
        value = body.get(field)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            return f"{field} must be an integer from 1 on, got {_shown(value)}"
    for field, (low, high) in NUMBERS.items():
        value = body.get(field)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and low <= value <= high):
            return f"{field} must be a number from {low:g} to {high:g}, got {_shown(value)}"
    return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
