"""From what rounds cost and what they bring to the drafter worth shipping. No models here: arithmetic on files.

On a device, a task and a mode, expected tokens per second are tokens per round (`ddtree eval`) over seconds per
round (`drafter_choice.py cost`); plain decode brings one token a step. Every task takes its best mode, plain
decode among them. A drafter's figure on a device is the mean over tasks, and its score the geometric mean over
devices of that figure over plain decode's, because devices differ in scale.

Intervals are 95 %, bootstrap: prompts of each task and turns of each device are resampled, the same ones for
every drafter and mode, so that two drafters are compared in pairs. The best mode is chosen once, by the values,
and held.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.errors import ConfigError, DataError
from ddtree.evaluation.compare import PAIRED, percent
from ddtree.evaluation.metrics import DRAWS, Interval, resamples, totals

Array = NDArray[np.float64]
PLAIN = "plain"


@dataclass(frozen=True)
class Drawn:
    """A figure, and the same figure in each bootstrap sample."""

    value: float
    draws: Array

    def __mul__(self, other: Drawn) -> Drawn:
        return Drawn(self.value * other.value, self.draws * other.draws)

    def __truediv__(self, other: Drawn) -> Drawn:
        return Drawn(self.value / other.value, self.draws / other.draws)

    @property
    def interval(self) -> Interval:
        # Samples without a single round say nothing and are passed over.
        low, high = np.nanpercentile(self.draws, [2.5, 97.5])
        return Interval(self.value, float(low), float(high))

    @property
    def document(self) -> dict[str, float]:
        found = self.interval
        return {"value": found.value, "low": found.low, "high": found.high}


def read_cost(path: Path) -> dict[str, Any]:
    """A result of `cost`. DataError when it is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); write it with `drafter_choice.py cost`") from None
    if not isinstance(content, dict) or content.get("verb") != "cost":
        raise DataError(f"{path}: no result of `drafter_choice.py cost`; write one with that")
    return content


