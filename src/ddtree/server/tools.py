"""Tool calls in text: `<tool_call>` and `</tool_call>` around a JSON object, as Hermes, Qwen and others have it.

Invariant: what comes out does not depend on how the text was cut into pieces. Text that may turn into a tag is
held back until it is clear, and a call is handed out whole. Line breaks around a call belong to the call.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass

__all__ = ["CLOSE", "OPEN", "Call", "ToolParser"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Call:
    """One call, its arguments as JSON text."""

    id: str
    name: str
    arguments: str


class ToolParser:
    """Splits streamed text into words for the user and calls."""

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self._after_call = False

    def feed(self, text: str, *, final: bool = False) -> tuple[str, tuple[Call, ...]]:
        """The words and calls that are settled once `text` has come. final: nothing follows, nothing is held."""
        self._held += text
        words: list[str] = []
        calls: list[Call] = []
        while True:
            if self._after_call:
                self._held = self._held.lstrip("\n")
                self._after_call = not self._held
            found, tag, rest = self._held.partition(CLOSE if self._inside else OPEN)
            if not tag:
                break
            self._held = rest
            if not self._inside:
                words.append(found.rstrip("\n"))
            elif (call := _parse(found)) is not None:
                calls.append(call)
                self._after_call = True
            else:  # no call after all: the user sees what the model wrote
                words.append(OPEN + found + CLOSE)
            self._inside = not self._inside
        if final:
            words.append(OPEN + self._held if self._inside else self._held)
            self._held = ""
        elif not self._inside:
            keep = _may_begin_call(self._held)
            words.append(self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]
        return "".join(words), tuple(calls)


def _parse(text: str) -> Call | None:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or not isinstance(content.get("name"), str):
        return None
    arguments = content.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return Call(f"call_{secrets.token_hex(12)}", content["name"], json.dumps(arguments, ensure_ascii=False))


def _may_begin_call(text: str) -> int:
    """Length of the longest end of `text` that may be line breaks and the beginning of a tag."""
    tag = next((n for n in range(min(len(text), len(OPEN) - 1), 0, -1) if OPEN.startswith(text[-n:])), 0)
    before = text[: len(text) - tag]
    return len(text) - len(before.rstrip("\n"))
