"""The engine: what it refuses, where answers end, what records say, and that a request leaves nothing behind."""

from __future__ import annotations

import dataclasses
import itertools
import random
import subprocess
import sys
from functools import cache

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

import ddtree
from ddtree import LLM, EngineConfig, RoundPlan, SamplingParams
from ddtree.engine.config import DEFAULT_BUDGETS, check_device
from ddtree.engine.engine import BatchEngine
from ddtree.engine.request import Gathering, Job
from ddtree.errors import ConfigError, RequestError, UnsupportedError
from ddtree.models.load import LoadedDrafter
from ddtree.models.target import TargetModel
from ddtree.speculation.plan import ALGORITHMS, LARGEST_BUDGET, FixedPolicy, fixed_plan
from ddtree.speculation.protocols import Proposal
from ddtree.speculation.verifier import TargetVerifier
from tests.checkpoints import target_config, target_tensors, write_drafter, write_folder
from tests.drafters import (
    LAYERS,
    OracleDrafter,
    draft_with,
    has_gap,
    pieces,
    records_of,
    stage,
    tokens_of,
)
from tests.toys import VOCABULARY, random_tokens, toy_drafter, toy_target

MODES = tuple(ALGORITHMS)
PROMPT = random_tokens(10, 3)
BLOCK = 8
OFF = fixed_plan("off", 1, 0)
TREE = fixed_plan("tree", BLOCK, 16)


@cache
def target_of(eos_ids=(), max_positions=4096):
    return toy_target("qwen3", layers=2, eos_ids=eos_ids, max_positions=max_positions)


def new_engine(eos_ids=(), drafter=True, max_positions=4096, decode=lambda tokens: "", **config):
    target = target_of(eos_ids, max_positions)
    loaded = LoadedDrafter(*toy_drafter(target, layers=1, layer_ids=LAYERS, block_size=BLOCK)) if drafter else None
    return BatchEngine(target, loaded, EngineConfig(**{"max_context": 256} | config), decode)


@cache
def plain_engine(eos_ids=()):
    return new_engine(eos_ids, drafter=False, mode="off")


@cache
def plain_text(count=60, **settings):
    """What a plain engine says after PROMPT, ends ignored."""
    params = SamplingParams(max_tokens=count, ignore_eos=True, **settings)
    return tokens_of(pieces(plain_engine(), PROMPT, params, OFF))


def plan_of(mode, block=BLOCK, budget=16):
    return fixed_plan(mode, block, budget)


def with_oracle(engine, text, seed=0, **settings):
    """The engine, drafting with an oracle of what follows PROMPT."""
    draft_with(engine, OracleDrafter([[*PROMPT, *text]], VOCABULARY, seed=seed, **settings))
    return engine


CERTAIN = (1.0, 0.0, 0.0)  # an oracle that never errs: a round accepts all that it may draft


def completion_of(answer, prompt=PROMPT):
    gathering = Gathering(len(prompt), 0.0)
    for second, piece in enumerate(answer, start=1):
        gathering.add(piece, float(second))
    return gathering.completion()


