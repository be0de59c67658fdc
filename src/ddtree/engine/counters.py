"""What an engine counts, and the frozen numbers that metrics are made of. No tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ddtree.engine.scheduler import Scheduler
from ddtree.speculation.plan import ALGORITHMS

__all__ = ["PHASES", "ModeCounts", "Snapshot", "Tally"]

PHASES = ("prefill", "draft", "select", "verify", "walk", "commit")
ENDS = ("stop", "length", "cancelled", "error")
# Rounds without a single accepted draft, after which something is wrong with the drafter and not with the text.
ALARM_ROUNDS = 100


@dataclass(frozen=True, slots=True)
class ModeCounts:
    """Rounds of requests in one mode; a round of a batch counts once for each request in it.

    emitted: tokens that rounds added to texts, bonus included. drafted: nodes that were verified, roots not
    counted. accepted: drafted tokens that were emitted. offered_by_depth, accepted_by_depth: place d - 1 says in
    how many rounds something was drafted at depth d, and in how many a token of that depth was emitted.
    """

    rounds: int
    emitted: int
    drafted: int
    accepted: int
    offered_by_depth: tuple[int, ...]
    accepted_by_depth: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An engine in numbers. Counts and seconds run from the engine's beginning.

    running: requests that hold a seat. waiting: accepted, without one. pages_used: held by running requests;
    pages_cached: held by nobody, kept for their content and given up when room is needed. prefix_hit_tokens: of
    prompt_tokens, those that were not computed again. finished: requests by finish_reason, and `error`. modes:
    counts by mode. phase_seconds: host seconds by PHASES; on a GPU, work shows where the host waits for it.
    zero_acceptance_rounds: drafting rounds in a row in which no draft was accepted at all; zero_acceptance:
    whether they are so many that something must be wrong with the drafter. since_round_s: seconds since the last
    round began, None while there is nothing to do.
    """

    running: int
    waiting: int
    pages_total: int
    pages_used: int
    pages_cached: int
    prompt_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    finished: Mapping[str, int]
    modes: Mapping[str, ModeCounts]
    phase_seconds: Mapping[str, float]
    zero_acceptance_rounds: int
    zero_acceptance: bool
    since_round_s: float | None


@dataclass(slots=True)
class _Mode:
    rounds: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    offered_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)

    def frozen(self) -> ModeCounts:
        depths = (tuple(self.offered_by_depth), tuple(self.accepted_by_depth))
        return ModeCounts(self.rounds, self.emitted, self.drafted, self.accepted, *depths)


class Tally:
    """Counts of an engine as they grow."""

    def __init__(self) -> None:
        self.prompt_tokens = self.prefix_hit_tokens = 0
        self.finished = dict.fromkeys(ENDS, 0)
        self.phase_seconds = dict.fromkeys(PHASES, 0.0)
        self.zero_acceptance_rounds = 0
        self._modes = {mode: _Mode() for mode in ALGORITHMS}

    def round(self, mode: str, *, drafted: int, deepest: int, accepted: int, emitted: int) -> None:
        """One request's part in a round. drafted: nodes, none deeper than `deepest`; accepted: of the emitted."""
        counts = self._modes[mode]
        counts.rounds += 1
        counts.emitted += emitted
        counts.drafted += drafted
        counts.accepted += accepted
        missing = deepest - len(counts.offered_by_depth)
        counts.offered_by_depth += [0] * missing
        counts.accepted_by_depth += [0] * missing
        for depth in range(deepest):
            counts.offered_by_depth[depth] += 1
            counts.accepted_by_depth[depth] += depth < accepted
        if drafted:
            self.zero_acceptance_rounds = 0 if accepted else self.zero_acceptance_rounds + 1

    def seconds(self, phases: Mapping[str, float]) -> None:
        for phase, spent_s in phases.items():
            self.phase_seconds[phase] += spent_s

    def snapshot(self, scheduler: Scheduler, since_round_s: float | None) -> Snapshot:
        """These counts, with where the scheduler stands."""
        blocks = scheduler.blocks
        return Snapshot(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages_total=blocks.total,
            pages_used=blocks.held,
            pages_cached=blocks.cached,
            prompt_tokens=self.prompt_tokens,
            prefix_hit_tokens=self.prefix_hit_tokens,
            preemptions=scheduler.preemptions,
            finished=dict(self.finished),
            modes={mode: counts.frozen() for mode, counts in self._modes.items()},
            phase_seconds=dict(self.phase_seconds),
            zero_acceptance_rounds=self.zero_acceptance_rounds,
            zero_acceptance=self.zero_acceptance_rounds >= ALARM_ROUNDS,
            since_round_s=since_round_s,
        )
