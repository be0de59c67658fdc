"""Running the application on a port until it is told to stop.

Invariant: told to stop, by SIGTERM or Ctrl-C, the server takes no new connections, finishes what it has accepted
within its limits, and ends without an error. Told twice, it ends at once.
"""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from ddtree.errors import ConfigError
from ddtree.server.app import create_app
from ddtree.server.backend import Backend
from ddtree.server.life import Life
from ddtree.server.limits import Limits
from ddtree.server.logs import log

__all__ = ["listen", "serve"]

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A bound socket: whoever is second on a port hears of it before a model is loaded. ConfigError."""
    try:
        place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(place[0], place[1])
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {host!r} port {port}: {error}; check --host and --port") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(place[4])
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} of {host} is taken by another program; pass another --port") from None
        raise ConfigError(
            f"cannot listen on {host!r} port {port}: {error.strerror}; pass another --port"
        ) from None
    return bound


def serve(
    bound: socket.socket, open_backend: Callable[[], Backend], *, limits: Limits, keys: Collection[str]
) -> None:
    """Serve until told to stop. Raises what kept the model from loading."""
    box: list[_Server] = []
    app = create_app(open_backend, limits=limits, keys=keys, on_failure=lambda: box[0].leave())
    config = uvicorn.Config(
        app,
        log_config=None,  # the server's own log has a line for each request
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(round(limits.drain_s), 1),
        lifespan="on",
        ws="none",
    )
    life: Life = app.state.life
    server = _Server(config, life)
    box.append(server)
    asyncio.run(server.serve(sockets=[bound]))
    if life.failure is not None:
        raise life.failure


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, life: Life) -> None:
        super().__init__(config)
        self._life = life

    def leave(self) -> None:
        """End, from any thread."""
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn does, but a signal that was obeyed is not raised again: to stop when told is a success."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            log("stopping", signal=signal.Signals(sig).name)
            self._life.stop_accepting()
        self.force_exit = self.should_exit
        self.should_exit = True
