"""Prompts from JSONL files, and prompts that the target writes itself.

A line is an object with `prompt` (text of one user turn) or `messages` (a chat). A file of held-out prompts keeps
everything out of the training set that shares a run of words with one of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree.config import read_text
from ddtree.errors import DataError

__all__ = ["OPENERS", "HeldOut", "Prompt", "read_prompts"]

Message = dict[str, str]
RUN_OF_WORDS = 8

# How user turns begin, for prompts that the target writes itself; the empty one leaves all to the target.
OPENERS: tuple[tuple[str, int], ...] = (
    ("", 8),
    ("Write a Python function", 2),
    ("def ", 2),
    ("from typing import List\n\n\ndef ", 2),
    ("import math\n\n\ndef ", 1),
    ("Complete the following Python function:\n\ndef ", 1),
    ("Write a", 1),
    ("Explain", 1),
    ("What", 1),
    ("How", 1),
    ("Describe", 1),
    ("Imagine you are", 1),
    ("If ", 1),
    ("A ", 1),
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A chat that awaits an answer, and where it came from."""

    messages: tuple[tuple[str, str], ...]  # (role, content)
    source: str
    license: str

    @property
    def text(self) -> str:
        """All contents in a row, to compare prompts by."""
        return "\n".join(content for _, content in self.messages)

    def as_chat(self) -> list[Message]:
        """The form that chat templates take."""
        return [{"role": role, "content": content} for role, content in self.messages]


class HeldOut:
    """Prompts that training must not see."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._runs = {run for text in texts for run in _runs(text)}

    def touches(self, text: str) -> bool:
        """Whether a text shares eight words in a row (or all its words, if fewer) with a held-out prompt."""
        return any(run in self._runs for run in _runs(text))


def read_prompts(path: Path, skip_broken: bool = False) -> tuple[list[Prompt], int]:
    """Prompts of a JSONL file, and how many broken lines were skipped. DataError names the first broken line."""
    try:
        wanted = "give a JSONL file with a `prompt` on each line"
        lines = read_text(path, DataError, wanted).split("\n")  # texts may hold other line separators
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error})") from None
    prompts: list[Prompt] = []
    broken = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompts.append(_unicode(_prompt(json.loads(line))))
        except ValueError as error:
            if not skip_broken:
                raise DataError(f"{path}, line {number}: {error}; mend it or pass --skip-broken") from None
            broken += 1
    if not prompts:
        raise DataError(f"{path}: holds no prompts")
    return prompts, broken


def _prompt(row: Any) -> Prompt:
    if not isinstance(row, dict):
        raise ValueError(f"a JSON object is needed, got {type(row).__name__}")
    source, licence = str(row.get("source", "unknown")), str(row.get("license", "unknown"))
    if isinstance(row.get("prompt"), str) and row["prompt"].strip():
        return Prompt((("user", row["prompt"]),), source, licence)
    turns = row.get("turns")
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return Prompt((("user", turns[0]),), source, licence)
    messages = row.get("messages")
    if isinstance(messages, Sequence) and messages and all(_is_message(m) for m in messages):
        return Prompt(tuple((m["role"], m["content"]) for m in messages), source, licence)
    raise ValueError("needs a non-empty text `prompt`, or `messages` with role and content")


def _unicode(prompt: Prompt) -> Prompt:
    """The prompt, if it can be written down: JSON can spell half of a surrogate pair, which is no character."""
    for text in (prompt.text, prompt.source, prompt.license):
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError("holds half of a surrogate pair, which is no Unicode text")
    return prompt


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _runs(text: str) -> Iterable[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    if len(words) < RUN_OF_WORDS:
        return [tuple(words)] if words else []
    return (tuple(words[i : i + RUN_OF_WORDS]) for i in range(len(words) - RUN_OF_WORDS + 1))
