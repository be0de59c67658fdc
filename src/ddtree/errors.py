"""Every error a user can meet, in one tree.

A message says what is wrong, why it is wrong, and the mend, in one line. Code raises these at boundaries
(arguments, files, checkpoints, the network); inside, broken invariants are assertions.
"""

from __future__ import annotations

__all__ = [
    "BusyError",
    "CheckpointError",
    "ClosedError",
    "ConfigError",
    "DDTreeError",
    "DataError",
    "DivergedError",
    "DownloadError",
    "EngineError",
    "RequestError",
    "StorageError",
    "UnsupportedError",
]


class DDTreeError(Exception):
    """Base of all errors that ddtree raises on purpose. `exit_code` is what the command line ends with."""

    exit_code = 1


class ConfigError(DDTreeError):
    """An option or a configuration file holds something that cannot be honoured."""

    exit_code = 2


class RequestError(DDTreeError):
    """One request asks for something impossible: a prompt too long, nonsense sampling values."""

    exit_code = 2


class UnsupportedError(DDTreeError):
    """Named and understood, but not supported: another drafter family, a quantised checkpoint."""

    exit_code = 3


class CheckpointError(DDTreeError):
    """A checkpoint is missing, damaged, or does not fit the target it is meant for."""

    exit_code = 4


class DownloadError(DDTreeError):
    """A model could not be fetched."""

    exit_code = 5


class StorageError(DDTreeError):
    """A file could not be written: disk full, no permission."""

    exit_code = 6


class DataError(DDTreeError):
    """A prompt or training file is broken; the message carries the line number."""

    exit_code = 7


class DivergedError(DDTreeError):
    """Training came to a loss or a gradient that is no number."""

    exit_code = 8


class BusyError(DDTreeError):
    """The queue is full. `retry_after_s` is when a place may be free."""

    exit_code = 9

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ClosedError(DDTreeError):
    """The engine takes no new requests: it is draining or closed."""

    exit_code = 9


class EngineError(DDTreeError):
    """A request was lost to a fault that was not its own."""

    exit_code = 10
