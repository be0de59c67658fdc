"""Who runs in the next step, and on which pages. No tensors.

Requests are served in the order of their arrival. A running request holds pages for everything it has committed
and for the widest round that it may run next; when those cannot be had, the youngest running request gives its
pages up, waits at the head of the queue, and later runs its text again from the beginning (or from where the
prefix cache ends), so nothing that it has said is lost. The oldest request is never pushed out, and a single one
always fits, so every request comes to its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from ddtree.engine.blocks import Blocks
from ddtree.engine.prefix import page_keys

__all__ = ["Chunk", "Scheduler", "StepPlan", "Track"]

REALMS = {True: b"with drafter context", False: b"target alone"}


@dataclass(eq=False, slots=True)
class Track:
    """What the scheduler knows of a request.

    tokens: prompt and everything said, the anchor last once there is one. width: places beyond the committed ones
    that its next round may write. context: whether the drafter's context is kept for it. computed: positions that
    are in the cache. goal: positions that must be before it can be decoded. hit: prompt tokens found in the prefix
    cache at its first admission. pages: in the order of its places.
    """

    tokens: list[int]
    width: int
    context: bool
    goal: int
    computed: int = 0
    hit: int | None = None
    pages: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    entered: int = 0  # pages that the prefix cache was told of, or that came from there

    @property
    def decoding(self) -> bool:
        return self.computed >= self.goal


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a text to run: `count` tokens from place `first` on."""

    track: Track
    first: int
    count: int

    @property
    def tokens(self) -> list[int]:
        return self.track.tokens[self.first : self.first + self.count]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: texts to run first, and who is decoded. fresh: pages that got a new holder."""

    chunks: tuple[Chunk, ...]
    decode: tuple[Track, ...]
    preempted: tuple[Track, ...]
    fresh: tuple[int, ...]


class Scheduler:
    """The queue, the seats and the pages of an engine."""

    def __init__(self, blocks: Blocks, page_size: int, seats: int, prefill_chunk: int) -> None:
        """prefill_chunk: how many rows, padding included, one prefill pass may have."""
        self.blocks = blocks
        self.waiting: deque[Track] = deque()
        self.running: list[Track] = []
        self.preemptions = 0
        self._page_size = page_size
        self._seats = seats
        self._chunk = prefill_chunk
        self._fresh: list[int] = []

    def add(self, track: Track) -> None:
        self.waiting.append(track)

    def remove(self, track: Track) -> None:
        """The request has ended, one way or another: its pages are free or cached from here on."""
        if track in self.running:
            self._enter(track)
            self.running.remove(track)
            self._let_go(track)
        elif track in self.waiting:
            self.waiting.remove(track)

    def computed(self, track: Track, positions: int) -> None:
        """So many positions of a request are in the cache, and their tokens are in `track.tokens`."""
        track.computed = positions
        self._enter(track)

    def plan(self) -> StepPlan:
        """Decide the next step and reserve what it may write."""
        preempted = self._make_room()
        self._admit()
        fresh, self._fresh = tuple(self._fresh), []
        decode = tuple(track for track in self.running if track.decoding)
        return StepPlan(tuple(self._chunks()), decode, tuple(preempted), fresh)

    def check(self) -> None:
        """Assert that no page is lost or held wrongly, and that nobody shares a page that it may yet write."""
        assert not any(track.pages for track in self.waiting)
        self.blocks.check(track.pages for track in self.running)
        prefix = self.blocks.prefix
        for track in self.running:
            for page in track.pages[track.computed // self._page_size :]:
                assert self.blocks.holders(page) == 1, "two requests would write one page"
                assert prefix is None or not prefix.knows(page), "a page of the prefix cache would be written"

    def _make_room(self) -> list[Track]:
        """Pages for the next round of every request that is decoded; the youngest leave where there are too
        few."""
        preempted: list[Track] = []
        for track in list(self.running):
            if track not in self.running or not track.decoding:
                continue
            missing = self._missing(track, len(track.pages))
            while missing > self.blocks.available:
                youngest = self.running[-1]
                self._preempt(youngest)
                preempted.append(youngest)
                if youngest is track:
                    break
            else:
                self._grow(track, missing)
        return preempted

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._seats:
            track = self.waiting[0]
            hits = self._hits(track)
            # One page to spare for each of the others, or they would push the newcomer out again at once.
            idle = sum(not self._held(page) for page in hits)
            if self._missing(track, len(hits)) + idle + len(self.running) > self.blocks.available:
                return
            self.waiting.popleft()
            self.running.append(track)
            self.blocks.share(hits)
            track.pages = list(hits)
            track.entered = len(hits)
            track.computed = min(len(hits) * self._page_size, track.goal)
            if track.hit is None:
                track.hit = track.computed
            self._grow(track, self._missing(track, len(hits)))

    def _chunks(self) -> Iterator[Chunk]:
        """Prefill passes are padded to their longest part, so that is what counts against the budget."""
        widest = taken = 0
        for track in self.running:
            if track.decoding:
                continue
            count = min(track.goal - track.computed, self._chunk)
            if taken and max(widest, count) * (taken + 1) > self._chunk:
                return
            widest, taken = max(widest, count), taken + 1
            yield Chunk(track, track.computed, count)

    def _missing(self, track: Track, pages: int) -> int:
        places = max(track.goal, track.computed) + track.width
        return max(-(-places // self._page_size) - pages, 0)

    def _grow(self, track: Track, count: int) -> None:
        if count:
            taken = self.blocks.take(count, track.pages[-1] if track.pages else None)
            track.pages += taken
            self._fresh += taken

    def _preempt(self, track: Track) -> None:
        self.running.remove(track)
        self._enter(track)
        self._let_go(track)
        # All but the anchor, whose key and value no round has made yet.
        if track.computed >= track.goal:
            track.goal = track.computed
        track.computed = 0
        self.waiting.appendleft(track)
        self.preemptions += 1

    def _let_go(self, track: Track) -> None:
        self.blocks.release(track.pages)
        track.pages, track.entered = [], 0

    def _hits(self, track: Track) -> list[int]:
        """Cached pages that the text begins with, short of its last token: something must be left to run."""
        if self.blocks.prefix is None:
            return []
        self._extend_keys(track, len(track.tokens) - 1)
        return self.blocks.prefix.find(track.keys)

    def _held(self, page: int) -> bool:
        return self.blocks.holders(page) > 0

    def _enter(self, track: Track) -> None:
        """Tell the prefix cache of pages that became full of tokens that were truly said."""
        prefix = self.blocks.prefix
        full = min(track.computed, len(track.tokens)) // self._page_size
        if prefix is None or full <= track.entered:
            return
        self._extend_keys(track, full * self._page_size)
        for place in range(track.entered, full):
            prefix.enter(track.keys[place], track.pages[place])
        track.entered = full

    def _extend_keys(self, track: Track, tokens: int) -> None:
        realm = REALMS[track.context]
        track.keys = page_keys(track.tokens[:tokens], self._page_size, realm, track.keys)
