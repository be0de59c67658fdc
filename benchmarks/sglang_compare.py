"""Greedy answers of an arm against those of plain decoding, for sglang_gpu.py.

Compared is up to the first divergence on each prompt, nothing after it. The control is plain decoding against
itself at another batch size: how far two evaluations of one prefix differ there is rounding. A divergence is
explained by it when the gap between plain's two best log-probabilities there is at most twice the control's
largest difference. An arm is right when all its divergences are explained, its own largest difference is at most
twice the control's, no answer ends where plain's goes on with the same tokens so far or the other way round, and
it has no more divergences for each token than the control, beyond what chance does (95 %).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_arm import Answer

__all__ = ["chance_of_as_many", "compare", "compared"]

CHANCE = 0.05


def compared(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What a result says of the arms: all but their answers, how those compare with plain's, and the verdicts."""
    check_asked(arms)
    reference = read(arms["plain"]["together"])
    results, right = {}, {}
    control = compare(reference, read(arms["plain"]["alone"]))
    bound = 2 * control["largest_difference"]
    if not math.isfinite(bound):
        raise SystemExit("plain decoding's log-probabilities are no numbers, so nothing can be judged by them")
    for name, arm in arms.items():
        results[name] = {key: value for key, value in arm.items() if key not in ("together", "alone")}
        if name == "plain":
            results[name]["control"] = control
            continue
        found = compare(reference, read(arm["together"]))
        counts = (found["divergences"], found["tokens"], control["divergences"], control["tokens"])
        found["unexplained"] = sum(not gap <= bound for gap in found["gaps"])
        found["chance"] = chance_of_as_many(*counts)
        results[name]["against_plain"] = found
        close = found["largest_difference"] <= bound
        whole = found["other_ends"] == 0
        right[name] = found["unexplained"] == 0 and close and whole and found["chance"] > CHANCE
    return {"right": right, "arms": results}


def check_asked(arms: Mapping[str, Mapping[str, Any]]) -> None:
    """SystemExit when arms were not asked for the same, as happens when a run goes on with other options."""
    first = arms["plain"].get("asked")
    for name, arm in arms.items():
        if arm.get("asked") != first:
            raise SystemExit(
                f"{name} was measured with {arm.get('asked')} and plain with {first}: they cannot be compared; "
                "measure again what differs, or choose another --work"
            )


def compare(reference: Sequence[Answer], others: Sequence[Answer]) -> dict[str, Any]:
    """First divergences, plain's gaps there, the largest difference before them, and answers that only end
    elsewhere."""
    tokens, largest, gaps, other_ends = 0, 0.0, [], 0
    for one, other in zip(reference, others, strict=True):
        differs = (i for i, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=False)) if a != b)
        place = next(differs, None)
        end = min(len(one.tokens), len(other.tokens)) if place is None else place
        for a, b in zip(one.log_probs[:end], other.log_probs[:end], strict=True):
            # A NaN is smaller than nothing, and would pass for equal.
            largest = max(largest, math.inf if math.isnan(a - b) else abs(a - b))
        tokens += end
        if place is None:
            other_ends += len(one.tokens) != len(other.tokens)
        else:
            tokens += 1
            gaps.append(one.gaps[place])
    return {
        "tokens": tokens,
        "divergences": len(gaps),
        "per_1000": 1000 * len(gaps) / max(tokens, 1),
        "largest_difference": largest,
        "other_ends": other_ends,
        "gaps": sorted(gaps),
    }


def chance_of_as_many(count: int, tokens: int, control_count: int, control_tokens: int) -> float:
    """How likely it is that an arm diverges at least `count` times when its rate is the control's: the tail of the
    binomial distribution of the divergences of both over their tokens."""
    both = count + control_count
    share = tokens / (tokens + control_tokens)
    return sum(math.comb(both, k) * share**k * (1 - share) ** (both - k) for k in range(count, both + 1))


def read(answers: Sequence[Mapping[str, Any]]) -> list[Answer]:
    return [Answer(**answer) for answer in answers]
