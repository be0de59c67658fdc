"""How much one request and one client may ask of the server. Frozen; checked once."""

from __future__ import annotations

from dataclasses import dataclass

from ddtree.errors import ConfigError

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a server.

    body_bytes: of one request. tokens: of one answer; None leaves it to the context. choices: answers of one
    request, all prompts together. receive_s: for a whole body to come in. send_s: for a client to take what it is
    sent; a slower one counts as gone. drain_s: for accepted requests to finish when the server is told to
    stop. stuck_s: a round that takes longer is reported, and the server is not ready until it ends.
    """

    body_bytes: int = 4 * 2**20
    tokens: int | None = None
    choices: int = 64
    receive_s: float = 30.0
    send_s: float = 30.0
    drain_s: float = 60.0
    stuck_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("body_bytes", "choices", "receive_s", "send_s", "drain_s", "stuck_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be greater than 0: got {getattr(self, name)}")
        if self.tokens is not None and self.tokens < 1:
            raise ConfigError(f"tokens must be at least 1, or None: got {self.tokens}")
