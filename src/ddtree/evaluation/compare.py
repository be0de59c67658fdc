"""Which of two measurements is better: paired over the same prompts, task by task and over all.

Overall is the geometric mean of the tasks' ratios, so that a long set does not drown a short one. Intervals
resample prompts, the same ones on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddtree.errors import ConfigError, DataError
from ddtree.evaluation.metrics import Interval, paired_ratios, resamples
from ddtree.evaluation.result import arms_in

__all__ = ["Comparison", "common_arms", "compare", "percent"]

PREFERRED = "tree-64"
# What must be equal for prompts to pair up, and what the user can do about it.
PAIRED = ("model", "temperature", "seed", "max_tokens")


@dataclass(frozen=True, slots=True)
class Comparison:
    """B over A in one arm: ratios of acceptance lengths, for each task and overall."""

    a: str
    b: str
    arm: str
    overall: Interval
    tasks: Mapping[str, Interval]

    @property
    def verdict(self) -> str:
        """One sentence: who is better and by how much, and on which tasks that does not hold."""
        if self.overall.low > 1:
            return self._won(self.b, self.overall, dict(self.tasks))
        if self.overall.high < 1:
            return self._won(self.a, _inverse(self.overall), {k: _inverse(v) for k, v in self.tasks.items()})
        words = f"no difference shown: {self.b} against {self.a} {percent(self.overall, signed=True)}"
        for task, ratio in self.tasks.items():
            if ratio.low > 1:
                words += f"; on {task} {self.b} is better by {percent(ratio)}"
            elif ratio.high < 1:
                words += f"; on {task} {self.a} is better by {percent(_inverse(ratio))}"
        return words

    def _won(self, winner: str, overall: Interval, tasks: Mapping[str, Interval]) -> str:
        words = f"{winner} is better by {percent(overall)}"
        for task, ratio in tasks.items():
            if ratio.high < 1:
                words += f"; on {task} it is worse by {percent(_inverse(ratio))}"
            elif ratio.low <= 1:
                words += f"; on {task} it is not"
        return words


def common_arms(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Arms that every task of both documents has, in the first one's order."""
    tasks = [task for document in (a, b) for task in document["tasks"].values()]
    return [arm for arm in arms_in(tasks[0]) if all(arm in task for task in tasks)]


def compare(
    a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, str], arm: str | None = None
) -> Comparison:
    """Compare two documents of `ddtree eval`. arm: None takes a tree of 64, or the largest tree that both have.

    DataError when they were not measured on the same prompts in the same way, ConfigError for an unknown arm.
    """
    for key in PAIRED:
        if a.get(key) != b.get(key):
            raise DataError(
                f"{names[0]} and {names[1]} cannot be paired: {key} is {a.get(key)!r} and {b.get(key)!r}; measure "
                "both in the same way"
            )
    shared = [task for task in a["tasks"] if task in b["tasks"]]
    if not shared:
        raise DataError(
            f"no task is in both: {', '.join(a['tasks']) or 'none'} and {', '.join(b['tasks']) or 'none'}"
        )
    chosen = _chosen(common_arms(_only(a, shared), _only(b, shared)), arm)
    ratios: dict[str, Interval] = {}
    values, draws = [], []
    for number, task in enumerate(shared):
        pairs = _pairs(a["tasks"][task], b["tasks"][task], task, chosen)
        value, samples = paired_ratios(*pairs, resamples(len(pairs[0]), seed=number))
        ratios[task] = _interval(value, samples)
        values.append(value)
        draws.append(samples)
    overall = _interval(_geometric(np.array(values)[:, None])[0], _geometric(np.stack(draws)))
    return Comparison(*names, chosen, overall, ratios)


def percent(ratio: Interval, signed: bool = False) -> str:
    """A ratio as `12 % [9, 15]` more than one."""
    more = [100 * (bound - 1) for bound in (ratio.value, ratio.low, ratio.high)]
    digits = 1 if more[2] - more[1] < 4 else 0
    sign = "+" if signed else ""
    value, low, high = (f"{bound:{sign}.{digits}f}" for bound in more)
    return f"{value} % [{low}, {high}]"


def _chosen(arms: Sequence[str], asked: str | None) -> str:
    if asked is not None:
        if asked not in arms:
            raise ConfigError(f"arm {asked!r} is not in both; those are {', '.join(arms) or 'none'}")
        return asked
    if not arms:
        raise DataError("the two have no arm in common; measure both with the same --budget")
    trees = sorted((a for a in arms if a.startswith("tree-") and a[5:].isdigit()), key=lambda a: int(a[5:]))
    return PREFERRED if PREFERRED in arms else (trees or list(arms))[-1]


def _only(document: Mapping[str, Any], tasks: Sequence[str]) -> dict[str, Any]:
    return {"tasks": {task: document["tasks"][task] for task in tasks}}


def _pairs(
    a: Mapping[str, Any], b: Mapping[str, Any], task: str, arm: str
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Tokens and rounds of each prompt on both sides."""
    if a["prompt_hash"] != b["prompt_hash"]:
        raise DataError(
            f"task {task}: the rendered prompts differ, so nothing can be paired; measure both with the same "
            "prompts, --limit and chat template"
        )
    first, second = ([(int(t), int(r)) for t, r in side[arm]["per_prompt"]] for side in (a, b))
    if len(first) != len(second):
        raise DataError(
            f"task {task}: figures of {len(first)} and of {len(second)} prompts cannot be paired; measure anew"
        )
    if not sum(rounds for _, rounds in first) or not sum(rounds for _, rounds in second):
        raise DataError(f"task {task}: no answer took a round, so there is nothing to compare")
    return first, second


def _geometric(ratios: Any) -> Any:
    return np.exp(np.log(ratios).mean(axis=0))


def _interval(value: float, samples: Any) -> Interval:
    """Samples without a single round say nothing and are passed over."""
    low, high = np.nanpercentile(samples, [2.5, 97.5])
    return Interval(float(value), float(low), float(high))


def _inverse(ratio: Interval) -> Interval:
    return Interval(1 / ratio.value, 1 / ratio.high, 1 / ratio.low)
