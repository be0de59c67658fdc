"""Acceptance measured on known text is what decoding really does, round by round."""

from __future__ import annotations

import itertools

import pytest
import torch

from ddtree.engine.config import EngineConfig
from ddtree.engine.engine import BatchEngine
from ddtree.models.load import LoadedDrafter
from ddtree.ops import FULL_VIEW, View, reference_ops
from ddtree.speculation.params import SamplingParams
from ddtree.speculation.plan import fixed_plan
from ddtree.training.acceptance import Acceptance, accepted_steps, measure_example, walk_rounds
from ddtree.tree import factorised_candidates
from tests.drafters import OracleDrafter, draft_with, pieces, plain_forward, records_of, tokens_of
from tests.toys import random_tokens, toy_drafter, toy_target

WORDS, MASK, BLOCK = 12, 11, 6  # so few words that a random drafter is often right
PROMPT = random_tokens(7, 5, WORDS)
COUNT = 90
BUDGETS = (None, 1, 4, 15, 16, 64)
OFF = fixed_plan("off", 1, 0)


def plan_of(budget):
    return fixed_plan("chain", BLOCK, 1) if budget is None else fixed_plan("tree", BLOCK, budget)


def new_engine(target, drafter=None):
    """An engine in float64; without a drafter it decodes plainly."""
    config = EngineConfig("off" if drafter is None else "tree", max_context=256)
    return BatchEngine(target, None if drafter is None else LoadedDrafter(*drafter), config, lambda tokens: "")


def plain_text(target, count=COUNT):
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    return tokens_of(pieces(new_engine(target), PROMPT, params, OFF))


def online_rounds(engine, budget, count):
    """What each round commits until the answer has `count` tokens; the engine is asked for more than that, so no
    round is shortened on its account."""
    params = SamplingParams(max_tokens=count + BLOCK, ignore_eos=True)
    answer = pieces(engine, PROMPT, params, plan_of(budget))
    steps = [len(record.emitted) for record in records_of(answer)]
    ends = list(itertools.accumulate(steps, initial=1))
    return steps[: next(i for i, end in enumerate(ends) if end >= count)]


def steps_of(logits_ADV, labels_AD, budget):
    """What a round at each anchor commits when the drafter's logits are these."""
    log_probs_ADK, tokens_ADK = reference_ops().top_log_probs(logits_ADV, budget or 1)
    return accepted_steps(factorised_candidates(tokens_ADK, log_probs_ADK), labels_AD, budget).tolist()


def walked(steps):
    """The steps that a walk over the anchors takes."""
    taken, place = [], 0
    while place < len(steps):
        taken.append(steps[place])
        place += steps[place]
    return taken


# Against the engine


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_an_oracles_rounds_are_the_engines(seed):
    """Guesses that are often right, second or third best: long paths that leave the drafter's first choice."""
    target = toy_target("qwen3", layers=2, vocabulary=WORDS)
    text = plain_text(target, COUNT + 2 * BLOCK)
    oracle = OracleDrafter([[*PROMPT, *text]], WORDS, seed=seed)
    engine = new_engine(target, toy_drafter(target, layer_ids=(1, 0), block_size=BLOCK, mask_token_id=MASK))
    draft_with(engine, oracle)
    whole, start = torch.tensor([*PROMPT, *text[:COUNT]]), len(PROMPT)
    anchors = range(start, start + COUNT - 1)
    logits_ADV = torch.stack([oracle._logits[0][a + 1 : a + BLOCK] for a in anchors])
    padded = torch.cat([whole, torch.full((BLOCK,), -1)])
    labels_AD = torch.stack([padded[a + 1 : a + BLOCK] for a in anchors])
    lengths = []
    for budget in BUDGETS:
        steps = steps_of(logits_ADV, labels_AD, budget)
        rounds = online_rounds(engine, budget, COUNT)
        assert walked(steps)[:-1] == rounds[:-1]
        found = walk_rounds(steps)
        assert found == Acceptance(COUNT - 1, len(rounds))
        lengths.append(found.length)
    chain, *trees = lengths
    assert chain > 2
    assert trees == sorted(trees)
    assert trees[-1] > 1.2 * chain


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("view", [FULL_VIEW, View(window=9), View(causal=True)])
def test_a_drafters_rounds_are_the_engines(family, view):
    """The real path: features of a causal pass, many blocks at once, against a cache that grows round by round."""
    target = toy_target(family, layers=3, vocabulary=WORDS)
    model, vocabulary = toy_drafter(target, layer_ids=(2, 0), block_size=BLOCK, view=view, mask_token_id=MASK)
    engine = new_engine(target, (model, vocabulary))
    text = plain_text(target)
    _, features_TF = plain_forward(target, [*PROMPT, *text], (2, 0))
    tokens_T = torch.tensor([*PROMPT, *text])
    arguments = (LoadedDrafter(model, vocabulary), tokens_T, features_TF, len(PROMPT), BUDGETS)
    found = measure_example(*arguments)
    for budget in BUDGETS:
        assert found[budget] == Acceptance(COUNT - 1, len(online_rounds(engine, budget, COUNT))), budget
    assert found[64].length > 1.5
    assert found[64].length > found[16].length > found[1].length
    assert measure_example(*arguments, anchors_per_pass=13) == found


