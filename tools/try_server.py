"""Talk to a server of OpenAI's protocol: a chat, its stream, a bad request, and 20 requests at once with their speed.

    python tools/try_server.py MODEL [--url http://localhost:8000/v1]

MODEL is the name that the server knows. The guide about serving shows what it prints.
"""

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai

REQUESTS, TOKENS = 20, 48
QUESTION: Any = [{"role": "user", "content": "Name three cities of Italy."}]


def chat(client: openai.OpenAI, model: str) -> str:
    """The answer to a question."""
    answer = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=24, temperature=0)
    return answer.choices[0].message.content or ""


def stream(client: openai.OpenAI, model: str) -> list[str]:
    """The same, in pieces."""
    chunks = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=24, temperature=0, stream=True)
    return [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]


def at_once(client: openai.OpenAI, model: str) -> tuple[int, float]:
    """Tokens of all answers to `REQUESTS` different prompts, and the seconds that they took together."""

    def complete(number: int) -> int:
        prompt = f"Chapter {number}. In the year {1800 + number} the town"
        done = client.completions.create(model=model, prompt=prompt, max_tokens=TOKENS, temperature=0)
        assert done.usage is not None
        return done.usage.completion_tokens

    start = time.monotonic()
    with ThreadPoolExecutor(REQUESTS) as threads:
        tokens = sum(threads.map(complete, range(REQUESTS)))
    return tokens, time.monotonic() - start


def main() -> int:
    """Print what the server answers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", metavar="MODEL", help="name of the model on the server")
    parser.add_argument("--url", default="http://localhost:8000/v1", help="(default: %(default)s)")
    args = parser.parse_args()
    client = openai.OpenAI(base_url=args.url, api_key="none", max_retries=0, timeout=600)
    whole, pieces = chat(client, args.model), stream(client, args.model)
    print("chat:  ", " ".join(whole.split()))
    print(f"stream: {len(pieces)} pieces, {'the same text' if ''.join(pieces) == whole else ''.join(pieces)!r}")
    try:
        client.chat.completions.create(model=args.model, messages=QUESTION, max_tokens=8, temperature=-3)
    except openai.APIStatusError as error:
        print(f"temperature=-3: {error.status_code}")
    else:
        print("temperature=-3: accepted")
    tokens, seconds = at_once(client, args.model)
    print(f"{REQUESTS} at once: {tokens} tokens in {seconds:.1f} s, {tokens / seconds:.0f} tokens/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
