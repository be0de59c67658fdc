"""From the engine's thread to the event loop: the pieces and completions of one HTTP request.

Invariant: once `cancel` has been called, every submission has ended or is being ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any

from ddtree.engine.request import Completion, Piece
from ddtree.engine.service import Submission, Ticket
from ddtree.errors import ClosedError, DDTreeError
from ddtree.server.backend import ServiceLike

__all__ = ["Event", "Feed"]

# The choice's index, and what came of it.
Event = tuple[int, Piece | Completion]


class Feed:
    """The choices of one request, on their way from the engine. Made and used on the event loop."""

    def __init__(self, service: ServiceLike, submissions: Sequence[Submission]) -> None:
        """Submits everything or nothing. RequestError, BusyError or ClosedError."""
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self._open: dict[int, Ticket] = {}
        try:
            for index, submission in enumerate(submissions):
                put = self._putter(index)
                self._open[index] = service.submit(submission, put, put)
        except BaseException:
            self.cancel()
            raise

    async def events(self) -> AsyncIterator[Event]:
        """Every piece, and each choice's completion. Raises the error that ended a choice."""
        while self._open:
            index, event = await self._queue.get()
            if not isinstance(event, Piece):
                del self._open[index]
            if isinstance(event, DDTreeError):
                raise event
            if isinstance(event, Completion) and event.finish_reason == "cancelled":
                raise ClosedError(
                    "the server was stopped before this answer was finished; send it again elsewhere"
                )
            yield index, event

    def cancel(self) -> None:
        """End what has not ended. May be called more than once."""
        while self._open:
            self._service.cancel(self._open.popitem()[1])

    def _putter(self, index: int) -> Callable[[Any], None]:
        def put(event: Any) -> None:
            # A server that was stopped by force has no loop any more; the engine's thread must go on.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, event))

        return put
