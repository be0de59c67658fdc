"""Structured logs: one JSON object a line, with the request's id and without anybody's text.

Invariant: neither prompts nor answers, nor messages of unexpected errors (which may quote them), are written.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Any, TextIO

__all__ = ["LOGGER", "JsonLines", "log", "place_of", "set_up"]

LOGGER = logging.getLogger("ddtree.server")


class JsonLines(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        facts = dict(getattr(record, "facts", {}))
        if record.exc_info and record.exc_info[1] is not None:
            facts |= place_of(record.exc_info[1])
        return json.dumps(line | facts, ensure_ascii=True, default=str)


def set_up(stream: TextIO = sys.stderr) -> None:
    """Write the log of the server and its engine, and the warnings of the HTTP library, to a stream."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    for name in ("ddtree", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
    LOGGER.setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


def log(event: str, level: int = logging.INFO, **facts: Any) -> None:
    """Log an event with its facts."""
    LOGGER.log(level, event, extra={"facts": facts})


def place_of(error: BaseException) -> dict[str, Any]:
    """What may be logged of an unexpected error: its type and where it came from, not its message."""
    frames = traceback.extract_tb(error.__traceback__)
    return {"error": type(error).__name__, "trace": [f"{f.filename}:{f.lineno} {f.name}" for f in frames[-12:]]}