# Where answers end


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("errs", [True, False])
def test_exactly_as_many_tokens_as_asked_for(mode, errs):
    """At the end rounds draft no more than may still come, so nothing beyond it is run or counted as offered."""
    text = plain_text()
    engine = new_engine()
    for limit in range(1, 21):
        with_oracle(engine, text, seed=limit, chances=(0.55, 0.25, 0.12) if errs else CERTAIN)
        answer = pieces(engine, PROMPT, SamplingParams(max_tokens=limit), plan_of(mode))
        assert tokens_of(answer) == text[:limit]
        assert [piece.finish_reason for piece in answer] == [None] * (len(answer) - 1) + ["length"]
        left = limit - 1
        for record in records_of(answer):
            assert max(record.depths) <= left - 1
            left -= len(record.emitted)
        assert left == 0
        if mode == "chain" and not errs:
            assert len(answer) == 1 + -(-(limit - 1) // BLOCK)


@pytest.mark.parametrize("mode", MODES)
def test_answers_end_where_the_context_ends(mode, monkeypatch):
    """Prompts that leave 1, 2, ... places: prompt and answer fill the context, and no row stands outside."""
    farthest = []
    forward = TargetModel.forward

    def watched(self, rows, *arguments):
        farthest.append(int(rows.positions_RN.max()))
        return forward(self, rows, *arguments)

    text = plain_text()
    whole = [*PROMPT, *text]
    monkeypatch.setattr(TargetModel, "forward", watched)
    engine = new_engine(max_context=40)
    for left in range(1, 13):
        prompt = whole[: 40 - left]
        draft_with(engine, OracleDrafter([whole], VOCABULARY, seed=left))
        answer = pieces(engine, prompt, SamplingParams(), plan_of(mode))
        assert tokens_of(answer) == whole[40 - left : 40]
        assert answer[-1].finish_reason == "length"
        assert max(farthest) == 38  # the last token was chosen and never run


def test_the_context_of_a_model_is_never_exceeded():
    """Positions of the target and of draft blocks stay below what both were made for."""
    engine = new_engine(max_positions=32, max_context=None)
    assert engine.max_context == 32
    ends = []
    propose = engine.runner.drafters.decode.propose

    def watched(anchors_R, lengths, block_size):
        ends.append(lengths.host[0] + block_size)
        return propose(anchors_R, lengths, block_size)

    engine.runner.drafters.decode.propose = watched
    for mode in ("chain", "tree", "shadow"):
        assert len(tokens_of(pieces(engine, PROMPT, SamplingParams(), plan_of(mode)))) == 22
    assert max(ends) == 31  # the last place is for the bonus


def first_place(text, start):
    """The first place from `start` on whose token does not occur before it."""
    return next(i for i in range(start, len(text)) if text[i] not in text[:i])


@pytest.mark.parametrize("mode", MODES)
def test_an_end_at_every_place_of_an_accepted_path(mode):
    """The drafter knows what would follow the end, so paths run past it; only what is emitted counts."""
    text = plain_text()
    ends = sorted({first_place(text, start) for start in range(14)})
    assert len(ends) > 8
    past_the_end = 0
    for end in ends:
        engine = with_oracle(new_engine(eos_ids=(text[end], VOCABULARY - 1)), text, chances=CERTAIN)
        answer = pieces(engine, PROMPT, SamplingParams(), plan_of(mode))
        assert tokens_of(answer) == text[: end + 1]
        assert answer[-1].finish_reason == "stop"
        done = completion_of(answer)
        assert done.acceptance_length is None if end == 0 else done.acceptance_length == end / done.rounds
        past_the_end += sum(len(record.path) > len(record.emitted) for record in records_of(answer))
        # The same place as a stop token, the end of the model ignored.
        params = SamplingParams(stop_token_ids=[text[end]], ignore_eos=True)
        assert tokens_of(pieces(engine, PROMPT, params, plan_of(mode))) == text[: end + 1]
        ignoring = pieces(engine, PROMPT, SamplingParams(ignore_eos=True, max_tokens=40), plan_of(mode))
        assert tokens_of(ignoring) == text[:40]
    assert past_the_end > 5 or mode == "off"


def test_stop_strings_cut_a_path_too():
    letters = "".join(chr(33 + token) for token in range(VOCABULARY))

    def decode(tokens):
        return "".join(letters[token] for token in tokens)

    text = plain_text()
    engine = new_engine(decode=decode)
    for end in range(2, 14):
        stop = decode(text[end - 2 : end + 1])
        place = decode(text).find(stop)
        for mode in MODES:
            with_oracle(engine, text, chances=CERTAIN)
            answer = pieces(engine, PROMPT, SamplingParams(stop=stop), plan_of(mode))
            assert tokens_of(answer) == text[: place + 3]
            assert "".join(piece.text for piece in answer) == decode(text[:place])
            assert answer[-1].finish_reason == "stop"


# What is refused


def test_prompts_that_cannot_be_honoured():
    engine = new_engine(max_context=20)
    for prompt, message in [
        ([], "the prompt is empty; give at least one token"),
        (random_tokens(20, 1), "has 20 tokens, but the context holds 20 .*; shorten it, or raise max_context"),
        ([1, VOCABULARY, 2], f"holds token {VOCABULARY}, outside the vocabulary of {VOCABULARY}"),
        ([1, -1], "holds token -1, outside the vocabulary"),
    ]:
        with pytest.raises(RequestError, match=message):
            next(engine.run(engine.fixed_job(prompt, SamplingParams())))
    with pytest.raises(RequestError, match=f"stop_token_ids names token {VOCABULARY}"):
        next(engine.run(engine.fixed_job([1], SamplingParams(stop_token_ids=[VOCABULARY]))))
    assert tokens_of(pieces(engine, PROMPT, SamplingParams(max_tokens=5), TREE)) == plain_text()[:5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "tre"}, "mode must be one of off, chain, tree, shadow: got 'tre'"),
        ({"mode": ""}, "mode must be one of"),
        ({"mode": None}, "mode must be one of"),
        ({"budget": 0}, "budget must lie between 1 and 255 nodes: got 0; to decode without drafts use mode off"),
        ({"budget": 256}, "budget must lie between 1 and 255"),
        ({"budget": 10**9}, "budget must lie between 1 and 255"),
        ({"budget": -1, "mode": "shadow"}, "budget must lie between 1 and 255"),
        ({"block_size": 1}, "block size must lie between 2 and 256: got 1"),
        ({"block_size": -3, "mode": "chain"}, "block size must lie between 2 and 256"),
        ({"block_size": 257}, "block size must lie between 2 and 256"),
        ({"max_context": 1}, "max_context must be at least 2"),
        ({"coupling": 0.0}, "coupling must lie between 0.1 and 100, or be None"),
        ({"coupling": float("nan")}, "coupling must lie between"),
        ({"prefill_chunk": 0}, "prefill_chunk must be at least 1"),
        ({"block_size": 0}, "block size must lie between 2 and 256: got 0"),
        ({"budget": 2.5}, "budget must be a whole number"),
    ],
)
def test_options_that_cannot_be_honoured(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


@pytest.mark.parametrize("mode", ["chain", "tree", "shadow"])
def test_drafting_needs_a_drafter(mode):
    with pytest.raises(ConfigError, match=f"mode {mode} needs a drafter, and this .* use mode off"):
        new_engine(drafter=False, mode=mode)
    with pytest.raises(ConfigError, match="use mode off"):
        plain_engine().admission.plan_for(EngineConfig(mode=mode))


def test_plain_decoding_needs_none():
    engine = plain_engine()
    assert engine.plan == OFF
    answer = pieces(engine, PROMPT, SamplingParams(max_tokens=10), engine.plan)
    assert tokens_of(answer) == plain_text()[:10]
    # With a drafter, an engine may still decode plainly, whatever its block.
    assert new_engine(mode="off").plan == new_engine(mode="off", block_size=4, budget=7).plan == OFF


def test_what_the_models_cannot_do_is_refused():
    with pytest.raises(ConfigError, match=r"block size 9 exceeds the drafter's 8: it was trained for no more"):
        new_engine(block_size=9)
    with pytest.raises(ConfigError, match=r"max_context 33 exceeds the 32 positions of the (target|drafter)"):
        new_engine(max_positions=32, max_context=33)


@pytest.mark.parametrize(
    ("drafter", "plan"),
    [
        (False, TREE),
        (True, RoundPlan("tree", BLOCK + 1, 16)),
        (True, RoundPlan("tree", BLOCK, 10_000)),
        (True, RoundPlan("nonsense", BLOCK, 16)),
    ],
)
def test_plans_of_callers_are_checked(drafter, plan):
    engine = new_engine(drafter=drafter, mode="off")
    with pytest.raises(ConfigError):
        engine.fixed_job(PROMPT, SamplingParams(max_tokens=20), plan)


def test_plans_of_a_configuration():
    engine = new_engine()
    assert engine.plan == RoundPlan("tree", BLOCK, DEFAULT_BUDGETS["cpu"])
    assert engine.admission.plan_for(EngineConfig(mode="chain")) == RoundPlan("chain", BLOCK, BLOCK - 1)
    assert engine.admission.plan_for(EngineConfig(budget=LARGEST_BUDGET, block_size=2)) == RoundPlan(
        "tree", 2, LARGEST_BUDGET
    )
    assert engine.admission.plan_for(EngineConfig(mode="off", block_size=4, budget=9)) == OFF
    assert new_engine(mode="shadow", block_size=5, budget=3).plan == RoundPlan("shadow", 5, 3)


@pytest.mark.parametrize("mode", ["tree", "shadow"])
def test_the_widest_rounds_fit(mode):
    """The largest budget at the end of the context: the buffers have room for every row."""
    engine = new_engine(max_context=len(PROMPT) + 12)
    plan = fixed_plan(mode, BLOCK, LARGEST_BUDGET)
    answer = pieces(engine, PROMPT, SamplingParams(), plan)
    assert tokens_of(answer) == plain_text()[:12]
    assert max(len(record.tokens) for record in records_of(answer)) >= LARGEST_BUDGET + 1


# What modes need and do

CAPABILITIES = {  # needs_target_features, drafts_blocks, verifies_trees, commits_spine_only
    "off": (False, False, False, False),
    "chain": (True, True, False, False),
    "tree": (True, True, True, False),
    "shadow": (True, True, True, True),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_algorithm_does_what_its_capabilities_say(mode, monkeypatch):
    """A mode that is added must be entered above, and none can be forgotten by one part of the engine."""
    capabilities = ALGORITHMS[mode]
    assert dataclasses.astuple(capabilities) == CAPABILITIES[mode]
    commits, commit = [], TargetVerifier.commit
    monkeypatch.setattr(TargetVerifier, "commit", lambda *arguments: commits.append(1) or commit(*arguments))
    text = plain_text()
    engine = with_oracle(new_engine(), text)
    answer = pieces(engine, PROMPT, SamplingParams(max_tokens=50), plan_of(mode))
    oracle, records = engine.runner.drafters.decode, records_of(answer)
    assert tokens_of(answer) == text[:50]
    assert bool(oracle._absorbed[0]) == capabilities.needs_target_features
    assert bool(oracle.anchors) == capabilities.drafts_blocks
    assert bool(commits) == capabilities.verifies_trees
    chains = [list(record.parents) == [0, *range(len(record.parents) - 1)] for record in records]
    assert all(chains) != capabilities.verifies_trees
    shadowed = [record.would_commit for record in records if len(record.tokens) > 1]
    assert all(would is not None for would in shadowed) if capabilities.commits_spine_only else not any(shadowed)
    plan = plan_of(mode)
    assert plan.horizon == (BLOCK - 1 if capabilities.drafts_blocks else 0)
    most = max(len(record.tokens) for record in records)
    assert plan.horizon + 1 <= most <= plan.rows <= plan.width


# Records


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0, 0.7])
def test_records_tell_what_happened(mode, temperature):
    text = plain_text(temperature=temperature, seed=3)
    engine = with_oracle(new_engine(), text)
    answer = pieces(engine, PROMPT, SamplingParams(temperature=temperature, seed=3, max_tokens=60), plan_of(mode))
    assert answer[0].record is None
    said = list(answer[0].token_ids)
    for piece in answer[1:]:
        record = piece.record
        assert record.emitted == piece.token_ids
        assert record.tokens[0] == said[-1], "the root is the token said last"
        sizes = {len(record.tokens), len(record.parents), len(record.depths), len(record.scores)}
        assert len(sizes) == 1
        for node in range(1, len(record.tokens)):
            parent = record.parents[node]
            assert parent < node
            assert record.depths[node] == record.depths[parent] + 1
            assert record.scores[node] <= record.scores[parent]
        assert (record.parents[0], record.depths[0], record.scores[0]) == (0, 0, 0.0)
        assert record.path[0] == 0
        assert all(record.parents[node] == before for before, node in itertools.pairwise(record.path))
        assert [record.tokens[node] for node in record.path[1:]] == list(record.emitted[:-1])
        assert len(record.emitted) == len(record.path)
        if mode == "tree":
            assert list(record.scores) == sorted(record.scores, reverse=True)
        said += record.emitted
    assert said == text
    done = completion_of(answer)
    assert (done.token_ids, done.rounds, done.finish_reason) == (tuple(text), len(answer) - 1, "length")
    assert done.records == tuple(records_of(answer))
    assert done.acceptance_length == (len(text) - 1) / done.rounds
    assert (done.timing.prefill_s, done.timing.decode_s) == (1.0, float(len(answer) - 1))


