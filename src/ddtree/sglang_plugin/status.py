"""What DDTREE tells the operator: what it runs and why, and how much is accepted. Reads nothing from the
device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ddtree.sglang_plugin.settings import Settings

__all__ = ["ALARM_ROUNDS", "Status"]

ALARM_ROUNDS = 256  # rounds without one accepted draft, over all requests, that cannot be chance


class Status:
    """Counts of one worker since it started."""

    def __init__(self, settings: Settings, edges: bool = False) -> None:
        """edges: whether drafts are rescored by the drafter's edge correction."""
        self._settings = settings
        self._edges = edges
        self._accepted: Counter[int] = Counter()
        self._fruitless = 0

    def observe(self, accepted_drafts: Sequence[int]) -> str | None:
        """Count one round of each request. Returns a warning when nothing has been accepted for suspiciously
        long."""
        self._accepted.update(accepted_drafts)
        if not self._settings.plan.capabilities.drafts_blocks:
            return None
        before = self._fruitless
        self._fruitless = 0 if any(accepted_drafts) else before + len(accepted_drafts)
        if before < ALARM_ROUNDS <= self._fruitless:
            return (
                f"no draft was accepted in {self._fruitless} rounds: the drafter does not fit the target, its "
                "context "
                "features are wrong, or the prompts differ from what it was trained on; see the troubleshooting "
                "guide"
            )
        return None

    def describe(self) -> dict[str, Any]:
        """For `/server_info`. acceptance_length: tokens committed a round, bonus included; None before the
        first."""
        rounds = sum(self._accepted.values())
        plan = self._settings.plan
        return {
            "mode": self._settings.mode,
            "block_size": self._settings.block_size,
            "budget": plan.budget if plan.capabilities.verifies_trees else None,
            "rows": self._settings.width,
            "coupling": self._settings.coupling,
            "edges": self._edges,
            "hybrid_target": self._settings.hybrid,
            "notices": list(self._settings.notices),
            "rounds": rounds,
            "acceptance_length": 1 + self._sum() / rounds if rounds else None,
            "accepted_drafts": {str(n): self._accepted[n] for n in sorted(self._accepted)},
        }

    def _sum(self) -> int:
        return sum(n * count for n, count in self._accepted.items())
