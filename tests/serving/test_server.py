"""A real server, talked to by the real client of OpenAI over loopback: every answer is that of generate() in here."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.models.tools_of_others import NEW, PROMPT, answer, environment, program, server, write_checkpoints

openai: Any = pytest.importorskip("openai", reason="pip install openai")
pytest.importorskip("uvicorn", reason='pip install "lucid-attention[serve]"')
psutil: Any = pytest.importorskip("psutil")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# 8 blocks of 256 tokens.
ROOM = 2048
BOUNDS = ["--cb-num-blocks", "8", "--cb-max-batch-tokens", "64"]
# The load: clients at the same time, and requests of each.
CLIENTS, ROUNDS = 16, 4


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_checkpoints(tmp_path_factory.mktemp("checkpoints"), auto_map=True)


def connect(address: str) -> Any:
    return openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=300)


@pytest.mark.parametrize("batching", [True, False], ids=["batched", "one by one"])
@pytest.mark.parametrize(("name", "launch"), [("dropin", True), ("own", True), ("own", False)])
@pytest.mark.shows("`transformers serve` through `lucid run`", model="drop-in")
@pytest.mark.shows("`transformers serve` through `lucid run`", model="decoder")
@pytest.mark.shows("`transformers chat` with that server", model="drop-in")
@pytest.mark.shows("`transformers chat` with that server", model="decoder")
def test_transformers_serve_answers_with_lucid_and_chat_shows_it(
    name: str, launch: bool, batching: bool, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    folder = checkpoints[name]
    expected = answer(folder, f"<bos> {PROMPT}")
    assert expected != answer(checkpoints["softmax"], f"<bos> {PROMPT}")
    serve = program("transformers", "serve", folder)
    if not launch:
        serve = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder), "--trust-remote-code"]
    with server(
        [*serve, *(["--continuous-batching", *BOUNDS] if batching else [])], tmp_path, ends=not batching
    ) as address:
        made = connect(address).chat.completions.create(
            model=str(folder), messages=[{"role": "user", "content": PROMPT}], temperature=0, max_tokens=NEW
        )
        assert made.choices[0].message.content == expected
        # A client, which loads no model. Offline mode would keep it from the server.
        chat = [sys.executable, "-m", "transformers.cli.transformers", "chat", str(folder), address]
        chat += [f"max_new_tokens={NEW}", "do_sample=False", "--user", "somebody"]
        # It asks whether an answer of full length is to go on.
        said = f"{PROMPT}\n!exit\n!exit\n"
        online = environment(HF_HUB_OFFLINE="0")
        done = subprocess.run(chat, cwd=tmp_path, env=online, input=said, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert f"<{folder}>:\n{expected}" in "\n".join(line.rstrip() for line in done.stdout.splitlines())


class Client:
    """Requests to one checkpoint, greedy ones of NEW tokens."""

    def __init__(self, address: str, folder: Path) -> None:
        self.client, self.folder, self.address = connect(address), folder, address
        self.options = {"model": str(folder), "temperature": 0, "max_tokens": NEW}

    def complete(self, prompt: Any = PROMPT, **changes: Any) -> str:
        made = self.client.completions.create(prompt=prompt, **(self.options | changes))
        return made.choices[0].text

    def stream(self, prompt: str = PROMPT, **changes: Any) -> str:
        parts = self.client.completions.create(prompt=prompt, stream=True, **(self.options | changes))
        return "".join(part.choices[0].text for part in parts)

    def chat(self, prompt: str = PROMPT, **changes: Any) -> str:
        messages = [{"role": "user", "content": prompt}]
        made = self.client.chat.completions.create(**({"messages": messages} | self.options | changes))
        return made.choices[0].message.content

    def stream_chat(self, prompt: str = PROMPT) -> str:
        messages = [{"role": "user", "content": prompt}]
        parts = self.client.chat.completions.create(messages=messages, stream=True, **self.options)
        return "".join(part.choices[0].delta.content or "" for part in parts)


@pytest.fixture(scope="module", params=["dropin", "own"])
def client(
    request: pytest.FixtureRequest, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """`lucid serve`."""
    folder = checkpoints[request.param]
    command = [sys.executable, "-m", "lucid_lab.cli", "serve", str(folder), *BOUNDS]
    with server(command, tmp_path_factory.mktemp("server")) as address:
        yield Client(address, folder)


@pytest.mark.shows("`lucid serve`: an OpenAI-compatible server with continuous batching", model="drop-in")
@pytest.mark.shows("`lucid serve`: an OpenAI-compatible server with continuous batching", model="decoder")
def test_completions_and_chats_are_those_of_generate(client: Client, checkpoints: dict[str, Path]) -> None:
    completed, chatted = answer(client.folder), answer(client.folder, f"<bos> {PROMPT}")
    assert completed != answer(checkpoints["softmax"])
    assert client.complete() == client.stream() == completed
    assert client.chat() == client.stream_chat() == chatted


def test_sixteen_clients_at_a_time_get_their_own_answers(client: Client) -> None:
    """Load: 64 requests of different lengths, 16 at a time, half of them streamed; no error."""
    words = PROMPT.split()
    prompts = [" ".join(words[: 1 + index % len(words)]) for index in range(CLIENTS * ROUNDS)]
    expected = {prompt: answer(client.folder, prompt) for prompt in set(prompts)}

    def ask(index: int) -> str | Exception:
        try:
            return (client.stream if index % 2 else client.complete)(prompts[index])
        except openai.OpenAIError as error:
            return error

    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(ask, range(len(prompts))))
    assert [one for one in answers if isinstance(one, Exception)] == []
    assert answers == [expected[prompt] for prompt in prompts]


def test_a_client_that_disconnects_leaves_room_for_others(client: Client) -> None:
    for _ in range(4):
        stream = client.client.completions.create(
            prompt=PROMPT, stream=True, **(client.options | {"max_tokens": ROOM - len(PROMPT.split())})
        )
        next(iter(stream))
        stream.close()
    assert client.complete() == answer(client.folder)


# A request, the words of its error, and its status.
BAD: dict[str, tuple[Callable[[Client], Any], str, int]] = {
    "another model": (lambda one: one.complete(model="other"), "pinned to", 400),
    "no messages": (lambda one: one.chat(messages=[]), "messages must be a list that is not empty", 400),
    "no role": (lambda one: one.chat(messages=[{"content": "w1"}]), "must be an object with a role", 400),
    "tokens": (lambda one: one.complete([1, 2]), "prompt must be a string", 400),
    "an empty prompt": (lambda one: one.complete(""), "prompt must be a string that is not empty", 400),
    "no tokens in the prompt": (lambda one: one.complete("   "), "its prompt has no tokens", 400),
    "no new tokens": (lambda one: one.complete(max_tokens=-3), "max_tokens must be an integer from 1 on", 400),
    "a word for a number": (lambda one: one.complete(temperature="hot"), "temperature must be a number", 400),
    "an unknown field": (lambda one: one.complete(extra_body={"surprise": 1}), "Unexpected fields", 422),
    "a long prompt": (lambda one: one.complete("w1 " * 3000), rf"at most {ROOM} in all.* prompt of 3000", 400),
    "a long answer": (lambda one: one.complete(max_tokens=3000), rf"at most {ROOM} in all", 400),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_a_bad_request_gets_a_clear_error_and_the_server_goes_on(
    case: tuple[Callable[[Client], Any], str, int], client: Client
) -> None:
    ask, words, status = case
    with pytest.raises(openai.APIStatusError, match=words) as caught:
        ask(client)
    assert caught.value.status_code == status
    assert client.complete() == answer(client.folder)


def test_an_error_in_a_stream_is_an_error(client: Client) -> None:
    with pytest.raises(openai.APIError) as caught:
        client.stream("w1 " * 3000)
    assert f"at most {ROOM} in all" in str(caught.value.body)
    assert client.stream() == answer(client.folder)


def test_the_server_listens_on_loopback_only(client: Client) -> None:
    port = urlsplit(client.address).port
    found = [one.laddr.ip for one in psutil.net_connections("tcp") if one.status == "LISTEN" and one.laddr.port == port]
    assert found == ["127.0.0.1"]