def test_jobs_without_records_have_none():
    engine = new_engine()
    answer = list(engine.run(engine.fixed_job(PROMPT, SamplingParams(max_tokens=9))))
    assert tokens_of(answer) == plain_text()[:9]
    assert records_of(answer) == []


@torch.inference_mode()
def test_shadow_commits_the_chain_and_records_the_tree():
    """At every place of the text: the path is the chain's, and would_commit what tree mode commits from there."""
    text = plain_text(200)
    engine = with_oracle(new_engine(), text, seed=5)
    answer = pieces(engine, PROMPT, SamplingParams(max_tokens=80), plan_of("shadow"))
    said, better = 1, 0
    for record in records_of(answer):
        if said > 80 - BLOCK:
            break  # rounds at the end are cut
        oracle = OracleDrafter([PROMPT + text], VOCABULARY, seed=5)
        here = stage(target_of(), oracle, [PROMPT + text[: said - 1]], [SamplingParams()])
        chain, tree = (here.twin().round(plan_of(mode)) for mode in ("chain", "tree"))
        assert record.emitted == chain.committed[0]
        assert record.would_commit == len(tree.committed[0])
        better += record.would_commit > len(record.emitted)
        said += len(record.emitted)
    assert said > 50
    assert better > 5
    done = completion_of(answer)
    assert done.would_commit == sum(r.would_commit for r in records_of(answer) if r.would_commit is not None)
    assert done.would_commit > len(done.token_ids)


