"""From committed tokens to what a request emits: ends, stop strings, and text that is never broken.

Invariants: a token after the end of a request is never emitted; streamed pieces joined are the whole text; a piece
never ends inside a character or inside what may become a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ddtree.speculation.params import SamplingParams

__all__ = ["Decode", "Emitted", "Output"]

BROKEN = "\ufffd"  # what decoding shows for a character whose bytes are not all there
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Emitted:
    """What some committed tokens brought. finish_reason: `stop`, `length`, or None while the request goes on."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None


class Output:
    """One request's output so far. `push` it every committed token in order until it says finished."""

    def __init__(self, params: SamplingParams, eos_ids: Collection[int], decode: Decode) -> None:
        self._params = params
        self._decode = decode
        self._ends = params.ends(eos_ids)
        self._tokens: list[int] = []
        self._from = self._to = 0  # tokens before `_to` are shown as text; `_from` begins the context of the next
        self._held = ""  # whole characters that may begin a stop string
        self.finish_reason: str | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All emitted tokens, an end-of-sequence token included."""
        return tuple(self._tokens)

    @property
    def tokens_left(self) -> int:
        """How many more tokens may be emitted."""
        return self._params.max_tokens - len(self._tokens)

    def push(self, committed: Sequence[int], more_fits: bool = True) -> Emitted:
        """Emit committed tokens up to the request's end. more_fits: whether the context has room for another."""
        assert self.finish_reason is None, "the request has ended"
        emitted: list[int] = []
        pieces: list[str] = []
        # Without stop strings the text can wait until all tokens are in.
        watched = bool(self._params.stop)
        for token in committed:
            self._tokens.append(token)
            emitted.append(token)
            if watched:
                piece, stopped = self._until_stop(self._new_text())
                pieces.append(piece)
                if stopped:
                    self.finish_reason = "stop"
            if token in self._ends:
                self.finish_reason = self.finish_reason or "stop"
            elif len(self._tokens) >= self._params.max_tokens:
                self.finish_reason = self.finish_reason or "length"
            if self.finish_reason:
                break
        if self.finish_reason is None and not more_fits:
            self.finish_reason = "length"
        if not watched:
            pieces.append(self._new_text())
        if self.finish_reason:
            pieces.append(self._rest(watched))
        return Emitted("".join(pieces), tuple(emitted), self.finish_reason)

    def _new_text(self, final: bool = False) -> str:
        """Characters that became whole with the newest tokens."""
        window = self._decode(self._tokens[self._from :])
        shown = self._decode(self._tokens[self._from : self._to])
        if window.endswith(BROKEN) and not final:
            return ""
        # Keep one decoded step as context: some tokenizers decode a token differently at the start of a text.
        # Tokens without text are no context, so they join the step before them.
        if len(window) > len(shown):
            self._from, self._to = self._to, len(self._tokens)
        return window[len(shown) :]

    def _until_stop(self, text: str) -> tuple[str, bool]:
        """What may be shown of the text so far, and whether a stop string has ended it."""
        pending = self._held + text
        found = [place for stop in self._params.stop if (place := pending.find(stop)) >= 0]
        if found:
            self._held = ""
            self._from = self._to = len(self._tokens)
            return pending[: min(found)], True
        keep = max(_overlap(pending, stop) for stop in self._params.stop)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep], False

    def _rest(self, watched: bool) -> str:
        """At the end: what was held back, and the bytes of a character that never became whole."""
        text = self._new_text(final=True)
        if watched:
            text, stopped = self._until_stop(text)
            self.finish_reason = "stop" if stopped else self.finish_reason
        text, self._held = text + self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`, short of all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
