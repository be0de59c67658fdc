"""An engine on a thread of its own: submissions in from any thread, pieces out through callbacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddtree.engine.counters import ModeCounts, Snapshot
from ddtree.engine.request import Completion, Piece
from ddtree.errors import DDTreeError
from ddtree.speculation.params import SamplingParams

if TYPE_CHECKING:
    from ddtree.engine.engine import BatchEngine

__all__ = ["ModeCounts", "OnEnd", "OnPiece", "Service", "Snapshot", "Submission", "Ticket"]

OnPiece = Callable[[Piece], None]
OnEnd = Callable[[Completion | DDTreeError], None]


@dataclass(frozen=True, slots=True)
class Submission:
    """One choice of one request.

    mode, budget: caps on the engine's own, off below chain below shadow below tree; None asks for the engine's.
    logprobs: how many of the likeliest tokens to report with each token; 0 reports the chosen one alone, None
    nothing. records: whether pieces carry a RoundRecord.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    mode: str | None = None
    budget: int | None = None
    logprobs: int | None = None
    records: bool = False


@dataclass(frozen=True, slots=True)
class Ticket:
    """What `submit` hands out and `cancel` takes."""

    id: int


class Service:
    """An engine on a thread of its own. All methods may be called from any thread."""

    def __init__(self, engine: BatchEngine, *, max_queue: int) -> None:
        """max_queue: how many accepted requests may wait for a seat."""
        raise NotImplementedError

    def submit(self, submission: Submission, on_piece: OnPiece, on_end: OnEnd) -> Ticket:
        """Queue a request. Callbacks run on the engine's thread, pieces in order and then the end, and must not
        block. Raises RequestError (it cannot be honoured), BusyError (the queue is full) or ClosedError."""
        raise NotImplementedError

    def cancel(self, ticket: Ticket) -> None:
        """End a request: its pages are free within one round, and on_end gets what there is as `cancelled`.
        A request that has ended already is left alone."""
        raise NotImplementedError

    def snapshot(self) -> Snapshot:
        """The engine in numbers, as of its last step."""
        raise NotImplementedError

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait until all accepted ones have ended; False when time ran out."""
        raise NotImplementedError

    def close(self) -> None:
        """Cancel whatever runs and end the thread."""
        raise NotImplementedError