class Learning(FixedPolicy):
    """A policy that remembers what it was told."""

    seen: list = []  # noqa: RUF012

    def observe(self, plan, committed):
        self.seen.append((plan, committed))


def test_a_policy_learns_what_was_emitted():
    """Not what lies behind an end inside a path."""
    text = plain_text()
    end = first_place(text, 12)
    engine = with_oracle(new_engine(eos_ids=(text[end],)), text, chances=CERTAIN)
    policy = Learning(TREE)
    policy.seen.clear()
    answer = list(engine.run(Job(PROMPT, SamplingParams(), policy, records=True)))
    assert sum(committed for _, committed in policy.seen) == end == len(tokens_of(answer)) - 1
    assert len(records_of(answer)[-1].path) > policy.seen[-1][1]
    assert all(plan == TREE for plan, _ in policy.seen)


class Restless:
    """A policy that gives every round another mode, plain rounds among them."""

    def __init__(self) -> None:
        shapes = [("tree", 8, 16), ("off", 1, 0), ("off", 1, 0), ("shadow", 5, 4), ("chain", 3, 1), ("tree", 2, 9)]
        self._plans = itertools.cycle([fixed_plan(*shape) for shape in shapes])

    may_draft = True

    def plan(self):
        return next(self._plans)

    def observe(self, plan, committed):
        pass


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_policy_may_change_modes_between_rounds(temperature):
    """Plain rounds keep the drafter's context too: the oracle would notice a missing feature."""
    text = plain_text(temperature=temperature, seed=6)
    engine = with_oracle(new_engine(), text)
    params = SamplingParams(temperature=temperature, seed=6, max_tokens=60)
    answer = list(engine.run(Job(PROMPT, params, Restless(), records=True)))
    assert tokens_of(answer) == text
    assert {record.mode for record in records_of(answer)} == set(MODES)


