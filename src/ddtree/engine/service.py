"""An engine on a thread of its own: submissions in from any thread, pieces out through callbacks.

The thread alone touches the engine; others leave commands in an inbox, which is emptied between two steps. A
fault in one request, its callbacks included, ends that request; a fault in a step ends the requests of that
moment with an error, and the service goes on.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from ddtree.engine.batch import Live
from ddtree.engine.counters import ModeCounts, Snapshot
from ddtree.engine.engine import BatchEngine
from ddtree.engine.request import Completion, Job, Piece
from ddtree.errors import BusyError, ClosedError, DDTreeError, EngineError
from ddtree.speculation.params import SamplingParams
from ddtree.speculation.plan import FixedPolicy

__all__ = ["ModeCounts", "OnEnd", "OnPiece", "Service", "Snapshot", "Submission", "Ticket"]

OnPiece = Callable[[Piece], None]
OnEnd = Callable[[Completion | DDTreeError], None]

log = logging.getLogger(__name__)

FIRST_GUESS_S = 1.0  # how long a request takes, before any has ended
WEIGHT_OF_NEWEST = 0.2


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
        self._engine = engine
        self._places = engine.memory.sequences + max_queue
        self._ids = itertools.count(1)
        self._changed = threading.Condition()
        # Guarded by `_changed`:
        self._inbox: deque[Callable[[], None]] = deque()
        self._open: dict[int, float] = {}  # accepted and not ended, with the time of acceptance
        self._refusal: str | None = None
        self._closing = False
        self._mean_s = FIRST_GUESS_S
        # Touched by the thread alone:
        self._live: dict[int, Live] = {}
        self._latest = engine.snapshot()
        engine.serving = True
        self._thread = threading.Thread(target=self._serve, name="ddtree-engine", daemon=True)
        self._thread.start()

    def submit(self, submission: Submission, on_piece: OnPiece, on_end: OnEnd) -> Ticket:
        """Queue a request. Callbacks run on the engine's thread, pieces in order and then the end, and must not
        block. Raises RequestError (it cannot be honoured), BusyError (the queue is full) or ClosedError."""
        plan = self._engine.admission.capped(self._engine.plan, submission.mode, submission.budget)
        policy = FixedPolicy(plan)
        job = Job(submission.prompt, submission.params, policy, submission.records, submission.logprobs)
        self._engine.admission.check(job)
        with self._changed:
            if self._refusal is not None:
                raise ClosedError(self._refusal)
            if len(self._open) >= self._places:
                raise BusyError(
                    f"{len(self._open)} requests are running or waiting, and no more may wait; try again later",
                    retry_after_s=max(1.0, self._mean_s / self._engine.memory.sequences),
                )
            ticket = Ticket(next(self._ids))
            self._open[ticket.id] = self._engine.clock()
            self._inbox.append(lambda: self._begin(ticket.id, job, on_piece, on_end))
            self._changed.notify_all()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request: its pages are free within one round, and on_end gets what there is as `cancelled`.
        A request that has ended already is left alone."""
        with self._changed:
            self._inbox.append(lambda: self._cancel(ticket.id))
            self._changed.notify_all()

    def snapshot(self) -> Snapshot:
        """The engine in numbers, as of the last step or end of a request."""
        latest = self._latest
        with self._changed:
            waiting = max(len(self._open) - latest.running, 0)
        return replace(latest, waiting=waiting, since_round_s=self._engine.since_round_s)

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait until all accepted ones have ended; False when time ran out."""
        with self._changed:
            self._refusal = self._refusal or "no new requests are taken: those on their way are being finished"
            return self._changed.wait_for(lambda: not self._open, timeout_s)

    def close(self) -> None:
        """Cancel whatever runs and end the thread."""
        with self._changed:
            self._refusal = "no new requests are taken: the engine is closed"
            self._closing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # On the engine's thread

    def _serve(self) -> None:
        engine = self._engine
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._inbox or engine.busy or self._closing)
                commands, self._inbox = self._inbox, deque()
                closing = self._closing
            for command in commands:
                command()
            if closing:
                for live in list(self._live.values()):
                    engine.cancel(live)
                engine.serving = False
                self._latest = engine.snapshot()
                return
            if engine.busy:
                self._step()
            self._latest = engine.snapshot()

    def _step(self) -> None:
        try:
            self._engine.step()
        except Exception as error:  # out of memory, a device fault: these requests are lost, the service is not
            log.exception("a step failed; ending the requests that were on their way")
            what = f"{type(error).__name__}: {error}"
            self._engine.abandon(EngineError(f"the engine failed while answering ({what}); try again"))

    def _begin(self, number: int, job: Job, on_piece: OnPiece, on_end: OnEnd) -> None:
        def piece(one: Piece) -> None:
            try:
                on_piece(one)
            except Exception:  # the caller's code: its fault ends its own request
                log.exception("a callback of request %d failed; cancelling the request", number)
                self.cancel(Ticket(number))

        def end(result: Completion | DDTreeError) -> None:
            self._live.pop(number, None)
            self._latest = self._engine.snapshot()  # whoever is told of the end sees the pages free
            try:
                on_end(result)
            except Exception:  # as above; the request has ended anyway
                log.exception("the last callback of request %d failed", number)
            self._ended(number)

        try:
            self._live[number] = self._engine.add(job, piece, end)
        except DDTreeError as error:
            end(error)
        except Exception as error:  # no memory for its noise, say: the thread must live on
            log.exception("request %d could not be begun", number)
            end(EngineError(f"the request could not be begun ({type(error).__name__}: {error}); try again"))

    def _cancel(self, number: int) -> None:
        if number in self._live:
            self._engine.cancel(self._live[number])

    def _ended(self, number: int) -> None:
        with self._changed:
            took_s = self._engine.clock() - self._open.pop(number)
            self._mean_s += WEIGHT_OF_NEWEST * (took_s - self._mean_s)
            self._changed.notify_all()
