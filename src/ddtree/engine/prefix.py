"""The prefix cache: full pages by the hash of all tokens up to their end. No tensors.

A page of the drafter's context is the same page, so a hit brings the drafter's context along, and a second turn
drafts as well as the first. Texts that were decoded without a drafter have no such context: they live in a realm
of their own. Only full pages are entered, and nobody writes to a full page again.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

__all__ = ["PrefixIndex", "page_keys"]


def page_keys(tokens: Sequence[int], page_size: int, realm: bytes, known: Sequence[bytes] = ()) -> list[bytes]:
    """A key for each full page of a text. known: the keys of its first pages, where they were made before."""
    keys = list(known)
    for first in range(len(keys) * page_size, len(tokens) - page_size + 1, page_size):
        before = keys[-1] if keys else realm
        part = array("q", tokens[first : first + page_size]).tobytes()
        keys.append(hashlib.blake2b(before + part, digest_size=16).digest())
    return keys


class PrefixIndex:
    """Which page holds which prefix, and in which order those that nobody uses are given up: oldest first."""

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def idle(self) -> int:
        """Pages that are kept though nobody holds them."""
        return len(self._idle)

    @property
    def idle_pages(self) -> AbstractSet[int]:
        return self._idle.keys()

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest known prefix."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def enter(self, key: bytes, page: int) -> None:
        """Remember a full page; one that holds the same text as a known one stays its owner's alone."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def knows(self, page: int) -> bool:
        """Whether others may come to share the page."""
        return page in self._key_of

    def wake(self, page: int) -> None:
        """Somebody holds the page again."""
        del self._idle[page]

    def rest(self, page: int) -> bool:
        """Nobody holds the page any more. Returns whether it is kept."""
        if page not in self._key_of:
            return False
        self._idle[page] = None
        return True

    def evict(self) -> int:
        """Forget the page that has rested longest, and return it."""
        page, _ = self._idle.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        return page

    def check(self) -> None:
        """Assert that keys and pages match, and that only known pages rest."""
        assert {page: key for key, page in self._page_of.items()} == self._key_of
        assert self._idle.keys() <= self._key_of.keys()