def test_a_policy_may_begin_with_plain_rounds():
    text = plain_text()
    engine = with_oracle(new_engine(), text)
    policy = Restless()
    policy.plan()  # the first plan is a plain one now
    assert tokens_of(list(engine.run(Job(PROMPT, SamplingParams(max_tokens=60), policy)))) == text


class Broken:
    """A drafter whose logits are no numbers, or no chances."""

    feature_layers = LAYERS

    def __init__(self, value, depths, tokens) -> None:
        self.value, self.depths, self.tokens = value, depths, tokens

    def propose(self, anchors_R, lengths, block_size):
        logits_RDV = torch.randn(len(anchors_R), block_size - 1, VOCABULARY, dtype=torch.float64)
        logits_RDV[:, self.depths, self.tokens] = self.value
        return Proposal(logits_RDV)

    def absorb(self, features_RPF, lengths, counts_R):
        pass


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("temperature", [0, 0.7])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_drafter_changes_nothing(mode, temperature, value):
    everything = slice(None)
    for depths, tokens in [(0, everything), (0, 3), (everything, everything), (slice(1, None), slice(0, 9))]:
        engine = new_engine()
        draft_with(engine, Broken(value, depths, tokens))
        params = SamplingParams(temperature=temperature, seed=3, max_tokens=20)
        said = tokens_of(pieces(engine, PROMPT, params, plan_of(mode)))
        assert said == plain_text(temperature=temperature, seed=3)[:20]


