"""Server-sent events to a client that may be slow or may have gone.

Invariant: however a response ends, the request behind it has ended too: what is still running is cancelled.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ddtree.errors import DDTreeError
from ddtree.server.problem import Problem, from_error

__all__ = ["ClientGone", "EventStream", "frame", "unless_gone"]

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):  # noqa: N818 - nothing is wrong with the server
    """Nobody is there to be answered."""


def frame(document: dict[str, Any]) -> bytes:
    """One event. NaN and infinities are not JSON and cannot come this far."""
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # Models can say half a surrogate pair only through broken bytes, which decoding has replaced already.
    return b"data: " + text.encode("utf-8") + b"\n\n"


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The outcome of `work`, or ClientGone as soon as the client hangs up. Whatever is left is cancelled."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return await task
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class EventStream(Response):
    """A stream of documents. on_end is called once, when nothing more will be sent, with what cut it short."""

    media_type = "text/event-stream"

    def __init__(
        self,
        documents: AsyncIterator[dict[str, Any]],
        on_end: Callable[[Exception | None], None],
        send_s: float,
    ) -> None:
        """send_s: how long the client may take over what it is sent before it counts as gone."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._documents = documents
        self._on_end = on_end
        self._send_s = send_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure: Exception | None = None
        try:
            await unless_gone(receive, self._write(send))
        except (ClientGone, OSError, TimeoutError) as error:
            failure = error if isinstance(error, ClientGone) else ClientGone()
        except Exception as error:  # the status has been sent: the caller logs it, the client is told in _write
            failure = error
            raise
        finally:
            self._on_end(failure)

    async def _write(self, send: Send) -> None:
        async def push(message: Message) -> None:
            async with asyncio.timeout(self._send_s):
                await send(message)

        await push({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for document in self._documents:
                await push({"type": "http.response.body", "body": frame(document), "more_body": True})
            last = DONE
        except DDTreeError as error:
            last = frame(from_error(error).body)
        except (OSError, TimeoutError):
            raise
        except Exception:
            unknown = Problem(500, "the server failed on this request; its log says why", code="internal")
            await push({"type": "http.response.body", "body": frame(unknown.body), "more_body": False})
            raise
        await push({"type": "http.response.body", "body": last, "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
