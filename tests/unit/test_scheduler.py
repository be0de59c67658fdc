"""The scheduler, without a model: order, seats, reservations, preemption, the prefix cache, and no page lost."""

from __future__ import annotations

import random

import pytest

from ddtree.engine.blocks import Blocks
from ddtree.engine.prefix import PrefixIndex
from ddtree.engine.scheduler import Scheduler, Track

PAGE = 4


def new(pages=40, seats=4, chunk=16, cached=True, largest=12):
    return Scheduler(Blocks(pages, largest, PrefixIndex() if cached else None), PAGE, seats, chunk)


def track_of(tokens, width=3, context=True):
    text = list(range(tokens)) if isinstance(tokens, int) else list(tokens)
    return Track(text, width, context, goal=len(text))


def run(scheduler, plan, commit=lambda track: 1, fresh_token=99):
    """What an engine does with a plan: texts are run, and every decoded request says `commit` tokens."""
    for chunk in plan.chunks:
        track = chunk.track
        assert chunk.first == track.computed
        assert chunk.tokens == track.tokens[chunk.first : chunk.first + chunk.count]
        assert len(track.pages) * PAGE >= chunk.first + chunk.count
        scheduler.computed(track, chunk.first + chunk.count)
        if track.decoding and len(track.tokens) == track.computed:
            track.tokens.append(fresh_token)
    for track in plan.decode:
        assert track.computed == len(track.tokens) - 1, "the anchor alone has not been run"
        assert len(track.pages) * PAGE >= track.computed + track.width, "a round may write all its width"
        said = commit(track)
        track.tokens += [fresh_token] * said
        scheduler.computed(track, track.computed + said)
    scheduler.check()


def test_requests_are_served_in_order():
    scheduler = new(seats=2)
    tracks = [track_of([i] * 5) for i in range(4)]
    for track in tracks:
        scheduler.add(track)
    run(scheduler, scheduler.plan())
    assert scheduler.running == tracks[:2]
    scheduler.remove(tracks[0])
    run(scheduler, scheduler.plan())
    assert scheduler.running == tracks[1:3]
    scheduler.remove(tracks[3])  # cancelled while it waits
    scheduler.remove(tracks[1])
    scheduler.remove(tracks[2])
    assert scheduler.plan().decode == ()
    assert scheduler.blocks.held == 0


def test_texts_are_run_in_chunks_and_others_are_decoded_meanwhile():
    scheduler = new(chunk=8)
    short, long = track_of(3), track_of(range(100, 120))
    scheduler.add(short)
    run(scheduler, scheduler.plan())
    scheduler.add(long)
    firsts, decoded = [], 0
    while not long.decoding:
        plan = scheduler.plan()
        firsts += [(chunk.first, chunk.count) for chunk in plan.chunks]
        decoded += short in plan.decode
        run(scheduler, plan)
    assert firsts == [(0, 8), (8, 8), (16, 4)]
    assert decoded == 3


def test_short_texts_are_run_together_as_far_as_their_padding_fits():
    scheduler = new(chunk=16)
    for i, count in enumerate((4, 5, 3, 2)):
        scheduler.add(track_of([i] * count))
    assert [chunk.count for chunk in scheduler.plan().chunks] == [4, 5, 3]


@pytest.mark.parametrize("cached", [True, False])
def test_the_youngest_gives_way_and_loses_nothing(cached):
    scheduler = new(pages=12, seats=3, cached=cached)
    old, young = track_of(range(10)), track_of(range(50, 60))
    for track in (old, young):
        scheduler.add(track)
    said = []
    while scheduler.preemptions == 0:
        plan = scheduler.plan()
        run(scheduler, plan)
        said.append(len(young.tokens))
    assert plan.preempted == (young,)
    assert list(scheduler.waiting) == [young]
    assert (young.pages, young.computed) == ([], 0)
    assert young.goal == len(young.tokens) - 1 > 10
    kept = list(young.tokens)
    scheduler.remove(old)
    first = scheduler.plan()
    assert young.tokens == kept
    if cached:  # its own pages are still there
        assert young.computed == young.goal // PAGE * PAGE
    run(scheduler, first)
    while not young.decoding:
        run(scheduler, scheduler.plan())
    assert young.tokens == kept, "the anchor is known: nothing is drawn again"
    run(scheduler, scheduler.plan())
    assert len(young.tokens) == len(kept) + 1


