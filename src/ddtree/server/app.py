"""The application: routes, and how they hang together."""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from ddtree.errors import DDTreeError
from ddtree.server.backend import Backend
from ddtree.server.edge import Edge
from ddtree.server.handlers import Handlers
from ddtree.server.life import Life
from ddtree.server.limits import Limits
from ddtree.server.metrics import Metrics
from ddtree.server.problem import Problem, from_error, from_validation
from ddtree.server.replies import ChatCompletion, ErrorBody, TextCompletion

__all__ = ["create_app"]

PAGES = {
    "/": ("index.html", "text/html"),
    "/ui/style.css": ("style.css", "text/css"),
    "/ui/app.js": ("app.js", "text/javascript"),
    "/ui/tree.js": ("tree.js", "text/javascript"),
    "/ui/run.js": ("run.js", "text/javascript"),
}
PAGE_HEADERS = {
    # The page holds everything that it needs; nothing from elsewhere runs in it or is told anything.
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "Something cannot be honoured; the message names it."},
    401: {"model": ErrorBody, "description": "The API key is missing or wrong."},
    404: {"model": ErrorBody, "description": "No such model."},
    408: {"model": ErrorBody, "description": "The body did not come in time."},
    413: {"model": ErrorBody, "description": "The body is too long."},
    429: {"model": ErrorBody, "description": "The queue is full; Retry-After says when to try again."},
    503: {"model": ErrorBody, "description": "Loading, or shutting down."},
}


def create_app(
    open_backend: Callable[[], Backend],
    *,
    limits: Limits,
    keys: Collection[str] = (),
    on_failure: Callable[[], None] = lambda: None,
) -> FastAPI:
    """The ASGI application. It answers `/health` at once and everything else when `open_backend` has loaded the
    model. on_failure: called, on the loading thread, when that fails; `app.state.life.failure` says why."""
    life = Life(open_backend, limits, on_failure)
    metrics = Metrics(life.snapshot)
    handlers = Handlers(life, limits, metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        life.start()
        watching = asyncio.create_task(life.watch(metrics.stuck))
        yield
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        await life.stop()

    app = FastAPI(
        title="ddtree",
        version=importlib.metadata.version("ddtree"),
        lifespan=lifespan,
        docs_url=None,  # those pages load scripts from elsewhere
        redoc_url=None,
    )
    app.state.life = life
    app.add_middleware(Edge, keys=keys, limits=limits, metrics=metrics)
    _routes(app, handlers)
    _pages(app)
    app.add_exception_handler(Problem, _wrong)
    app.add_exception_handler(DDTreeError, _failed)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _refused)
    return app


def _routes(app: FastAPI, handlers: Handlers) -> None:
    v1: dict[str, Any] = {"tags": ["OpenAI"], "responses": ERRORS}
    some: dict[int | str, dict[str, Any]] = {status: ERRORS[status] for status in (401, 404, 503)}
    app.add_api_route(
        "/v1/chat/completions", handlers.chat, methods=["POST"], **_described(v1, ChatCompletion), name="chat"
    )
    app.add_api_route(
        "/v1/completions",
        handlers.completion,
        methods=["POST"],
        **_described(v1, TextCompletion),
        name="completion",
    )
    app.add_api_route("/v1/models", handlers.models, methods=["GET"], responses=some)
    app.add_api_route("/v1/models/{name:path}", handlers.model, methods=["GET"], responses=some)
    app.add_api_route("/server_info", handlers.info, methods=["GET"], responses=some)
    app.add_api_route("/health", handlers.health, methods=["GET"])
    app.add_api_route(
        "/ready",
        handlers.readiness,
        methods=["GET"],
        responses={503: {"description": "Loading, stuck or stopping."}},
    )
    app.add_api_route("/metrics", handlers.prometheus, methods=["GET"], response_class=Response)
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        document = plain()
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)  # wrong requests are 400 here, as with OpenAI
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _described(options: dict[str, Any], answer: type) -> dict[str, Any]:
    content = {"application/json": {}, "text/event-stream": {"schema": {"type": "string"}}}
    good = {200: {"model": answer, "content": content, "description": "The answer, or its chunks when streaming."}}
    return options | {"responses": options["responses"] | good, "response_model": None}


def _pages(app: FastAPI) -> None:
    folder = resources.files("ddtree.server") / "ui"
    for path, (name, kind) in PAGES.items():
        page = _page((folder / name).read_bytes(), kind)
        app.add_api_route(path, page, methods=["GET"], include_in_schema=False, name=name)


def _page(content: bytes, kind: str) -> Callable[[], Response]:
    def page() -> Response:
        return Response(content, media_type=kind, headers=PAGE_HEADERS)

    return page


async def _wrong(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return error.response()


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, DDTreeError)
    return from_error(error).response()


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return from_validation(error.errors()).response()


async def _refused(request: Request, error: Exception) -> Response:
    """What the framework refuses by itself: unknown paths, wrong methods, bodies that cannot be read."""
    assert isinstance(error, HTTPException)
    if error.status_code == 400:
        return Problem(400, "the body cannot be read: it must be JSON in UTF-8", code="invalid_json").response()
    response = Problem(error.status_code, f"{request.method} {request.url.path}: {error.detail}").response()
    response.headers.update(error.headers or {})
    return response
