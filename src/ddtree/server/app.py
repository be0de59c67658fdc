"""The application: routes, and how they hang together."""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ddtree.engine.request import Completion
from ddtree.errors import DDTreeError
from ddtree.server.answer import (
    Exchange,
    chat_answer,
    chat_chunks,
    completion_answer,
    completion_chunks,
)
from ddtree.server.backend import Backend
from ddtree.server.edge import Edge
from ddtree.server.feed import Feed
from ddtree.server.life import Life
from ddtree.server.limits import Limits
from ddtree.server.metrics import Metrics
from ddtree.server.prepare import Work, prepare_chat, prepare_completion
from ddtree.server.problem import Problem, from_error, from_validation
from ddtree.server.schema import (
    ChatCompletion,
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    ErrorBody,
    Model,
    ModelList,
    TextCompletion,
)
from ddtree.server.stream import ClientGone, EventStream, unless_gone

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


class Server:
    """The handlers, and what they share."""

    def __init__(self, life: Life, limits: Limits, metrics: Metrics) -> None:
        self.life = life
        self.limits = limits
        self.metrics = metrics
        self.started = int(time.time())

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        backend = self.life.backend()
        work = await run_in_threadpool(prepare_chat, body, backend, self.limits)
        return await self._answer(body, request, backend, work, chat_answer, chat_chunks)

    async def completion(self, body: CompletionRequest, request: Request) -> Response:
        backend = self.life.backend()
        work = await run_in_threadpool(prepare_completion, body, backend, self.limits)
        return await self._answer(body, request, backend, work, completion_answer, completion_chunks)

    async def _answer(
        self,
        body: CommonRequest,
        request: Request,
        backend: Backend,
        work: Work,
        gather: Callable[[Exchange], Any],
        chunks: Callable[[Exchange], AsyncIterator[dict[str, Any]]],
    ) -> Response:
        facts = request.scope["state"]["facts"]
        begun = time.monotonic()

        def first() -> None:
            facts["first_token_s"] = round(time.monotonic() - begun, 4)
            self.metrics.first_token(time.monotonic() - begun)

        def done(completions: list[Completion]) -> None:
            facts["completion_tokens"] = sum(len(one.token_ids) for one in completions)
            facts["rounds"] = sum(one.rounds for one in completions)
            facts["finish"] = sorted({one.finish_reason for one in completions})
            for one in completions:
                self.metrics.answered(one)

        facts |= {
            "prompt_tokens": sum(work.prompts),
            "choices": len(work.submissions),
            "stream": bool(body.stream),
        }
        feed = Feed(backend.service, work.submissions)
        options = body.stream_options
        exchange = Exchange(work, backend, feed, first, done, bool(options and options.include_usage))
        if body.stream:

            def ended(failure: Exception | None) -> None:
                feed.cancel()
                facts["gone"] = isinstance(failure, ClientGone)

            return EventStream(chunks(exchange), ended, self.limits.send_s)
        try:
            answer = await unless_gone(request.receive, gather(exchange))
        finally:
            feed.cancel()
        return JSONResponse(answer.model_dump())

    def models(self) -> ModelList:
        backend = self.life.backend()
        return ModelList(data=[self._model(backend, name) for name in backend.names])

    def model(self, name: str) -> Model:
        backend = self.life.backend()
        if name not in backend.names:
            raise Problem(
                404, f"{name!r} is not served here; this server has {', '.join(backend.names)}", param="model"
            )
        return self._model(backend, name)

    def _model(self, backend: Backend, name: str) -> Model:
        return Model(id=name, created=self.started, max_model_len=backend.max_context)

    def info(self) -> dict[str, Any]:
        backend = self.life.backend()
        return {
            "version": importlib.metadata.version("ddtree"),
            "state": self.life.state,
            "model": backend.names[0],
            "names": list(backend.names),
            "mode": backend.mode,
            "budget": backend.budget,
            "max_context": backend.max_context,
            "chat_template": backend.tokenizer.can_chat,
            "limits": {
                "body_bytes": self.limits.body_bytes,
                "tokens": self.limits.tokens,
                "choices": self.limits.choices,
            },
            **backend.facts,
        }

    def health(self) -> dict[str, str]:
        return {"status": "alive"}

    def readiness(self) -> JSONResponse:
        state = self.life.state
        return JSONResponse({"status": state}, 200 if self.life.ready else 503)

    def prometheus(self) -> Response:
        self.metrics.ready(self.life.ready)
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


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
    server = Server(life, limits, metrics)

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
    _routes(app, server)
    _pages(app)
    app.add_exception_handler(Problem, _wrong)
    app.add_exception_handler(DDTreeError, _failed)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _refused)
    return app


def _routes(app: FastAPI, server: Server) -> None:
    v1: dict[str, Any] = {"tags": ["OpenAI"], "responses": ERRORS}
    some: dict[int | str, dict[str, Any]] = {status: ERRORS[status] for status in (401, 404, 503)}
    app.add_api_route(
        "/v1/chat/completions", server.chat, methods=["POST"], **_described(v1, ChatCompletion), name="chat"
    )
    app.add_api_route(
        "/v1/completions", server.completion, methods=["POST"], **_described(v1, TextCompletion), name="completion"
    )
    app.add_api_route("/v1/models", server.models, methods=["GET"], responses=some)
    app.add_api_route("/v1/models/{name:path}", server.model, methods=["GET"], responses=some)
    app.add_api_route("/server_info", server.info, methods=["GET"], responses=some)
    app.add_api_route("/health", server.health, methods=["GET"])
    app.add_api_route(
        "/ready",
        server.readiness,
        methods=["GET"],
        responses={503: {"description": "Loading, stuck or stopping."}},
    )
    app.add_api_route("/metrics", server.prometheus, methods=["GET"], response_class=Response)
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
