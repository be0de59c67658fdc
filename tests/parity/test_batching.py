"""Many requests on one engine say what each says alone: any order, any mode, prefix cache on and off, pushed out
or not.

Toys in float64, so that equality is equality. Drafts come from an oracle that knows the answers and errs by a
fixed rule, before the real drafter, whose context is kept and checked.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import cache

import pytest
import torch

from ddtree.engine import engine as engine_module
from ddtree.engine.request import Job
from ddtree.errors import RequestError
from ddtree.models.dflash import DFlashModel
from ddtree.models.target import TargetModel
from ddtree.speculation.params import SamplingParams
from ddtree.speculation.plan import ALGORITHMS, FixedPolicy, capped, fixed_plan, joint_plan
from tests.drafters import draft_from_library, has_gap, pieces, records_of, tokens_of
from tests.parity.test_equality import Automaton
from tests.soak import BLOCK, PLAIN, Case, SharedPages, check_contents, make_cases, models, new_engine, soak
from tests.toys import random_tokens, toy_edges

MODES = tuple(ALGORITHMS)
CROWD = 32


@cache
def pair():
    return models()


@cache
def crowd():
    """32 requests, one of them under a constraint, and their answers one at a time."""
    target, _ = pair()
    cases = make_cases(target, CROWD - 1, seed=3)
    params = SamplingParams(temperature=0.9, seed=8, max_tokens=50, constraint=Automaton(), ignore_eos=True)
    prompt = random_tokens(12, 5)
    answer = tokens_of(pieces(new_engine(target, None, mode="off"), prompt, params, PLAIN))
    return [*cases, Case(prompt, params, answer)]


def answer_all(engine, jobs, order=None, check=lambda: None):
    """Answers of jobs that are all there from the beginning, in an order of arrival."""
    got = [[] for _ in jobs]
    ends = [[] for _ in jobs]
    for i in order or range(len(jobs)):
        engine.add(jobs[i], got[i].append, ends[i].append)
    while engine.busy:
        engine.step()
        engine.scheduler.check()
        check()
    assert engine.blocks.held == 0
    return got, [end for (end,) in ends]


def jobs_of(cases, plan_of, **settings):
    return [Job(case.prompt, case.params, FixedPolicy(plan_of(i)), **settings) for i, case in enumerate(cases)]


def mixed(seed=0):
    """A plan for each request: modes, blocks and budgets of all kinds."""
    draw = random.Random(seed)
    plans = [
        fixed_plan(draw.choice(MODES), draw.randint(2, BLOCK), draw.choice((1, 3, 8, 16, 33, 64)))
        for _ in range(CROWD)
    ]
    return plans.__getitem__


CONFIGS = {
    "cached": {"max_sequences": 8},
    "not cached": {"max_sequences": 32, "prefix_cache": False},
    "pushed out": {"max_sequences": 12, "pages": 60, "page_size": 8},
    "pushed out, not cached": {"max_sequences": 12, "pages": 60, "page_size": 8, "prefix_cache": False},
    "pages of one place, tiny chunks": {"max_sequences": 5, "page_size": 1, "prefill_chunk": 7},
}


CROWDED = list(itertools.product(list(CONFIGS)[:-1], ["off", "chain", "tree", "shadow", "mixed"]))


@pytest.mark.parametrize(("config", "mode"), [*CROWDED, (list(CONFIGS)[-1], "mixed")])
def test_thirty_two_at_once_say_what_each_says_alone(mode, config):
    target, drafter = pair()
    engine = new_engine(target, drafter, **CONFIGS[config])
    library = draft_from_library(engine)
    for case in crowd():
        library.learn(case.prompt, case.params, case.answer)
    plan_of = mixed(1) if mode == "mixed" else lambda i: fixed_plan(mode, BLOCK, 16)
    order = random.Random(7).sample(range(CROWD), CROWD)
    shared = SharedPages(engine)
    got, ends = answer_all(engine, jobs_of(crowd(), plan_of, records=True), order, shared.check)
    for case, answer, end in zip(crowd(), got, ends, strict=True):
        assert tokens_of(answer) == case.answer == list(end.token_ids)
        assert answer[-1].finish_reason == end.finish_reason
    numbers = engine.snapshot()
    assert (numbers.preemptions > 0) == config.startswith("pushed out")
    hitting = CONFIGS[config].get("prefix_cache", True)
    assert (numbers.prefix_hit_tokens > 0) == hitting
    longest = max(len(piece.token_ids) for answer in got for piece in answer)
    assert longest == (1 if mode == "off" else BLOCK)
    if mode in ("tree", "mixed"):
        assert any(has_gap(record.path) for answer in got for record in records_of(answer))


def test_a_request_drafts_in_a_batch_what_it_drafts_alone():
    """In batches wider than its plan: the same nodes in the same order, within its own block and budget."""
    target, drafter = pair()
    engines = [new_engine(target, drafter, max_sequences=count) for count in (8, 1)]
    for engine in engines:
        library = draft_from_library(engine)
        for case in crowd():
            library.learn(case.prompt, case.params, case.answer)
    plan_of = mixed(2)
    jobs = jobs_of(crowd(), plan_of, records=True)
    together, alone = (answer_all(engine, jobs)[0] for engine in engines)
    fullest = dict.fromkeys(MODES, 0)
    for i, (answer, single) in enumerate(zip(together, alone, strict=True)):
        plan = plan_of(i)
        for record, wanted in zip(records_of(answer), records_of(single), strict=True):
            assert replace(record, scores=()) == replace(wanted, scores=())
            assert record.scores == pytest.approx(wanted.scores, abs=1e-4)
            assert max(record.depths) <= plan.horizon
            spine = plan.horizon if plan.mode == "shadow" else 0
            assert len(record.tokens) - 1 <= plan.budget + spine
            fullest[plan.mode] += len(record.tokens) - 1 >= plan.budget
    assert all(count > 10 for count in fullest.values()), fullest


def test_joint_plans_are_as_wide_as_needed():
    off, chain, short = PLAIN, fixed_plan("chain", 8, 1), fixed_plan("chain", 3, 1)
    tree, shadow = fixed_plan("tree", 4, 20), fixed_plan("shadow", 6, 2)
    assert joint_plan([tree, tree]) == tree
    assert joint_plan([off, chain, short]) == chain
    assert joint_plan([off, tree, chain]) == fixed_plan("tree", 8, 20)
    assert joint_plan([chain, fixed_plan("tree", 4, 3)]) == fixed_plan("tree", 8, 7)
    assert joint_plan([tree, shadow]) == fixed_plan("shadow", 6, 20)


def test_caps_lower_and_never_raise():
    tree = fixed_plan("tree", 8, 16)
    assert capped(tree, None, None) == tree
    assert capped(tree, "off", 9) == PLAIN
    assert capped(tree, "shadow", 5) == fixed_plan("shadow", 8, 5)
    assert (
        capped(tree, "chain", None) == capped(fixed_plan("chain", 8, 1), "tree", None) == fixed_plan("chain", 8, 1)
    )
    assert capped(tree, "tree", 200) == tree
    assert capped(PLAIN, "tree", 16) == PLAIN
    engine = new_engine(*pair())
    for mode, budget, message in [
        ("tre", None, "mode must be one of"),
        (None, 0, "budget must"),
        (None, 256, "budget must"),
    ]:
        with pytest.raises(RequestError, match=message):
            engine.admission.capped(engine.plan, mode, budget)


# The second turn of a chat


@pytest.mark.parametrize("length", [16, 31, 32, 33, 40])
def test_a_second_turn_hits_and_drafts_as_well_as_the_first(length):
    """The real drafter's trees after a hit, on page ends and between them, are those of an engine without a
    cache."""
    target, drafter = pair()
    first, more = random_tokens(length, 30 + length), random_tokens(7, 31)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    fresh = new_engine(target, drafter, prefix_cache=False)
    cached = new_engine(target, drafter, prefix_cache=True)
    plan = fixed_plan("tree", BLOCK, 16)
    answer = tokens_of(pieces(cached, first, params, plan))
    second = [*first, *answer, *more]
    wanted, found = (pieces(engine, second, params, plan) for engine in (fresh, cached))
    hit = cached.snapshot().prefix_hit_tokens
    assert hit == (length + len(answer) - 1) // 16 * 16
    assert tokens_of(found) == tokens_of(wanted)
    for ours, theirs in zip(records_of(found), records_of(wanted), strict=True):
        assert replace(ours, scores=()) == replace(theirs, scores=())
        assert ours.scores == pytest.approx(theirs.scores, abs=1e-5)


def test_texts_of_plain_requests_are_not_taken_for_drafter_context():
    target, drafter = pair()
    engine = new_engine(target, drafter, prefix_cache=True)
    prompt, params = random_tokens(40, 2), SamplingParams(max_tokens=20, ignore_eos=True)
    plan = fixed_plan("tree", BLOCK, 16)
    wanted = pieces(new_engine(target, drafter), prompt, params, plan)
    pieces(engine, prompt, params, PLAIN)
    assert pieces(engine, prompt, params, plan) == wanted
    assert engine.snapshot().prefix_hit_tokens == 0
    assert tokens_of(pieces(engine, prompt, params, PLAIN)) == tokens_of(wanted)
    assert engine.snapshot().prefix_hit_tokens == 32


def test_the_first_draft_after_a_hit_leaves_shared_pages_alone():
    """Checksums of every page that others hold or may come to share, before and after each step of the
    newcomer."""
    target, drafter = pair()
    engine = new_engine(target, drafter, max_sequences=4, page_size=8)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    plan = fixed_plan("tree", BLOCK, 64)
    base = random_tokens(32, 12)
    shared = SharedPages(engine)
    runs = [base, base, [*base, 5], [*base[:19], 7], base[:16], base[:17]]
    hits = 0
    for i, prompt in enumerate(runs):
        engine.add(Job(prompt, params, FixedPolicy(plan)), lambda piece: None, lambda end: None)
        for _ in range(2 + i % 2):
            engine.step()
            shared.check()
            engine.scheduler.check()
        hits = engine.snapshot().prefix_hit_tokens
    while engine.busy:
        engine.step()
        shared.check()
    assert hits > 0
    assert engine.snapshot().prefix_hit_tokens >= 24 + 32 + 16


# One pass for the whole batch


def test_the_drafter_runs_once_a_round_for_the_whole_batch(monkeypatch):
    target, drafter = pair()
    engine = new_engine(target, drafter, max_sequences=8)
    drafts, passes = [], []
    run, forward = DFlashModel.forward, TargetModel.forward
    monkeypatch.setattr(
        DFlashModel,
        "forward",
        lambda self, rows, *a: drafts.append(rows.tokens_RN.shape[0]) or run(self, rows, *a),
    )
    monkeypatch.setattr(
        TargetModel,
        "forward",
        lambda self, rows, *a: passes.append(rows.tokens_RN.shape[0]) or forward(self, rows, *a),
    )
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    jobs = [Job(random_tokens(9, i), params, FixedPolicy(mixed(4)(i))) for i in range(8)]
    for job in jobs:
        engine.add(job, lambda piece: None, lambda end: None)
    while engine.busy:
        drafts.clear()
        passes.clear()
        decoding = sum(track.decoding for track in engine.scheduler.running)
        engine.step()
        assert len(drafts) <= 1
        assert not drafts or drafts == [decoding] == passes[-1:]
        assert len(passes) <= 2, "one pass for texts, one for trees"


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_padding_sequences_change_nothing(count, monkeypatch):
    """Batches filled up to eight, as on a GPU: answers are the same, and no page outside the batch is written."""
    monkeypatch.setattr(engine_module, "batch_bucket", lambda sequences, device, most: min(8, most))
    target, drafter = pair()
    engine = new_engine(target, drafter, max_sequences=8, prefix_cache=False)
    library = draft_from_library(engine)
    some = crowd()[:count]
    for case in some:
        library.learn(case.prompt, case.params, case.answer)
    marked, taken, clear = set(), set(), engine.runner.clear
    monkeypatch.setattr(engine.runner, "clear", lambda pages: taken.update(pages) or clear(pages))

    def guarded():
        """Pages that nobody held in the step hold what they were marked with."""
        for pool in engine.runner.pools:
            assert bool((pool.keys[:, sorted(marked - taken)] == 1e6).all())
            assert not pool.keys[:, -2].any(), "the void stays empty"
        taken.clear()
        marked.clear()
        marked.update(page for page in range(engine.blocks.total) if engine.blocks._free[page])
        for pool in engine.runner.pools:
            pool.keys[:, sorted(marked)] = 1e6

    guarded()
    got, _ = answer_all(engine, jobs_of(some, mixed(5)), check=guarded)
    assert [tokens_of(answer) for answer in got] == [case.answer for case in some]
    assert library.proposals
    assert set(library.proposals) == {8}


@torch.inference_mode()
def test_numbers_that_are_none_do_not_reach_the_next_holder():
    """A page is clean when it changes hands: masked places count for nothing, but zero times NaN is NaN."""
    target, drafter = pair()
    engine = new_engine(target, drafter, max_sequences=4)
    for pool in engine.runner.pools:
        pool.keys[:, :-2] = pool.values[:, :-2] = torch.nan
    got, _ = answer_all(engine, jobs_of(crowd()[:4], mixed(6)))
    assert [tokens_of(answer) for answer in got] == [case.answer for case in crowd()[:4]]


# Cancelling, and faults of one request


@pytest.mark.parametrize("when", range(5))
def test_a_cancelled_request_frees_its_pages_and_nobody_notices(when):
    target, drafter = pair()
    engine = new_engine(target, drafter, max_sequences=3, prefill_chunk=8, prefix_cache=False)
    some = crowd()[:5]
    got, ends = [[] for _ in some], [[] for _ in some]
    lives = [
        engine.add(job, got[i].append, ends[i].append)
        for i, job in enumerate(jobs_of(some, lambda i: fixed_plan("tree", BLOCK, 16)))
    ]
    for _ in range(2 * when):
        engine.step()
    victims = [lives[1], lives[4]]  # one may be running, one waits
    for live in victims:
        engine.cancel(live)
        engine.cancel(live)  # twice is once
        engine.scheduler.check()
        assert not live.track.pages
    while engine.busy:
        engine.step()
        engine.scheduler.check()
    assert engine.blocks.free == engine.blocks.total
    for i, (case, answer, (end,)) in enumerate(zip(some, got, ends, strict=True)):
        said = tokens_of(answer)
        assert said == list(end.token_ids) == case.answer[: len(said)]
        if lives[i] in victims and end.finish_reason == "cancelled":
            continue
        assert said == case.answer


class Bursting:
    """A constraint whose own code fails after some tokens, at one of its three methods."""

    def __init__(self, method, after=4):
        self.method, self.after = method, after

    def start(self):
        if self.method == "start":
            raise ValueError("no grammar")
        return 0

    def allowed(self, state):
        if self.method == "allowed" and state >= self.after:
            raise KeyError("state")
        return

    def advance(self, state, token):
        if self.method == "advance" and state >= self.after:
            raise ValueError("no such token")
        return state + 1


@pytest.mark.parametrize("method", ["start", "allowed", "advance"])
@pytest.mark.parametrize("mode", MODES)
def test_a_constraint_that_fails_ends_its_own_request_alone(mode, method):
    target, drafter = pair()
    engine = new_engine(target, drafter, max_sequences=4)
    library = draft_from_library(engine)
    some = crowd()[:3]
    for case in some:
        library.learn(case.prompt, case.params, case.answer)
    broken = SamplingParams(constraint=Bursting(method), max_tokens=30, ignore_eos=True)
    cases = [some[0], Case(random_tokens(8, 3), broken, []), *some[1:]]
    got, ends = answer_all(engine, jobs_of(cases, lambda i: fixed_plan(mode, BLOCK, 16)))
    assert isinstance(ends[1], RequestError)
    assert "the constraint failed" in str(ends[1])
    assert len(tokens_of(got[1])) <= 5
    del got[1], cases[1]
    assert [tokens_of(answer) for answer in got] == [case.answer for case in cases]
    assert engine.snapshot().finished["error"] == 1


# Over time


def test_requests_that_come_and_go_for_a_minute():
    """The soak of `tests/soak.py`, short: 20,000 rounds are for a longer wait."""
    found = soak(2500, seed=1)
    assert found["answers"] > 400
    assert found["widest"] == 9
    assert found["longest"] == BLOCK
    for what, least in {
        "cancelled": 10,
        "idle": 1,
        "contents": 10,
        "preemptions": 20,
        "hits": 1000,
        "accepted": 1000,
    }.items():
        assert found[what] >= least, what


def test_contents_are_checked_in_earnest():
    """The check that the soak relies on notices one wrong place."""
    target, drafter = pair()
    engine = new_engine(target, drafter)
    live = engine.add(
        jobs_of(crowd()[:1], lambda i: fixed_plan("tree", BLOCK, 16))[0], lambda p: None, lambda e: None
    )
    for _ in range(6):
        engine.step()
    check_contents(engine, drafter, live)
    for pool, tensor in itertools.product(engine.runner.pools, ("keys", "values")):
        cells = getattr(pool, tensor)[:, live.track.pages[0], 3]
        kept = cells.clone()
        cells += 1e-6
        with pytest.raises(AssertionError):
            check_contents(engine, drafter, live)
        cells.copy_(kept)
    engine.cancel(live)


def test_edge_correction_works_in_batches_of_many_plans():
    target, drafter = pair()
    edged = replace(drafter, edges=toy_edges(drafter.vocabulary))
    engine = new_engine(target, edged, max_sequences=8)
    plan_of = mixed(9)
    got, _ = answer_all(engine, jobs_of(crowd(), plan_of, records=True))
    for i, (case, answer) in enumerate(zip(crowd(), got, strict=True)):
        assert tokens_of(answer) == case.answer
        for record in records_of(answer):
            assert max(record.depths) <= plan_of(i).horizon
            if plan_of(i).mode == "chain":
                assert list(record.parents) == [0, *range(len(record.parents) - 1)]