# Constraints


class Replayed:
    """A constraint whose state is the text so far: it can tell whether anybody ever asked about another text."""

    def __init__(self) -> None:
        self.asked, self.starts = set(), 0

    def start(self):
        self.starts += 1
        return ()

    def allowed(self, state):
        self.asked.add(state)
        return (torch.arange(VOCABULARY) + len(state)) % 2 == 0

    def advance(self, state, token):
        assert (token + len(state)) % 2 == 0, "a token that is not allowed"
        return (*state, token)


@pytest.mark.parametrize("mode", MODES)
def test_rejected_drafts_never_reach_a_constraint(mode):
    """Every state that is asked is one that the committed text passes through."""
    constraint = Replayed()
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=50, constraint=constraint)
    expected = tokens_of(pieces(plain_engine(), PROMPT, params, OFF))
    constraint.asked.clear()
    answer = pieces(with_oracle(new_engine(), expected), PROMPT, params, plan_of(mode))
    assert tokens_of(answer) == expected
    assert constraint.asked == {tuple(expected[:n]) for n in range(50)}
    assert constraint.starts == 2
    assert mode in ("off", "chain") or any(has_gap(record.path) for record in records_of(answer))


END = VOCABULARY - 2  # not the mask


class Ending:
    """Free text up to a marker, then exactly `count` even tokens, then the end; nothing after it.

    after: what the state behind the end allows, since nothing is ever said there.
    """

    def __init__(self, marker, count, after) -> None:
        self.marker, self.count, self.after = marker, count, after

    def start(self):
        return "free"

    def allowed(self, state):
        if state == "free":
            return None if self.marker is not None else torch.arange(VOCABULARY) != END
        if state == "done":
            return self.after
        tokens = torch.arange(VOCABULARY)
        return (tokens % 2 == 0) & (tokens != END) if state < self.count else tokens == END

    def advance(self, state, token):
        if state == "free":
            return 0 if token == self.marker else "free"
        if state == "done" or token == END:
            return "done"
        return state + 1


EMPTY = torch.zeros(VOCABULARY, dtype=torch.bool)


@pytest.mark.parametrize("after", [None, torch.arange(VOCABULARY) == END, EMPTY])
@pytest.mark.parametrize("mode", MODES[1:])
def test_a_constraint_that_begins_and_ends_inside_accepted_paths(mode, after):
    """Marker, constrained part and end may fall into one path; what is said is what plain decoding says."""
    text = plain_text()
    marker = text[first_place(text, 4)]
    for count in (1, 2, 3, 5, 9):
        params = SamplingParams(constraint=Ending(marker, count, after))
        expected = tokens_of(pieces(plain_engine((END,)), PROMPT, params, OFF))
        assert expected[-1] == END
        assert len(expected) == expected.index(marker) + count + 2
        # The oracle drafts past the end, so paths hold it with nodes behind.
        engine = with_oracle(new_engine((END,)), [*expected, *random_tokens(20, 9)], chances=CERTAIN)
        answer = pieces(engine, PROMPT, params, plan_of(mode))
        assert tokens_of(answer) == expected
        assert answer[-1].finish_reason == "stop"


class Dead:
    """Allows nothing after three tokens."""

    def start(self):
        return 0

    def allowed(self, state):
        return torch.arange(VOCABULARY) >= 0 if state < 3 else EMPTY

    def advance(self, state, token):
        return state + 1


@pytest.mark.parametrize("mode", MODES)
def test_a_constraint_that_allows_nothing_ends_the_request_and_not_the_engine(mode):
    engine = new_engine()
    with pytest.raises(RequestError, match="allows no token at all here; it should let an end-of-sequence token"):
        pieces(engine, PROMPT, SamplingParams(constraint=Dead()), plan_of(mode))
    # As many tokens as it allows are fine, whatever the mode would have drafted.
    three = pieces(engine, PROMPT, SamplingParams(constraint=Dead(), max_tokens=3), plan_of(mode))
    assert tokens_of(three) == plain_text()[:3]
    assert tokens_of(pieces(engine, PROMPT, SamplingParams(max_tokens=20), plan_of(mode))) == plain_text()[:20]


