"""Figures from rounds, with intervals that resample prompts.

Invariant: only emitted tokens count. A mean is tokens over rounds of all prompts together, never a mean of means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddtree.evaluation.arms import Round

__all__ = [
    "ArmFigures",
    "ContextFigures",
    "DepthFigures",
    "Interval",
    "figures",
    "paired_ratios",
    "resamples",
    "totals",
]

DRAWS = 4000
CONTEXT_EDGES = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class DepthFigures:
    """One draft position: rounds that could draft it, rounds that had it accepted, and their share."""

    depth: int
    offered: int
    accepted: int

    @property
    def share(self) -> float:
        return self.accepted / self.offered if self.offered else 0.0


@dataclass(frozen=True, slots=True)
class ContextFigures:
    """Rounds whose anchor had `first` to `last` positions before it; last None has no end."""

    first: int
    last: int | None
    rounds: int
    mean: Interval


@dataclass(frozen=True, slots=True)
class ArmFigures:
    """One arm on one task. mean: tokens per round. expected: what the drafter expected of a round, or None."""

    mean: Interval
    tokens: int
    rounds: int
    drafted: int
    accepted: int
    expected: float | None
    depths: tuple[DepthFigures, ...]
    contexts: tuple[ContextFigures, ...]
    per_prompt: tuple[tuple[int, int], ...]

    @property
    def accepted_of_drafted(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


def figures(answers: Sequence[Sequence[Round]]) -> ArmFigures:
    """All figures of one arm, from the rounds of each answer."""
    every = [one for rounds in answers for one in rounds]
    per_prompt = tuple((sum(r.committed for r in rounds), len(rounds)) for rounds in answers)
    weights = resamples(len(answers))
    told = [one.expected for one in every if one.expected is not None]
    return ArmFigures(
        mean=_ratio(per_prompt, weights),
        tokens=sum(tokens for tokens, _ in per_prompt),
        rounds=len(every),
        drafted=sum(one.drafted for one in every),
        accepted=sum(one.accepted for one in every),
        expected=sum(told) / len(told) if told else None,
        depths=_depths(every),
        contexts=_contexts(answers, weights),
        per_prompt=per_prompt,
    )


def resamples(prompts: int, draws: int = DRAWS, seed: int = 0) -> Array:
    """How often each prompt is drawn in each of many samples with replacement. [draws, prompts]."""
    source = np.random.default_rng(seed)
    return source.multinomial(prompts, np.full(prompts, 1 / prompts), size=draws).astype(np.float64)


def totals(per_prompt: Sequence[tuple[int, int]], weights: Array) -> Array:
    """Tokens per round in each sample; NaN where a sample has no rounds, which says nothing. [draws]."""
    sums = weights @ np.asarray(per_prompt, dtype=np.float64).reshape(-1, 2)
    return np.divide(sums[:, 0], sums[:, 1], out=np.full(len(sums), np.nan), where=sums[:, 1] > 0)


def paired_ratios(
    a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]], weights: Array
) -> tuple[float, Array]:
    """Acceptance length of b over that of a on the same prompts, and the same in each sample."""
    whole = np.ones((1, len(a)))
    return float(totals(b, whole)[0] / totals(a, whole)[0]), totals(b, weights) / totals(a, weights)


def _ratio(per_prompt: Sequence[tuple[int, int]], weights: Array) -> Interval:
    if not sum(rounds for _, rounds in per_prompt):
        return Interval(0.0, 0.0, 0.0)
    value = totals(per_prompt, np.ones((1, len(per_prompt))))[0]
    low, high = np.nanpercentile(totals(per_prompt, weights), [2.5, 97.5])
    return Interval(float(value), float(low), float(high))


def _depths(rounds: Sequence[Round]) -> tuple[DepthFigures, ...]:
    deepest = max((one.horizon for one in rounds), default=0)
    return tuple(
        DepthFigures(
            depth,
            sum(one.horizon >= depth for one in rounds),
            sum(one.accepted >= depth for one in rounds),
        )
        for depth in range(1, deepest + 1)
    )


def _contexts(answers: Sequence[Sequence[Round]], weights: Array) -> tuple[ContextFigures, ...]:
    found = []
    for first, end in zip(CONTEXT_EDGES, [*CONTEXT_EDGES[1:], None], strict=True):
        inside = [
            [one for one in rounds if first <= one.context and (end is None or one.context < end)]
            for rounds in answers
        ]
        count = sum(map(len, inside))
        if count:
            pairs = [(sum(one.committed for one in rounds), len(rounds)) for rounds in inside]
            found.append(ContextFigures(first, None if end is None else end - 1, count, _ratio(pairs, weights)))
    return tuple(found)