@pytest.mark.parametrize("budget", BUDGETS)
def test_an_answer_that_ends_by_itself(budget):
    """Nothing after the end-of-sequence token is counted, in one or the other."""
    free = toy_target("qwen3", vocabulary=WORDS)
    text = plain_text(free)
    end = text[40]
    text = text[: text.index(end) + 1]
    target = toy_target("qwen3", vocabulary=WORDS, eos_ids=(end,))
    drafter = toy_drafter(target, block_size=BLOCK, mask_token_id=MASK)
    answer = pieces(new_engine(target, drafter), PROMPT, SamplingParams(max_tokens=200), plan_of(budget))
    assert tokens_of(answer) == text
    _, features_TF = plain_forward(target, [*PROMPT, *text], (0, 2))
    tokens_T = torch.tensor([*PROMPT, *text])
    found = measure_example(LoadedDrafter(*drafter), tokens_T, features_TF, len(PROMPT), (budget,))
    assert found == {budget: Acceptance(len(text) - 1, len(answer) - 1)}


# Steps and walks by hand


def logits_of(rows):
    """Logits of the tokens given for each depth, best first; no others are possible."""
    logits_DV = torch.full((len(rows), WORDS), -torch.inf, dtype=torch.float64)
    for depth, tokens in enumerate(rows):
        for rank, token in enumerate(tokens):
            logits_DV[depth, token] = 9.0 - rank
    return logits_DV[None]


def test_steps_count_accepted_nodes_and_the_bonus():
    logits_1DV = logits_of([[3, 4], [5, 6], [0, 8]])

    def steps(labels, budget):
        return steps_of(logits_1DV, torch.tensor([labels]), budget)

    assert steps([3, 5, 0], None) == [4]
    assert steps([3, 5, 1], None) == [3]
    assert steps([1, 5, 0], None) == [1], "what follows a miss counts for nothing"
    assert steps([3, 6, 0], None) == [2]
    assert steps([3, 6, 0], 16) == [4], "a branch"
    assert steps([4, 5, 0], 16) == [4]
    assert steps([3, 5, 0], 1) == [2], "a budget of one node"
    assert steps([3, 5, -1], 16) == [3], "the end of the text is never accepted"
    assert steps([-1, -1, -1], 16) == [1]
    assert steps([0, 0, 0], 16) == [1], "token 0 is a token, and no padding is taken for it"


def test_walks():
    assert walk_rounds([]) == Acceptance(0, 0)
    assert walk_rounds([1, 1, 1, 1]) == Acceptance(4, 4)
    assert walk_rounds([4, 1, 1, 1]) == Acceptance(4, 1), "anchors inside a round are passed over"
    assert walk_rounds([2, 9, 2, 9]) == Acceptance(4, 2)
    assert walk_rounds([1, 3, 9, 9]) == Acceptance(4, 2)
    assert walk_rounds([6, 6]) == Acceptance(2, 1), "no more tokens than there are"


def test_lengths():
    assert Acceptance(0, 0).length == 0.0
    assert Acceptance(9, 3).length == 3.0
    assert Acceptance(9, 3) + Acceptance(1, 2) == Acceptance(10, 5)


def test_a_drafter_that_knows_the_text_is_not_pinned_at_one():
    """Whole blocks are accepted, and the end of the text does not count as misses."""
    text = random_tokens(26, 9, WORDS)
    padded = [*text, *[-1] * BLOCK]
    anchors = range(len(text) - 1)
    labels_AD = torch.tensor([padded[a + 1 : a + BLOCK] for a in anchors])
    logits_ADV = torch.cat([logits_of([[max(token, 0)] for token in row]) for row in labels_AD.tolist()])
    for budget in (None, 5, 64):
        assert walk_rounds(steps_of(logits_ADV, labels_AD, budget)) == Acceptance(25, 5)


def test_the_shortest_answer():
    """Two tokens: one anchor, one round, one token."""
    target = toy_target("qwen3", vocabulary=WORDS)
    drafter = LoadedDrafter(*toy_drafter(target, block_size=BLOCK, mask_token_id=MASK))
    text = [*PROMPT, *random_tokens(2, 1, WORDS)]
    _, features_TF = plain_forward(target, text, (0, 2))
    found = measure_example(drafter, torch.tensor(text), features_TF, len(PROMPT), (None, 8))
    assert found == {None: Acceptance(1, 1), 8: Acceptance(1, 1)}
