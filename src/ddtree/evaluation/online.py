"""Acceptance of the real engine: every arm answers every prompt, and its rounds are recorded.

Slow, and the last word: what is measured offline must equal this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ddtree.engine.request import Completion
from ddtree.evaluation.answers import AnswerRequest
from ddtree.evaluation.arms import Arm, Round, horizon_at
from ddtree.speculation.params import SamplingParams

__all__ = ["Ask", "measure_online"]

# Answers a prompt in an arm, with a record of each round.
Ask = Callable[[Sequence[int], SamplingParams, Arm], Completion]


def measure_online(
    ask: Ask,
    request: AnswerRequest,
    arms: Sequence[Arm],
    block_size: int,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[dict[str, list[tuple[Round, ...]]], list[set[tuple[int, ...]]]]:
    """The rounds of each answer by arm, and for each prompt the different answers that the arms gave."""
    rounds: dict[str, list[tuple[Round, ...]]] = {arm.name: [] for arm in arms}
    answers: list[set[tuple[int, ...]]] = []
    for index, prompt in enumerate(request.prompts):
        params = SamplingParams(
            temperature=request.temperature, seed=request.seed_of(index), max_tokens=request.max_tokens
        )
        told: set[tuple[int, ...]] = set()
        for arm in arms:
            completion = ask(prompt, params, arm)
            told.add(completion.token_ids)
            rounds[arm.name].append(_rounds(completion, arm, len(prompt), block_size, request.max_tokens))
        answers.append(told)
        report(index + 1, len(request.prompts))
    return rounds, answers


def _rounds(completion: Completion, arm: Arm, prompt: int, block_size: int, limit: int) -> tuple[Round, ...]:
    """What each record says; tokens past the end of the answer do not count, in shadow neither."""
    found: list[Round] = []
    said = 1  # the prompt's own pass gave the first token
    for record in completion.records:
        left = len(completion.token_ids) - said
        nodes = len(record.tokens) - 1
        if arm.mode == "shadow":
            # A round too short to draft has no tree: what it emitted is all there was.
            reached = len(record.emitted) if record.would_commit is None else record.would_commit
            nodes = min(nodes, arm.budget)
        else:
            reached = len(record.path)
        found.append(
            Round(
                context=prompt + said - 1,
                committed=min(reached, left),
                accepted=min(reached - 1, left),
                drafted=nodes,
                horizon=horizon_at(block_size, said, limit),
            )
        )
        said += len(record.emitted)
    return tuple(found)
