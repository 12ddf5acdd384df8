"""The stock server of Transformers, with LUCID and with errors in the form that OpenAI's clients read.

`lucid serve` runs this module. The only functions of the server that it touches are `build_server`, which makes the
application, and the command line.
"""

import json
import sys
from typing import Any

from ..files import parse_json
from ..models.dropin.api import enable_lucid
from ..models.paged.engine import REFUSED
from .checks import TEXT_FIELDS, problem


def error_body(message: str, status: int) -> dict[str, Any]:
    """The body of an error, as OpenAI's servers write it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


class CheckedRequests:
    """A layer around an ASGI application: requests that cannot be answered do not reach it, its errors are explained.

    It hands everything else on as it is, streams and disconnections among them.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in TEXT_FIELDS:
            await self.app(scope, receive, send)
            return
        body: bytes | None = await _read(receive)
        if (wrong := _problem(scope["path"], body)) is not None:
            await _answer(send, wrong, 400)
            return
        started = False

        async def receive_again() -> Any:
            nonlocal body
            if body is None:
                return await receive()
            message, body = {"type": "http.request", "body": body, "more_body": False}, None
            return message

        async def watched(message: Any) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive_again, watched)
        except Exception as error:
            if started:
                raise
            _, found, reason = str(error).partition(REFUSED)
            message = f"{REFUSED}{reason}" if found else f"{type(error).__name__}: {error}"
            await _answer(send, message, 400 if found else 500)


async def _read(receive: Any) -> bytes:
    """The body of a request."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


def _problem(path: str, body: bytes | None) -> str | None:
    try:
        return problem(path, parse_json(body or b"", "body", object))
    except ValueError as error:
        return f"the body must be JSON: {error}"


async def _answer(send: Any, message: str, status: int) -> None:
    body = json.dumps(error_body(message, status)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def guard(app: Any) -> Any:
    """Let an application of Transformers' server check requests, and say in its answers what is wrong."""
    from fastapi import HTTPException, Request
    from fastapi.responses import JSONResponse

    @app.exception_handler(HTTPException)
    async def explain(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(error_body(str(error.detail), error.status_code), status_code=error.status_code)

    app.add_middleware(CheckedRequests)
    return app


def main(words: list[str]) -> None:
    """Run `transformers serve` with these words."""
    from transformers.cli.serving import server
    from transformers.cli.transformers import app

    enable_lucid()
    build, engines = server.build_server, []

    def build_guarded(*args: Any, generation_state: Any, **kwargs: Any) -> Any:
        engines.append(generation_state)
        return guard(build(*args, generation_state=generation_state, **kwargs))

    server.build_server = build_guarded
    try:
        app(["serve", *words])
    finally:
        # The thread of continuous batching would keep the process alive.
        for engine in engines:
            engine.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
