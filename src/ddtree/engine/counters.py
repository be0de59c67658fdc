"""What an engine counts, and the frozen numbers that metrics are made of. No tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["PHASES", "ModeCounts", "Snapshot"]

PHASES = ("prefill", "draft", "select", "verify", "walk", "commit")


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
    prompt_tokens, those that were not computed again. finished: requests by finish_reason, and `error`.
    modes: counts by mode. phase_seconds: host seconds by PHASES; on a GPU, work shows where the host waits for it.
    zero_acceptance_rounds: drafting rounds in a row in which no draft was accepted at all; zero_acceptance: whether
    they are so many that something must be wrong with the drafter. since_round_s: seconds since the last round
    began, None while there is nothing to do.
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
