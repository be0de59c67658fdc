"""A server's life: loading, ready, stopping, and the watchdog that names a stuck round."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from ddtree.engine.counters import Snapshot
from ddtree.engine.request import Completion, Piece
from ddtree.engine.service import Submission
from ddtree.errors import DDTreeError
from ddtree.server.backend import Backend
from ddtree.server.limits import Limits
from ddtree.server.logs import log, place_of
from ddtree.server.problem import Problem
from ddtree.speculation.params import SamplingParams

__all__ = ["Life", "warm"]

WATCH_S = 0.5
CLOSE_S = 5.0
WARM_TOKENS = 16


class Life:
    """Where a server is in its life. Loading runs on a thread of its own, so that it can be watched and left."""

    def __init__(
        self, open_backend: Callable[[], Backend], limits: Limits, on_failure: Callable[[], None]
    ) -> None:
        """open_backend: loads the model. on_failure: called when that fails; `failure` holds the error then."""
        self._open = open_backend
        self._limits = limits
        self._on_failure = on_failure
        self._backend: Backend | None = None
        self._stopping = False
        self._deadline_s = math.inf
        self.stuck = False
        self.failure: Exception | None = None

    @property
    def ready(self) -> bool:
        """Whether requests would be answered now."""
        return self._backend is not None and not self._stopping and not self.stuck

    @property
    def state(self) -> str:
        if self._stopping:
            return "stopping"
        if self._backend is None:
            return "loading"
        return "stuck" if self.stuck else "ready"

    def backend(self) -> Backend:
        """The loaded model. Problem while there is none."""
        if self._backend is None or self._stopping:
            reason = "is shutting down" if self._stopping else "is still loading its model"
            raise Problem(503, f"the server {reason}; try again", code=self.state, retry_after_s=5)
        return self._backend

    def snapshot(self) -> Snapshot | None:
        return None if self._backend is None else self._backend.service.snapshot()

    def start(self) -> None:
        threading.Thread(target=self._load, name="ddtree-load", daemon=True).start()

    def stop_accepting(self) -> None:
        """From now on new requests are refused, and the time for those on their way runs."""
        if not self._stopping:
            self._stopping = True
            self._deadline_s = time.monotonic() + self._limits.drain_s

    async def stop(self) -> None:
        """Finish what was accepted, as long as the limits allow, and close the engine."""
        self.stop_accepting()
        if self._backend is None:
            return
        service = self._backend.service
        left_s = max(self._deadline_s - time.monotonic(), 0.0)
        finished = await asyncio.to_thread(service.drain, left_s)
        log("drained", logging.INFO if finished else logging.WARNING, finished=finished)
        # A round that is stuck would keep the engine from closing, and must not keep the process from ending.
        closing = threading.Thread(target=service.close, name="ddtree-close", daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, CLOSE_S)

    async def watch(self, tell: Callable[[bool], None]) -> None:
        """The watchdog. tell: called with whether a round is stuck, whenever that changes."""
        while True:
            await asyncio.sleep(WATCH_S)
            now = self.snapshot()
            if now is None:
                continue
            waited = now.since_round_s or 0.0
            stuck = waited > self._limits.stuck_s
            if stuck != self.stuck:
                self.stuck = stuck
                tell(stuck)
                level = logging.ERROR if stuck else logging.WARNING
                log("round stuck" if stuck else "round moves again", level, **_facts(now, waited))

    def _load(self) -> None:
        started = time.monotonic()
        try:
            backend = self._open()
            warm(backend)
        except Exception as error:  # noqa: BLE001 - a thread's errors are lost unless they are kept
            self.failure = error
            reason = {"reason": str(error)} if isinstance(error, DDTreeError) else place_of(error)
            log("loading failed", logging.ERROR, **reason)
            self._on_failure()
            return
        self._backend = backend
        if self._stopping:  # told to stop meanwhile: nobody else will close it
            backend.service.close()
            return
        log("ready", model=backend.names[0], seconds=round(time.monotonic() - started, 2), **backend.facts)


def warm(backend: Backend) -> None:
    """Answer a short request: what is slow the first time is behind us then. DDTreeError when it fails."""
    ended = threading.Event()
    outcome: list[Completion | DDTreeError] = []

    def end(result: Completion | DDTreeError) -> None:
        outcome.append(result)
        ended.set()

    tokens = min(WARM_TOKENS, backend.max_context - 2)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    backend.service.submit(Submission(backend.encode("Hello"), params), _ignore, end)
    ended.wait()
    if isinstance(outcome[0], DDTreeError):
        raise outcome[0]


def _ignore(piece: Piece) -> None:
    """Nobody reads the warm-up."""


def _facts(now: Snapshot, waited: float) -> dict[str, Any]:
    rounds = sum(counts.rounds for counts in now.modes.values())
    modes = [mode for mode, counts in now.modes.items() if counts.rounds]
    return {
        "round": rounds + 1,
        "since_s": round(waited, 1),
        "modes": modes,
        "running": now.running,
        "waiting": now.waiting,
    }
