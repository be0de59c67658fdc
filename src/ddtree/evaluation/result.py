"""The JSON document of a measurement: one target, one drafter, one temperature, any number of tasks.

docs/reference/json.md describes it; `ddtree compare` and the reports read it back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree.errors import DataError
from ddtree.evaluation.calibration import Calibration
from ddtree.evaluation.metrics import ArmFigures, ContextFigures, Interval, figures
from ddtree.evaluation.offline import Measured

__all__ = ["FIGURES", "TaskFacts", "arms_in", "read_result", "task_document"]

# Keys of a task's document that are not arms.
FIGURES = frozenset({"prompts", "left_out", "answer_tokens", "prompt_hash", "differing_answers", "calibration"})


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """What a task was measured on. prompt_hash: of the rendered prompts. left_out: reasons and counts."""

    prompts: int
    left_out: Mapping[str, int]
    answer_tokens: int
    prompt_hash: str
    differing_answers: int = 0


def task_document(facts: TaskFacts, measured: Measured, sampled: bool) -> dict[str, Any]:
    """One task: its facts, and an entry for each arm. sampled: whether the temperature was above 0."""
    kinds = {True: "coupled", False: "uncoupled"} if sampled else {True: "greedy"}
    document: dict[str, Any] = {
        "prompts": facts.prompts,
        "left_out": dict(facts.left_out),
        "answer_tokens": facts.answer_tokens,
        "prompt_hash": facts.prompt_hash,
        "differing_answers": facts.differing_answers,
    }
    document |= {name: _arm(figures(rounds)) for name, rounds in measured.rounds.items()}
    if measured.calibration:
        document["calibration"] = {
            kinds[coupled]: _calibration(found) for coupled, found in measured.calibration.items()
        }
    return document


def arms_in(task: Mapping[str, Any]) -> list[str]:
    """Names of the arms in a task's document."""
    return [key for key in task if key not in FIGURES]


def read_result(path: Path) -> dict[str, Any]:
    """A document from a file, or from a folder that holds exactly one. DataError says what is wrong with it."""
    if not path.exists():
        raise DataError(f"{path}: neither a result of `ddtree eval` nor its folder is there; check the path")
    if path.is_dir():
        files = sorted(path.glob("eval-*.json"))
        if len(files) != 1:
            names = ", ".join(file.name for file in files) or "none"
            raise DataError(f"{path}: one eval-*.json is needed, found {names}; name the file itself")
        path = files[0]
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path}: no result of `ddtree eval` ({error}); write one with --out or --json") from None
    if isinstance(content, dict) and "runs" in content:
        raise DataError(f"{path}: holds {len(content['runs'])} runs; measure with --out and name one of its files")
    if not isinstance(content, dict) or not isinstance(content.get("tasks"), dict):
        raise DataError(f"{path}: no result of `ddtree eval`: it has no tasks")
    for name, task in content["tasks"].items():
        if not isinstance(task, dict) or "prompt_hash" not in task:
            raise DataError(f"{path}: no result of `ddtree eval`: task {name} does not say which prompts it had")
    return content


def _arm(found: ArmFigures) -> dict[str, Any]:
    return {
        "mean": found.mean.value,
        "interval": _bounds(found.mean),
        "tokens": found.tokens,
        "rounds": found.rounds,
        "drafted": found.drafted,
        "accepted": found.accepted,
        "accepted_of_drafted": found.accepted_of_drafted,
        "expected": found.expected,
        "per_position": [
            {"depth": d.depth, "offered": d.offered, "accepted": d.accepted, "share": d.share}
            for d in found.depths
        ],
        "by_context": [_context(c) for c in found.contexts],
        "per_prompt": [list(pair) for pair in found.per_prompt],
    }


def _context(found: ContextFigures) -> dict[str, Any]:
    return {
        "from": found.first,
        "to": found.last,
        "rounds": found.rounds,
        "mean": found.mean.value,
        "interval": _bounds(found.mean),
    }


def _bounds(found: Interval) -> list[float]:
    return [found.low, found.high]


def _calibration(found: Calibration) -> list[dict[str, Any]]:
    return [
        {
            "depth": d.depth,
            "count": d.count,
            "predicted": d.predicted,
            "observed": d.observed,
            "error": d.error,
            "bins": [list(one) for one in d.bins],
        }
        for d in found.depths()
    ]