def test_a_newcomer_leaves_room_for_those_that_run():
    """Or it would be pushed out again as soon as one of them needs a page."""
    scheduler = new(pages=12, cached=False)
    scheduler.add(track_of(range(20)))
    run(scheduler, scheduler.plan())
    held = scheduler.blocks.held
    scheduler.add(late := track_of(range(4 * (12 - held) - 3)))
    run(scheduler, scheduler.plan())
    assert late in scheduler.waiting
    scheduler.remove(late)
    scheduler.add(small := track_of(range(4 * (12 - held) - 7)))
    run(scheduler, scheduler.plan())
    assert small in scheduler.running


@pytest.mark.parametrize("length", range(1, 18))
def test_hits_end_at_a_full_page_before_the_last_token(length):
    scheduler = new()
    scheduler.add(first := track_of(range(18)))
    for _ in range(2):
        run(scheduler, scheduler.plan())
    scheduler.remove(first)
    assert scheduler.blocks.held == 0
    scheduler.add(again := track_of(range(length)))
    plan = scheduler.plan()
    hit = (length - 1) // PAGE * PAGE
    assert again.hit == again.computed == hit
    assert [(chunk.first, chunk.count) for chunk in plan.chunks] == [(hit, length - hit)]
    assert again.pages[: hit // PAGE] == scheduler.blocks.prefix.find(again.keys)[: hit // PAGE]
    scheduler.check()


def test_what_was_said_is_found_too():
    """A second turn holds the first one's answer."""
    scheduler = new()
    scheduler.add(first := track_of(range(6)))
    for i in range(10):
        run(scheduler, scheduler.plan(), fresh_token=200 + i)
    text = list(first.tokens)
    scheduler.remove(first)
    scheduler.add(second := track_of([*text, 1, 2, 3]))
    scheduler.plan()
    assert second.hit == (len(text) - 1) // PAGE * PAGE >= 12


def test_two_requests_share_what_they_have_in_common_while_both_run():
    scheduler = new()
    scheduler.add(first := track_of(range(13)))
    run(scheduler, scheduler.plan())
    scheduler.add(second := track_of([*range(11), 77, 78]))
    run(scheduler, scheduler.plan())
    assert second.pages[:2] == first.pages[:2]
    assert not set(second.pages[2:]) & set(first.pages)
    for _ in range(5):
        run(scheduler, scheduler.plan())
    scheduler.remove(first)
    scheduler.check()
    run(scheduler, scheduler.plan())


def test_texts_without_drafter_context_are_not_found_by_requests_that_draft():
    scheduler = new()
    for context in (False, True):
        scheduler.add(track := track_of(range(13), context=context))
        plan = scheduler.plan()
        assert track.hit == 0
        run(scheduler, plan)
        scheduler.remove(track)
    for context in (False, True):
        scheduler.add(track := track_of(range(13), context=context))
        scheduler.plan()
        assert track.hit == 12
        scheduler.remove(track)


@pytest.mark.parametrize("cached", [True, False])
def test_no_page_is_lost_and_every_request_ends(cached):
    """Random arrivals, widths, lengths and cancels, with far too few pages."""
    draw = random.Random(11)
    scheduler = new(pages=16, seats=5, chunk=9, cached=cached)
    left: dict[Track, int] = {}
    ended = 0
    for _ in range(3000):
        if len(left) < 8 and draw.random() < 0.4:
            tokens = [draw.randint(0, 1) for _ in range(draw.randint(1, 20))]
            left[track := track_of(tokens, draw.randint(1, 5), draw.random() < 0.5)] = draw.randint(1, 16)
            scheduler.add(track)
        for track in scheduler.running:
            track.width = draw.randint(1, 8)
        run(scheduler, scheduler.plan(), lambda track: draw.randint(1, min(4, track.width)), draw.randint(0, 1))
        for track in list(scheduler.running):
            done = len(track.tokens) - 1 > left[track] + 20 or len(track.tokens) > 36
            if done or draw.random() < 0.01:
                scheduler.remove(track)
                del left[track]
                ended += 1
    while scheduler.running or scheduler.waiting:
        run(scheduler, scheduler.plan())
        for track in list(scheduler.running):
            if track.decoding:
                scheduler.remove(track)
    scheduler.check()
    assert scheduler.blocks.held == 0
    assert scheduler.preemptions > 50
    assert ended > 200
