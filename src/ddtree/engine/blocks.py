"""Pages: who holds which, exactly. No tensors.

Every page is in one of three states: free; held, by one or more sequences; or cached, held by nobody but kept for
its content until room is needed. Invariant: free + held + cached = total, and a page is held as often as it
stands in the lists of sequences.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from ddtree.engine.prefix import PrefixIndex

__all__ = ["Blocks"]


class Blocks:
    """The pages of an engine. `largest`: the most pages that one sequence may ever need."""

    def __init__(self, total: int, largest: int, prefix: PrefixIndex | None = None) -> None:
        assert total >= largest > 0, "one sequence must always fit"
        self.total = total
        self.prefix = prefix
        self._largest = largest
        self._holders = [0] * total
        self._free = bytearray(b"\x01" * total)
        self._free_count = total

    @property
    def free(self) -> int:
        return self._free_count

    @property
    def cached(self) -> int:
        return 0 if self.prefix is None else self.prefix.idle

    @property
    def available(self) -> int:
        """Pages that can be had without taking any from a sequence."""
        return self.free + self.cached

    @property
    def held(self) -> int:
        return self.total - self.available

    def holders(self, page: int) -> int:
        """How many sequences hold a page."""
        return self._holders[page]

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Hold `count` pages that nobody holds. after: the sequence's last page; consecutive pages read faster, so
        the next ones are taken where they are free."""
        assert count <= self.available, "ask `available` first"
        while self._free_count < count:
            assert self.prefix is not None
            self._give_back(self.prefix.evict())
        taken: list[int] = []
        place = self._roomy_place(count) if after is None else after + 1
        while len(taken) < count:
            if not (place < self.total and self._free[place]):
                place = self._free.find(1)
            self._free[place] = 0
            taken.append(place)
            self._free_count -= 1
            self._holders[place] = 1
            place += 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Hold pages that are held or cached already."""
        for page in pages:
            assert not self._free[page], "a free page has no content to share"
            if not self._holders[page]:
                assert self.prefix is not None
                self.prefix.wake(page)
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Let go of pages, the last one first, so that the beginning of a text outlives its end in the cache."""
        for page in reversed(pages):
            assert self._holders[page] > 0, "a page was released more often than it was held"
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if self.prefix is None or not self.prefix.rest(page):
                self._give_back(page)

    def forget(self) -> None:
        """Free all cached pages."""
        while self.prefix is not None and self.prefix.idle:
            self._give_back(self.prefix.evict())

    def check(self, lists: Iterable[Sequence[int]]) -> None:
        """Assert the invariant, given the pages of every sequence that has any."""
        wanted = Counter(page for pages in lists for page in pages)
        assert all(self._holders[page] == wanted[page] for page in range(self.total)), "held as often as listed"
        assert self._free_count == sum(self._free)
        idle = set() if self.prefix is None else self.prefix.idle_pages
        for page in range(self.total):
            states = (bool(self._free[page]), self._holders[page] > 0, page in idle)
            assert sum(states) == 1, f"page {page} is free, held, cached: {states}"
        if self.prefix is not None:
            self.prefix.check()

    def _give_back(self, page: int) -> None:
        self._free[page] = 1
        self._free_count += 1

    def _roomy_place(self, count: int) -> int:
        """Where a new sequence begins: in the longest free run, with room for it and for the one before to
        grow."""
        runs = [match.span() for match in re.finditer(b"\x01+", self._free)]
        if not runs:
            return self.total
        first, end = max(runs, key=lambda run: run[1] - run[0])
        spare = end - first - max(self._largest, count)
        return first + max(min(spare, self._largest), 0) if first else first