def choose(costs: Sequence[Mapping[str, Any]], acceptance: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The report: expected speeds of every drafter, device, task and mode, and the verdict.

    ConfigError or DataError when the files do not belong together.
    """
    arms = _check_costs(costs)
    left_out = _check_acceptance(costs[0], acceptance, arms)
    accepted = _accepted(acceptance, arms)
    devices = {cost["device"]: _seconds(cost, number) for number, cost in enumerate(costs)}
    drafters: dict[str, Any] = {}
    scores: dict[str, Drawn] = {}
    for name, tasks in accepted.items():
        found = {device: _on_device(tasks, seconds, name) for device, seconds in devices.items()}
        means = [mean for _, mean in found.values()]
        scores[name] = _geometric(means)
        known = costs[0]["drafters"][name]
        drafters[name] = {key: known[key] for key in ("layers", "parameters", "block_size", "edges", "weights")}
        drafters[name]["acceptance"] = {
            key: acceptance[name].get(key) for key in ("drafter", "method", "dtype", "device")
        }
        drafters[name]["devices"] = {device: document for device, (document, _) in found.items()}
        drafters[name]["score"] = scores[name].document
    first = next(iter(acceptance.values()))
    return {
        "verb": "choose",
        "model": costs[0]["model"],
        "max_tokens": first["max_tokens"],
        "tasks": {
            task: {key: found[key] for key in ("prompts", "prompt_hash")} for task, found in first["tasks"].items()
        },
        "arms_without_cost": left_out,
        "devices": {
            cost["device"]: {key: cost[key] for key in ("hardware", "dtype", "threads", "prompt_hash")}
            | {"plain_tokens_per_second": (_one() / devices[cost["device"]]["", PLAIN]).document}
            | {"measured": cost["provenance"]}
            for cost in costs
        },
        "drafters": drafters,
        "verdict": _verdict(scores, list(devices)),
    }


def _check_costs(costs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The modes that all files have figures of, when the files belong together."""
    first, seen = costs[0], set[str]()
    arms = list(next(iter(first["drafters"].values()))["arms"])
    for cost in costs:
        device = cost["device"]
        if device in seen:
            raise ConfigError(f"two cost files are of {device}, which would count twice; give one for each device")
        seen.add(device)

        def same(what: str, a: Any, b: Any, mend: str, device: str = device) -> None:
            _same(what, {first["device"]: a, device: b}, mend)

        same("model", first["model"], cost["model"], "measure both with the same --model")
        _same_names(first["device"], first["drafters"], device, cost["drafters"])
        for name, found in cost["drafters"].items():
            mend = "measure both with the same --budget"
            same(f"modes of {name}", ", ".join(arms), ", ".join(found["arms"]), mend)
            mend = "measure the same checkpoint on both"
            same(f"weights of {name}", first["drafters"][name]["weights"], found["weights"], mend)
    return arms


def _check_acceptance(
    cost: Mapping[str, Any], acceptance: Mapping[str, Mapping[str, Any]], arms: Sequence[str]
) -> list[str]:
    """Modes that were measured and have no cost, when the documents belong together and to the costs."""
    _same_names("--cost", cost["drafters"], "--acceptance", acceptance)
    first_name, first = next(iter(acceptance.items()))
    more: dict[str, None] = {}
    for name, document in acceptance.items():
        here = f"--acceptance {name}"
        mend = "measure with the same --model"
        _same("model", {"--cost": cost["model"], here: document.get("model")}, mend)
        block_size = cost["drafters"][name]["block_size"]
        mend = "give each name the file of its own drafter"
        _same(f"block size of {name}", {"--cost": block_size, here: document.get("block_size")}, mend)
        if document.get("temperature") != 0:
            raise ConfigError(
                f"{here} is of temperature {document.get('temperature')}, but rounds are timed greedy; measure "
                "with --temperature 0"
            )
        for key in PAIRED:
            values = {first_name: first.get(key), name: document.get(key)}
            _same(key, values, "measure all drafters in the same way")
        tasks = {first_name: ", ".join(first["tasks"]), name: ", ".join(document["tasks"])}
        _same("tasks", tasks, "measure all drafters on the same tasks in the same order")
        for task, found in document["tasks"].items():
            hashes = {first_name: first["tasks"][task]["prompt_hash"], name: found["prompt_hash"]}
            _same(f"rendered prompts of {task}", hashes, "measure all drafters on the same prompts and --limit")
            _check_arms(f"{here}, {task}", found, arms)
            more |= {arm: None for arm in found if arm.startswith("tree-") and arm not in arms}
    return list(more)


def _check_arms(where: str, task: Mapping[str, Any], arms: Sequence[str]) -> None:
    missing = [arm for arm in arms if arm not in task]
    if missing:
        budgets = ",".join(arm.removeprefix("tree-") for arm in arms if arm.startswith("tree-"))
        raise ConfigError(
            f"{where}: no {', '.join(missing)}, which --cost has; measure with ddtree eval --budget {budgets}, or "
            "time other budgets"
        )
    for arm in arms:
        pairs = task[arm].get("per_prompt")
        if not pairs:
            raise DataError(
                f"{where}: {arm} holds no figures of single prompts, without which drafters cannot be compared in "
                "pairs; measure anew with ddtree eval"
            )
        if not sum(rounds for _, rounds in pairs):
            raise DataError(f"{where}: no answer took a round of {arm}; measure more prompts, or longer answers")


def _same(what: str, values: Mapping[str, Any], mend: str) -> None:
    if len(set(values.values())) > 1:
        told = " and ".join(f"{value!r} ({name})" for name, value in values.items())
        raise ConfigError(f"{what}: {told} cannot be put together; {mend}")


def _same_names(a: str, a_names: Mapping[str, Any], b: str, b_names: Mapping[str, Any]) -> None:
    for one, names, other, others in ((a, a_names, b, b_names), (b, b_names, a, a_names)):
        alone = [name for name in names if name not in others]
        if alone:
            raise ConfigError(
                f"drafters: {', '.join(alone)} is in {one} but not in {other}, which has {', '.join(others)}; "
                "name the same drafters in both"
            )


def _accepted(
    acceptance: Mapping[str, Mapping[str, Any]], arms: Sequence[str]
) -> dict[str, dict[str, dict[str, Drawn]]]:
    """Tokens per round by drafter, task and mode. A task's samples hold the same prompts for all drafters."""
    found: dict[str, dict[str, dict[str, Drawn]]] = {name: {} for name in acceptance}
    for number, task in enumerate(next(iter(acceptance.values()))["tasks"]):
        for name, document in acceptance.items():
            here = document["tasks"][task]
            prompts = len(here[arms[0]]["per_prompt"])
            weights, whole = resamples(prompts, seed=number), np.ones((1, prompts))
            found[name][task] = {PLAIN: _one()} | {
                arm: Drawn(float(totals(pairs, whole)[0]), totals(pairs, weights))
                for arm, pairs in ((arm, here[arm]["per_prompt"]) for arm in arms)
            }
    return found


def _seconds(cost: Mapping[str, Any], number: int) -> dict[tuple[str, str], Drawn]:
    """Seconds of a round by drafter and mode; plain decode's under no name. Turns are resampled whole."""
    samples = {("", PLAIN): cost["plain"]["samples_ms"]}
    for name, found in cost["drafters"].items():
        samples |= {(name, arm): timed["samples_ms"] for arm, timed in found["arms"].items()}
    turns = len(cost["plain"]["samples_ms"])
    drawn = np.random.default_rng(number).integers(turns, size=(DRAWS, turns))
    return {
        key: Drawn(float(np.median(ms)) / 1000, np.median(np.asarray(ms)[drawn], axis=1) / 1000)
        for key, ms in samples.items()
    }


def _on_device(
    tasks: Mapping[str, Mapping[str, Drawn]], seconds: Mapping[tuple[str, str], Drawn], name: str
) -> tuple[dict[str, Any], Drawn]:
    """A drafter's document on one device, and its mean speed-up over plain decode there."""
    plain = seconds["", PLAIN]
    document: dict[str, Any] = {"tasks": {}}
    best: list[Drawn] = []
    for task, arms in tasks.items():
        speeds = {arm: brought / (plain if arm == PLAIN else seconds[name, arm]) for arm, brought in arms.items()}
        chosen = max(speeds, key=lambda arm: speeds[arm].value)
        best.append(speeds[chosen])
        document["tasks"][task] = {
            "best": chosen,
            "arms": {
                arm: {
                    "tokens_per_round": arms[arm].document,
                    "tokens_per_second": speed.document,
                    "speed_up": (speed * plain).document,
                }
                for arm, speed in speeds.items()
            },
        }
    mean = Drawn(float(np.mean([one.value for one in best])), np.mean([one.draws for one in best], axis=0))
    document["mean"] = {"tokens_per_second": mean.document, "speed_up": (mean * plain).document}
    return document, mean * plain


def _verdict(scores: Mapping[str, Drawn], devices: Sequence[str]) -> dict[str, Any]:
    """Who is ahead, of whom, and whether that is shown."""
    ranking = sorted(scores, key=lambda name: -scores[name].value)
    winner = ranking[0]
    ratios = {name: scores[winner] / scores[name] for name in ranking[1:]}
    score = scores[winner].interval
    words = (
        f"{winner}: {score.value:.2f} [{score.low:.2f}, {score.high:.2f}] times plain decode to expect, mean over "
        f"tasks, {' and '.join(devices)}"
    )
    for name, ratio in ratios.items():
        shown = ratio.interval
        words += (
            f"; ahead of {name} by {percent(shown)}"
            if shown.low > 1
            else f"; not shown to be ahead of {name}: {percent(shown, signed=True)}"
        )
    return {
        "drafter": winner,
        "words": words,
        "ranking": ranking,
        "ahead_of": {name: ratio.document for name, ratio in ratios.items()},
    }


def _geometric(figures: Sequence[Drawn]) -> Drawn:
    root = 1 / len(figures)
    return Drawn(
        float(np.prod([one.value for one in figures]) ** root),
        np.prod([one.draws for one in figures], axis=0) ** root,
    )


def _one() -> Drawn:
    return Drawn(1.0, np.ones(DRAWS))
