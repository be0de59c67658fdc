"""What benchmarks share: prompts, medians with paired intervals, a sign test, and result files."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ddtree.data.prompts import read_prompts
from ddtree.provenance import provenance

PROMPTS = Path(__file__).resolve().parent / "prompts"


def load_prompts(name: str, limit: int) -> list[str]:
    """The first prompts of a set, by the name of its file. 0 takes all."""
    prompts, _ = read_prompts(PROMPTS / f"{name}.jsonl")
    texts = [prompt.text for prompt in prompts]
    return texts[:limit] if limit else texts


def interval(
    samples: Sequence[Any], statistic: Callable[[Sequence[Any]], float], draws: int = 2000, seed: int = 0
) -> dict[str, float]:
    """A statistic with its 95 % bootstrap interval. Samples are resampled whole, so pairs stay pairs."""
    source = random.Random(seed)
    found = sorted(statistic(source.choices(samples, k=len(samples))) for _ in range(draws))
    return {
        "value": statistic(samples),
        "low": found[int(0.025 * draws)],
        "high": found[int(0.975 * draws) - 1],
    }


def median_ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """The median of a / b over paired samples."""
    return statistics.median(a / b for a, b in pairs)


def sign_test(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """How often a beat b, and the two-sided probability of that under a fair coin."""
    wins, losses = sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)
    trials, least = wins + losses, min(wins, losses)
    tail = sum(math.comb(trials, k) for k in range(least + 1)) / 2**trials if trials else 0.5
    return {"wins": wins, "losses": losses, "p": min(1.0, 2 * tail)}


def write_result(path: Path, content: dict[str, Any]) -> None:
    """Write a result with its provenance; whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(content | {"provenance": provenance()}, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
    print(f"written to {path}")
