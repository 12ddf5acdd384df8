"""The stock server of Transformers, with LUCID and with errors in the form that OpenAI's clients read.

`lucid serve` runs this module. The only functions of the server that it touches are `build_server`, which makes the
application, and the command line.
"""

import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from ..models.dropin.api import enable_lucid
from ..models.paged.engine import REFUSED
from .checks import TEXT_FIELDS, problem


def error_body(message: str, status: int) -> dict[str, Any]:
    """The body of an error, as OpenAI's servers write it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def guard(app: Any) -> Any:
    """Let an application of Transformers' server check requests, and say in its answers what is wrong."""
    from fastapi import HTTPException, Request
    from fastapi.responses import JSONResponse

    def answer(message: str, status: int) -> JSONResponse:
        return JSONResponse(error_body(message, status), status_code=status)

    @app.exception_handler(HTTPException)
    async def explain(request: Request, error: HTTPException) -> JSONResponse:
        return answer(str(error.detail), error.status_code)

    @app.middleware("http")
    async def check(request: Request, call_next: Callable[[Request], Awaitable[Any]]) -> Any:
        if request.method == "POST" and request.url.path in TEXT_FIELDS:
            try:
                body = json.loads(await request.body())
            except ValueError as error:
                return answer(f"the body must be JSON: {error}", 400)
            if (wrong := problem(request.url.path, body)) is not None:
                return answer(wrong, 400)
        try:
            return await call_next(request)
        except Exception as error:
            _, found, reason = str(error).partition(REFUSED)
            return answer(f"{REFUSED}{reason}" if found else f"{type(error).__name__}: {error}", 400 if found else 500)

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
