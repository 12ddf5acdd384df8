"""`lucid serve` before the server: which words it adds, and what it says about requests that cannot be answered."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from lucid_attention import LucidForCausalLM
from lucid_attention.models.decoder.presets import tiny
from lucid_attention.models.paged.engine import REFUSED
from lucid_attention.serving.checks import problem
from lucid_attention.serving.command import words_of
from lucid_attention.serving.server import CheckedRequests, error_body

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD: list[tuple[str, Any]] = [
    (COMPLETION, {"prompt": "a"}),
    (COMPLETION, {"prompt": "a", "max_tokens": 1, "temperature": 0, "top_p": 1.0}),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 5}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": []}]}),
    ("/v1/models", None),
]
BAD: list[tuple[str, Any, str]] = [
    (COMPLETION, [], "must be a JSON object, got list"),
    (COMPLETION, {}, "prompt must be a string that is not empty, got None"),
    (COMPLETION, {"prompt": ""}, "got ''"),
    (COMPLETION, {"prompt": [1] * 1000}, "got [1, 1, "),
    (COMPLETION, {"prompt": "a", "max_tokens": 0}, "max_tokens must be an integer from 1 on, got 0"),
    (COMPLETION, {"prompt": "a", "max_tokens": True}, "got True"),
    (COMPLETION, {"prompt": "a", "temperature": -1}, "temperature must be a number from 0 to 100, got -1"),
    (COMPLETION, {"prompt": "a", "temperature": float("nan")}, "got nan"),
    (COMPLETION, {"prompt": "a", "top_p": "x"}, "top_p must be a number from 0 to 1, got 'x'"),
    (CHAT, {"prompt": "a"}, "messages must be a list that is not empty, got None"),
    (CHAT, {"messages": ["a"]}, "messages[0] must be an object with a role, got 'a'"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content must be a string"),
    (CHAT, {"messages": [{"role": "user", "content": ["a"]}]}, "objects with a type, got 'a'"),
]


@pytest.mark.parametrize(("path", "body"), GOOD)
def test_a_good_request_has_no_problem(path: str, body: Any) -> None:
    assert problem(path, body) is None


@pytest.mark.parametrize(("path", "body", "words"), BAD)
def test_a_bad_request_is_explained(path: str, body: Any, words: str) -> None:
    found = problem(path, body)
    assert found is not None
    assert words in found
    assert len(found) < 200


def test_errors_have_the_form_that_clients_read() -> None:
    assert error_body("no", 400)["error"]["type"] == "invalid_request_error"
    assert error_body("no", 500)["error"] == {"message": "no", "type": "server_error", "param": None, "code": 500}


def ask(app: Any, body: bytes, path: str = COMPLETION, parts: int = 1) -> list[Any]:
    """What a client gets from an application behind `CheckedRequests`."""
    size = -(-len(body) // parts) or 1
    chunks = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
    events = [{"type": "http.request", "body": one, "more_body": one is not chunks[-1]} for one in chunks]
    events.append({"type": "http.disconnect"})
    sent: list[Any] = []

    async def receive() -> Any:
        return events.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(CheckedRequests(app)({"type": "http", "method": "POST", "path": path}, receive, send))
    return sent


def message_of(sent: list[Any]) -> tuple[int, str]:
    start, body = sent
    return start["status"], json.loads(body["body"])["error"]["message"]


async def echo(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": (await receive())["body"]})
    assert (await receive())["type"] == "http.disconnect"


def test_a_good_request_reaches_the_server_as_it_was_sent() -> None:
    body = json.dumps({"prompt": "a b c", "max_tokens": 3}).encode()
    assert ask(echo, body, parts=4)[1]["body"] == body
    assert ask(echo, b"not checked", path="/v1/audio/transcriptions")[1]["body"] == b"not checked"


def test_a_bad_request_does_not_reach_the_server() -> None:
    assert message_of(ask(echo, b'{"prompt": ""}'))[0] == 400
    assert message_of(ask(echo, b"{not json"))[1].startswith("the body must be JSON")
    assert message_of(ask(echo, b""))[0] == 400


def test_errors_of_the_server_are_explained() -> None:
    def failing(error: Exception) -> Any:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            raise error

        return app

    body = b'{"prompt": "a"}'
    refused = failing(RuntimeError(f"CB generation failed for 7: {REFUSED}too long"))
    assert message_of(ask(refused, body)) == (400, f"{REFUSED}too long")
    assert message_of(ask(failing(KeyError("role")), body)) == (500, "KeyError: 'role'")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def save(attention: Any) -> str:
        path = tmp_path_factory.mktemp("checkpoint")
        LucidForCausalLM(tiny(attention)).save_pretrained(path)
        return str(path)

    return save


def test_requests_are_batched_unless_the_user_says_no(folder: Any) -> None:
    path = folder("lucid")
    assert words_of(path, ["--port", "9"]) == [path, "--continuous-batching", "--port", "9"]
    assert words_of(path, ["--no-continuous-batching"]) == [path, "--no-continuous-batching"]
    assert words_of(path, ["--continuous-batching"]) == [path, "--continuous-batching"]


def test_an_attention_with_a_state_is_served_one_by_one_and_said_so(
    folder: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder("delta")
    assert words_of(path, []) == [path]
    assert "one request after the other: the past of delta is a state" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--continuous-batching is not possible for"):
        words_of(path, ["--continuous-batching"])


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        words_of(str(tmp_path), [])
