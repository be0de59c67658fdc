"""Figures by hand: means are tokens over rounds, intervals resample prompts, only what could count counts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ddtree.errors import ConfigError
from ddtree.evaluation.arms import Arm, Round, arms_of, check_budgets, horizon_at
from ddtree.evaluation.metrics import figures, paired_ratios, resamples, totals


def one(context, committed, *, accepted=None, drafted=4, horizon=4, expected=2.0):
    return Round(context, committed, committed - 1 if accepted is None else accepted, drafted, horizon, expected)


ANSWERS = [
    [one(10, 5), one(15, 1), one(16, 2, drafted=3, horizon=2)],
    [one(60, 3), one(63, 1), one(64, 4, accepted=4, expected=4.0)],
    [],
]


def test_a_mean_is_tokens_over_rounds():
    found = figures(ANSWERS)
    assert (found.tokens, found.rounds) == (16, 6)
    assert found.mean.value == pytest.approx(16 / 6)
    assert found.per_prompt == ((8, 3), (8, 3), (0, 0))


def test_accepted_drafted_and_their_ratio_are_told_apart():
    """More nodes make the ratio fall while acceptance stays: one without the others misleads."""
    found = figures(ANSWERS)
    assert (found.accepted, found.drafted) == (4 + 0 + 1 + 2 + 0 + 4, 23)
    wider = [[dataclasses.replace(r, drafted=2 * r.drafted) for r in answer] for answer in ANSWERS]
    assert figures(wider).mean == found.mean
    assert figures(wider).accepted_of_drafted == pytest.approx(found.accepted_of_drafted / 2)
    assert found.expected == pytest.approx(14 / 6)


def test_a_position_counts_only_where_it_could_be_drafted():
    """The round that may draft two tokens says nothing about the third: the end does not look like a miss."""
    shares = [(d.depth, d.accepted, d.offered) for d in figures(ANSWERS).depths]
    assert shares == [(1, 4, 6), (2, 3, 6), (3, 2, 5), (4, 2, 5)]


def test_context_is_where_the_anchor_stands():
    contexts = figures(ANSWERS).contexts
    assert [(c.first, c.last, c.rounds) for c in contexts] == [(0, 63, 5), (64, 127, 1)]
    assert [c.mean.value for c in contexts] == pytest.approx([12 / 5, 4.0])


def test_the_last_span_has_no_end():
    (context,) = figures([[one(100_000, 2)]]).contexts
    assert (context.first, context.last) == (8192, None)


def test_intervals_cover_what_they_should():
    """Of 200 samples of 40 prompts, about 95 % have the true mean inside."""
    source = np.random.default_rng(5)
    hits = 0
    for _ in range(200):
        answers = [[one(1, int(c)) for c in source.integers(1, 6, size=source.integers(5, 30))] for _ in range(40)]
        mean = figures(answers).mean
        hits += mean.low <= 3.0 <= mean.high
    assert 180 <= hits <= 199


def test_equal_prompts_leave_no_doubt():
    mean = figures([[one(1, 3), one(4, 2)]] * 5).mean
    assert (mean.low, mean.value, mean.high) == (2.5, 2.5, 2.5)


def test_nothing_measured_is_zero_and_no_crash():
    found = figures([[], []])
    assert (found.mean.value, found.rounds, found.depths, found.contexts, found.expected) == (0.0, 0, (), (), None)


def test_samples_without_a_round_say_nothing():
    """One answer of ten reaches far: a third of the samples lack it, and no round of those committed 0 tokens."""
    answers = [[one(300, 3)], *([one(10, 3)] for _ in range(9))]
    mean = figures(answers).contexts[1].mean
    assert (mean.low, mean.value, mean.high) == (3, 3, 3)
    value, samples = paired_ratios([(4, 2), (0, 0)], [(6, 2), (0, 0)], resamples(2))
    assert value == 1.5
    assert np.isnan(samples).any()
    assert set(samples[~np.isnan(samples)]) == {1.5}


def test_pairs_stay_pairs():
    """B is better by a tenth on every prompt, however much prompts differ: there is no doubt about that."""
    a = [(10 * n, 5) for n in range(1, 30)]
    b = [(11 * n, 5) for n in range(1, 30)]
    value, samples = paired_ratios(a, b, resamples(len(a)))
    assert value == pytest.approx(1.1)
    assert samples == pytest.approx(np.full(len(samples), 1.1))
    weights = resamples(len(a))
    alone = totals(a, weights)
    assert alone.std() > 0.05 * alone.mean()


# Arms


def test_arms():
    assert [arm.name for arm in arms_of((4, 16), sampled=False, shadow=True)] == [
        "chain",
        "tree-4",
        "tree-16",
        "shadow-4",
        "shadow-16",
    ]
    assert [arm.name for arm in arms_of((4,), sampled=True, shadow=False)] == [
        "chain",
        "tree-4",
        "chain-uncoupled",
        "tree-4-uncoupled",
    ]
    assert Arm("shadow", 8, False).name == "shadow-8-uncoupled"


@pytest.mark.parametrize("wrong", [0, -3, 65, 10**12])
def test_budgets_out_of_bounds(wrong):
    with pytest.raises(ConfigError, match=f"between 1 and 64 nodes .because.: got {wrong}"):
        check_budgets([4, wrong], 64, "because")


def test_budgets_are_ordered_and_told_once():
    assert check_budgets([16, 4, 16], 64, "") == (4, 16)
    with pytest.raises(ConfigError, match="no budget"):
        check_budgets([], 64, "")


def test_horizons_end_with_the_answer():
    assert [horizon_at(6, said, 10) for said in range(1, 10)] == [5, 5, 5, 5, 4, 3, 2, 1, 0]