# One request after another


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("taken", [0, 1, 3])
def test_a_request_that_is_left_early_leaves_the_engine_usable(mode, taken):
    engine = new_engine()
    params = SamplingParams(temperature=1, seed=1)
    running = engine.run(engine.fixed_job(random_tokens(30, 4), params, plan_of(mode)))
    gathering = Gathering(30, 0.0)
    for piece in itertools.islice(running, taken):
        gathering.add(piece, 1.0)
    running.close()
    done = gathering.completion()
    assert (done.finish_reason, done.rounds) == ("cancelled", max(taken - 1, 0))
    short = SamplingParams(max_tokens=20)
    assert pieces(engine, PROMPT, short, plan_of(mode)) == pieces(new_engine(), PROMPT, short, plan_of(mode))


def test_a_second_request_at_once_is_refused_or_right():
    engine = new_engine()
    params = SamplingParams(max_tokens=30)
    prompts = [PROMPT, random_tokens(14, 8)]
    expected = [tokens_of(pieces(plain_engine(), prompt, params, OFF)) for prompt in prompts]
    running = [engine.run(engine.fixed_job(prompt, params)) for prompt in prompts]
    said = [[], []]
    try:
        for turn in itertools.zip_longest(*running):
            for tokens, piece in zip(said, turn, strict=True):
                tokens += piece.token_ids if piece is not None else ()
    except RequestError:
        return
    assert said == expected


