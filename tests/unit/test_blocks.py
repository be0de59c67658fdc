"""Pages: exact accounting under any takes, shares and releases, and what the prefix cache remembers."""

from __future__ import annotations

import random

import pytest

from ddtree.engine.blocks import Blocks
from ddtree.engine.prefix import PrefixIndex, page_keys


def test_pages_of_one_sequence_are_consecutive_while_they_can_be():
    blocks = Blocks(12, largest=12)
    pages = blocks.take(3)
    for _ in range(9):
        pages += blocks.take(1, after=pages[-1])
    assert pages == list(range(12))
    assert (blocks.free, blocks.held, blocks.available) == (0, 12, 0)


def test_two_sequences_grow_without_meeting():
    blocks = Blocks(40, largest=10)
    first, second = blocks.take(1), blocks.take(1)
    for _ in range(9):
        first += blocks.take(1, after=first[-1])
        second += blocks.take(1, after=second[-1])
    for pages in (first, second):
        assert pages == list(range(pages[0], pages[0] + 10))


@pytest.mark.parametrize("cached", [False, True])
def test_pages_are_conserved(cached):
    """Random takes, shares, releases and entries: after each, every page is in exactly one state."""
    draw = random.Random(5)
    prefix = PrefixIndex() if cached else None
    blocks = Blocks(30, largest=10, prefix=prefix)
    lists: list[list[int]] = []
    evicted = 0
    for step in range(4000):
        action = draw.random()
        if action < 0.4 and blocks.available >= 4:
            before = blocks.free
            lists.append(blocks.take(draw.randint(1, 4)))
            evicted += before < len(lists[-1])
        elif action < 0.55 and lists:
            grown = draw.choice(lists)
            if blocks.available:
                grown += blocks.take(1, after=grown[-1])
        elif action < 0.65 and lists:
            shared = draw.choice(lists)[: draw.randint(1, 2)]
            blocks.share(shared)
            lists.append(list(shared))
        elif action < 0.8 and cached and lists:
            prefix.enter(b"%d" % step, draw.choice(draw.choice(lists)))
        elif lists:
            blocks.release(lists.pop(draw.randrange(len(lists))))
        blocks.check(lists)
        assert blocks.free + blocks.held + blocks.cached == 30
    for pages in lists:
        blocks.release(pages)
    blocks.forget()
    assert blocks.free == 30
    assert evicted > 20 or not cached


def test_wrong_use_is_noticed():
    blocks = Blocks(6, largest=4, prefix=PrefixIndex())
    pages = blocks.take(2)
    with pytest.raises(AssertionError, match="held as often"):
        blocks.check([pages, pages])
    blocks.release(pages)
    with pytest.raises(AssertionError, match="released more often"):
        blocks.release(pages)
    with pytest.raises(AssertionError, match="no content to share"):
        blocks.share(pages)
    with pytest.raises(AssertionError, match="ask `available` first"):
        blocks.take(7)


def test_keys_tell_texts_apart():
    """By every token before the end of the page, by where pages end, and by realm."""
    text = list(range(20))
    keys = page_keys(text, 4, b"a")
    assert len(keys) == len(set(keys)) == 5
    assert page_keys(text[:19], 4, b"a") == keys[:4]
    assert page_keys(text, 4, b"a", keys[:2]) == keys
    assert page_keys(text, 4, b"b")[0] != keys[0]
    for place in (0, 3, 4, 19):
        other = page_keys([*text[:place], 77, *text[place + 1 :]], 4, b"a")
        same = [ours == theirs for ours, theirs in zip(keys, other, strict=True)]
        assert same == [page < place // 4 for page in range(5)]
    # The same tokens at another place are another text.
    assert page_keys([*text[4:8], *text[4:8]], 4, b"a")[1] != keys[1]


def test_a_prefix_is_found_up_to_the_first_page_that_is_missing():
    prefix, keys = PrefixIndex(), page_keys(list(range(40)), 8, b"")
    for page, key in zip((7, 3, 9), keys, strict=False):
        prefix.enter(key, page)
    assert prefix.find(keys) == [7, 3, 9]
    assert prefix.find(keys[:2]) == [7, 3]
    prefix.enter(keys[1], 5)  # the same text again: its page stays out
    assert prefix.find(keys) == [7, 3, 9]
    assert not prefix.rest(5)
    assert prefix.rest(3)
    assert prefix.evict() == 3
    assert prefix.find(keys) == [7]
    prefix.check()


def test_the_end_of_a_text_is_given_up_before_its_beginning():
    blocks = Blocks(8, largest=4, prefix=(prefix := PrefixIndex()))
    keys = page_keys(list(range(40)), 10, b"")
    pages = blocks.take(4)
    for key, page in zip(keys, pages, strict=True):
        prefix.enter(key, page)
    blocks.release(pages)
    assert (blocks.cached, blocks.free) == (4, 4)
    for left in (3, 2, 1):
        blocks.take(1 if left < 3 else 5)
        assert prefix.find(keys) == pages[:left]
    blocks.share(pages[:1])  # whoever is used again is the last to go
    blocks.release(pages[:1])
    assert prefix.find(keys) == pages[:1]
