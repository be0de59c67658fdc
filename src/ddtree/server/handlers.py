"""What each endpoint does."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from ddtree.engine.request import Completion
from ddtree.server.answer import (
    Exchange,
    chat_answer,
    chat_chunks,
    completion_answer,
    completion_chunks,
)
from ddtree.server.backend import Backend
from ddtree.server.feed import Feed
from ddtree.server.life import Life
from ddtree.server.limits import Limits
from ddtree.server.metrics import Metrics
from ddtree.server.prepare import Work, prepare_chat, prepare_completion
from ddtree.server.problem import Problem
from ddtree.server.replies import Model, ModelList
from ddtree.server.schema import ChatRequest, CommonRequest, CompletionRequest
from ddtree.server.stream import ClientGone, EventStream, unless_gone

__all__ = ["Handlers"]


class Handlers:
    """The endpoints, and what they share."""

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
