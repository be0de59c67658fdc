"""The outermost layer: request ids, the API key, bounded bodies, a log line a request, and a net for faults.

A plain ASGI layer: it must not stand between a response and the client's disconnect.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Collection
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ddtree.server.limits import Limits
from ddtree.server.logs import log, place_of
from ddtree.server.metrics import Metrics
from ddtree.server.problem import Problem
from ddtree.server.stream import ClientGone

__all__ = ["Edge"]

PROTECTED = ("/v1/", "/server_info")
REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
GONE = 499  # what logs call a client that left before it was answered


class Edge:
    """Wraps the application. keys: API keys, any of which opens it; empty for an open server."""

    def __init__(self, app: ASGIApp, *, keys: Collection[str], limits: Limits, metrics: Metrics) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]
        self._limits = limits
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        facts: dict[str, Any] = {}
        scope.setdefault("state", {})["facts"] = facts
        status = 0

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            if scope["path"].startswith(PROTECTED):
                self._authorise(headers)
            await self._app(scope, await self._bounded(headers, receive), tagged)
        except Problem as problem:
            await problem.response()(scope, receive, tagged)
        except ClientGone:
            status = GONE
        except Exception as error:  # noqa: BLE001 - whatever it is, the server lives on
            log("fault", logging.ERROR, request_id=request_id, path=scope["path"][:200], **place_of(error))
            if not status:
                unknown = Problem(500, "the server failed on this request; its log says why", code="internal")
                await unknown.response()(scope, receive, tagged)
        finally:
            seconds = time.monotonic() - started
            route = getattr(scope.get("route"), "path", "other")
            status = GONE if facts.pop("gone", False) else status
            self._metrics.request(route, status, seconds)
            if route not in ("/health", "/ready", "/metrics"):
                log(
                    "request",
                    request_id=request_id,
                    method=scope["method"][:16],
                    route=route,
                    status=status,
                    seconds=round(seconds, 4),
                    **facts,
                )

    def _authorise(self, headers: Headers) -> None:
        if not self._digests:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        found = _digest(key.strip())
        # Every key is compared in full, so the time tells nothing of how close a guess was.
        matches = [hmac.compare_digest(found, one) for one in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise Problem(
                401,
                "the API key is missing or wrong; send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
            )

    async def _bounded(self, headers: Headers, receive: Receive) -> Receive:
        """Read the body, and hand it on in one piece. Problem when it is too long or does not come."""
        most = self._limits.body_bytes
        too_long = Problem(
            413, f"the body is longer than {most} bytes, the most this server takes", code="too_large"
        )
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > most:
            raise too_long
        parts: list[bytes] = []
        size = 0
        more = True
        try:
            async with asyncio.timeout(self._limits.receive_s):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    more = message.get("more_body", False)
                    if size > most:
                        raise too_long
        except TimeoutError:
            limit = self._limits.receive_s
            raise Problem(
                408, f"the body did not come within {limit:g} s; send it again", code="timeout"
            ) from None
        handed = False

        async def replay() -> Message:
            nonlocal handed
            if handed:
                return await receive()
            handed = True
            return {"type": "http.request", "body": b"".join(parts), "more_body": False}

        return replay


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
