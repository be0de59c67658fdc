"""Reading configuration strictly: a missing, mistyped or contradictory key is an error that names it.

Invariant: nothing is guessed. A reader is told which keys are required and what the others default to.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddtree.errors import CheckpointError, DDTreeError

__all__ = ["Fields", "read_json", "read_text"]


def read_text(path: Path, error: type[DDTreeError], wanted: str) -> str:
    """The text of a file, or an error that says what is wanted instead. Bytes that are no UTF-8 are the caller's
    to report, as a UnicodeDecodeError."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise error(f"{path}: no such file; {wanted}") from None
    except IsADirectoryError:
        raise error(f"{path}: is a folder; {wanted}") from None
    except OSError as found:
        raise error(f"{path}: cannot be read ({found.strerror}); mend the file or its permissions") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; CheckpointError when it is absent, unreadable or no object."""
    wanted = "a model folder holds config.json, tokenizer files and *.safetensors"
    try:
        content = json.loads(read_text(path, CheckpointError, wanted))
    except ValueError as error:  # not UTF-8, not JSON, or a number too long to read
        raise CheckpointError(f"{path}: not valid JSON ({error}); fetch the file again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(content).__name__}; an object is needed")
    return content


class Fields:
    """Typed access to the keys of one configuration object; `where` names it in messages."""

    def __init__(self, values: Mapping[str, Any], where: str, error: type[DDTreeError] = CheckpointError) -> None:
        self.values = values
        self.where = where
        self._error = error

    def fail(self, key: str, problem: str) -> DDTreeError:
        """The error to raise about one key."""
        return self._error(f"{self.where}: {key} {problem}")

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """A whole number of at least `minimum`; required when there is no default."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, f"must be a whole number: got {value!r}")
        if value < minimum:
            raise self.fail(key, f"must be at least {minimum}: got {value}")
        return value

    def number(self, key: str, default: float | None = None, *, above: float = 0.0) -> float:
        """A finite number greater than `above`; required when there is no default."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.fail(key, f"must be a finite number: got {value!r}")
        if value <= above:
            raise self.fail(key, f"must be greater than {above:g}: got {value:g}")
        return float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """True or false; required when there is no default."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, f"must be true or false: got {value!r}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string; required when there is no default."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.fail(key, f"must be a string: got {value!r}")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """A non-empty list of whole numbers of at least 0."""
        value = self._list(key)
        if not value or any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in value):
            raise self.fail(key, f"must be a non-empty list of whole numbers: got {value!r}")
        return tuple(value)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; empty when the key is absent."""
        value = self._list(key) if self.has(key) else []
        if any(not isinstance(v, str) for v in value):
            raise self.fail(key, f"must be a list of strings: got {value!r}")
        return tuple(value)

    def section(self, key: str) -> Fields:
        """A nested object; empty when the key is absent."""
        value = self.values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.fail(key, f"must be an object: got {value!r}")
        return Fields(value, f"{self.where}: {key}", self._error)

    def _list(self, key: str) -> list[Any]:
        value = self._get(key, None)
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self.fail(key, f"must be a list: got {value!r}")
        return list(value)

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.fail(key, "is missing")
        return value