def test_three_hundred_requests_on_one_engine():
    """Random modes, budgets, blocks, lengths, seeds and settings, some left early: all equal plain decoding."""
    draw = random.Random(7)
    settings = [{}, {"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.9, "frequency_penalty": 0.3}]
    settings += [{"repetition_penalty": 1.3}, {"temperature": 1.2, "top_k": 5, "logit_bias": {4: 2.0}}]
    pool = []
    for i, prompt_length in enumerate((1, 2, 5, 9, 14, 23, 40, 3, 17, 30)):
        prompt, one = random_tokens(prompt_length, 60 + i), {"seed": i, **settings[i % len(settings)]}
        pool.append(
            (prompt, one, tokens_of(pieces(plain_engine(), prompt, SamplingParams(**one, max_tokens=40), OFF)))
        )
    engine = new_engine(max_context=128, prefill_chunk=16)
    model = engine.runner.drafters
    longest = 0
    for request in range(300):
        prompt, one, expected = draw.choice(pool)
        limit = draw.randint(1, 40)
        plan = fixed_plan(draw.choice(MODES), draw.randint(2, BLOCK), draw.choice((1, 3, 8, 15, 16, 33)))
        oracle = draw.random() < 0.7
        draft_with(engine, OracleDrafter([prompt + expected], VOCABULARY, seed=request) if oracle else model)
        job = engine.fixed_job(prompt, SamplingParams(**one, max_tokens=limit), plan)
        running = engine.run(job)
        answer = list(itertools.islice(running, draw.choice((2, 1000))))
        running.close()
        said = tokens_of(answer)
        assert said == expected[: len(said)], (request, plan)
        assert len(said) == limit or answer[-1].finish_reason is None
        longest = max(longest, max(len(piece.token_ids) for piece in answer))
    assert longest == BLOCK


# Devices


def test_devices_by_name():
    assert [check_device("auto", gpus) for gpus in (0, 2)] == ["cpu", "cuda"]
    assert [check_device(name, 2) for name in ("cpu", "cuda", "cuda:1")] == ["cpu", "cuda", "cuda:1"]
    for name in ("", "gpu", "cpu:0", "cpu:x", "cuda:", "cuda:x", "cuda:-1", "mps"):
        with pytest.raises(UnsupportedError, match=r"is not supported; use auto, cpu or cuda"):
            check_device(name, 2)
    with pytest.raises(ConfigError, match="cuda:2 was asked for, but torch sees GPUs 0 to 1"):
        check_device("cuda:2", 2)
    for name in ("cuda", "cuda:0"):
        with pytest.raises(ConfigError, match="torch sees no GPU here; use --device cpu"):
            check_device(name, 0)


# The Python face


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target with a tokenizer of words, and a drafter for it, as they lie on a disk."""
    root = tmp_path_factory.mktemp("models")
    target = toy_target("llama", eos_ids=(END,))
    write_folder(root / "target", target_config(target), target_tensors(target))
    tokenizer = Tokenizer(WordLevel({f"w{token}": token for token in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"w{END}").save_pretrained(root / "target")
    return root / "target", write_drafter(root / "drafter")


@pytest.fixture(scope="module")
def llm(folders):
    target, drafter = folders
    return LLM(str(target), drafter=str(drafter), dtype="float64", config=EngineConfig(max_context=96, budget=8))


def test_a_plan_may_be_changed_for_one_request(llm):
    assert llm.plan() == llm.engine.plan == RoundPlan("tree", 6, 8)
    assert llm.plan("off") == OFF
    assert llm.plan("chain") == RoundPlan("chain", 6, 5)
    assert llm.plan("chain", block_size=3) == RoundPlan("chain", 3, 2)
    assert llm.plan(budget=64) == RoundPlan("tree", 6, 64)
    assert llm.plan("shadow", 4, 2) == RoundPlan("shadow", 2, 4)
    for arguments, message in [(("nonsense",), "mode must"), (("tree", 0), "budget"), (("tree", 8, 7), "exceeds")]:
        with pytest.raises(ConfigError, match=message):
            llm.plan(*arguments)


def test_answers_of_a_model_from_a_folder(llm):
    """Text and token prompts, one plan and another: the same answer, streamed or at once."""
    text = "w3 w14 w15 w9 w26"
    params = SamplingParams(max_tokens=40, temperature=0.9, seed=5, logit_bias={END: -100.0})
    whole = llm.generate(text, params)
    assert (whole.prompt_tokens, len(whole.token_ids), whole.finish_reason) == (5, 40, "length")
    assert whole.text == " ".join(f"w{token}" for token in whole.token_ids)
    for mode in MODES:
        streamed = list(llm.stream([3, 14, 15, 9, 26], params, plan=llm.plan(mode)))
        assert tuple(tokens_of(streamed)) == whole.token_ids
        assert "".join(piece.text for piece in streamed) == whole.text
    shadowed = llm.generate(text, params, plan=llm.plan("shadow"))
    assert shadowed.would_commit >= shadowed.rounds
    assert shadowed.records == ()
    assert whole.would_commit is None


def test_drafters_are_loaded_only_for_modes_that_draft(folders):
    target, _ = folders
    plain = LLM(str(target), dtype="float64", config=EngineConfig(mode="off", max_context=64))
    assert len(plain.generate("w1 w2", SamplingParams(max_tokens=6, ignore_eos=True)).token_ids) == 6
    with pytest.raises(ConfigError, match="mode tree needs a drafter"):
        plain.plan("tree")


def test_a_template_may_refuse_a_chat(folders):
    model = LLM(str(folders[0]), dtype="float64", config=EngineConfig(mode="off", max_context=64))
    with pytest.raises(RequestError, match="no chat template"):
        model.encode([{"role": "user", "content": "w1"}])
    model.tokenizer._tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system messages') }}{% endif %}w1"
    )
    assert model.encode([{"role": "user", "content": "w1"}]) == [1]
    with pytest.raises(RequestError, match="chat template refuses these messages: no system messages"):
        model.encode([{"role": "system", "content": "w1"}])


def test_the_public_names():
    """Each is there, none is missing from the list, and none needs torch before it is used."""
    for name in ddtree.__all__:
        assert getattr(ddtree, name).__name__ == name
    assert set(ddtree.__all__) == set(ddtree._HOMES)
    assert ddtree.__all__ == sorted(ddtree.__all__, key=lambda name: (not name.isupper(), name))
    with pytest.raises(AttributeError, match="module 'ddtree' has no attribute 'Nonsense'"):
        _ = ddtree.Nonsense
    code = "import sys, ddtree; from ddtree import SamplingParams; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code.replace("from ddtree import SamplingParams; ", "")], check=True)
