"""What a round does: its mode, its width and budget, and who decides that. No tensors.

Code asks a mode for its capabilities, never for its name. A policy gives each round its plan; `FixedPolicy` gives
all of them the same one, and a policy that measures is another implementation of the same protocol.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

from ddtree.errors import ConfigError

__all__ = [
    "ALGORITHMS",
    "LARGEST_BUDGET",
    "PLAIN",
    "Capabilities",
    "FixedPolicy",
    "Policy",
    "RoundPlan",
    "capped",
    "fixed_plan",
    "joint_plan",
]

LARGEST_BUDGET = 255


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a mode needs and does.

    needs_target_features: the target must hand out features of committed rows. drafts_blocks: a block drafter
    proposes before each verification. verifies_trees: rows may branch, so the target needs ancestor masks.
    commits_spine_only: branches are verified and recorded, but only the drafter's chain is committed.
    """

    needs_target_features: bool
    drafts_blocks: bool
    verifies_trees: bool
    commits_spine_only: bool


ALGORITHMS: Mapping[str, Capabilities] = MappingProxyType(
    {
        "off": Capabilities(False, False, False, False),
        "chain": Capabilities(True, True, False, False),
        "tree": Capabilities(True, True, True, False),
        "shadow": Capabilities(True, True, True, True),
    }
)


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """One round: mode, block size (anchor and masks), and node budget (root not counted)."""

    mode: str
    block_size: int
    budget: int

    @property
    def capabilities(self) -> Capabilities:
        return ALGORITHMS[self.mode]

    @property
    def horizon(self) -> int:
        """How many tokens deep a round drafts."""
        return self.block_size - 1 if self.capabilities.drafts_blocks else 0

    @property
    def candidates(self) -> int:
        """How many candidates of each depth a round can use: a chain takes the best alone."""
        return self.budget if self.capabilities.verifies_trees else 1

    @property
    def rows(self) -> int:
        """Rows that the target verifies for each sequence, the root included."""
        if not self.capabilities.verifies_trees:
            return self.horizon + 1
        spine = self.horizon if self.capabilities.commits_spine_only else 0
        return self.budget + 1 + spine

    @property
    def width(self) -> int:
        """Places that a round may write beyond the committed ones, in either cache: the one effective width."""
        return max(self.block_size, self.rows)

    def within(self, tokens_left: int) -> RoundPlan:
        """The plan cut to the tokens that may still come: a round at horizon h commits at most h + 1."""
        horizon = max(min(self.horizon, tokens_left - 1), 0)
        if horizon == self.horizon:
            return self
        if horizon == 0:
            return PLAIN
        return replace(self, block_size=horizon + 1)


# The root alone is verified: plain decoding.
PLAIN = RoundPlan("off", 1, 0)


def fixed_plan(mode: str, block_size: int, budget: int) -> RoundPlan:
    """A checked plan. ConfigError says which value cannot be honoured and what can."""
    if mode not in ALGORITHMS:
        raise ConfigError(f"mode must be one of {', '.join(ALGORITHMS)}: got {mode!r}")
    if not ALGORITHMS[mode].drafts_blocks:
        return replace(PLAIN, mode=mode)
    for name, value in (("block size", block_size), ("budget", budget)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{name} must be a whole number: got {value!r}")
    if not 2 <= block_size <= LARGEST_BUDGET + 1:
        raise ConfigError(f"block size must lie between 2 and {LARGEST_BUDGET + 1}: got {block_size}")
    if not ALGORITHMS[mode].verifies_trees:
        return RoundPlan(mode, block_size, block_size - 1)
    if not 1 <= budget <= LARGEST_BUDGET:
        raise ConfigError(
            f"budget must lie between 1 and {LARGEST_BUDGET} nodes: got {budget}; "
            "to decode without drafts use mode off"
        )
    return RoundPlan(mode, block_size, budget)


# What a cap on the mode means: each does less than the next.
BY_AMBITION = ("off", "chain", "shadow", "tree")


def capped(plan: RoundPlan, mode: str | None, budget: int | None) -> RoundPlan:
    """The plan under a request's own caps; None leaves it. ConfigError when a cap cannot be one."""
    if mode is not None and mode not in ALGORITHMS:
        raise ConfigError(f"mode must be one of {', '.join(ALGORITHMS)}: got {mode!r}")
    lowest = min(plan.mode, mode or plan.mode, key=BY_AMBITION.index)
    if not ALGORITHMS[lowest].drafts_blocks:
        return PLAIN
    fixed = fixed_plan("tree", plan.block_size, LARGEST_BUDGET if budget is None else budget)
    return fixed_plan(lowest, plan.block_size, min(plan.budget, fixed.budget))


def joint_plan(plans: Sequence[RoundPlan]) -> RoundPlan:
    """The narrowest plan that is wide enough for a round of all these: one drafter pass, one verification."""
    if all(plan == plans[0] for plan in plans):
        return plans[0]
    drafting = [plan for plan in plans if plan.horizon]
    block_size = max(plan.block_size for plan in drafting)
    trees = [plan for plan in drafting if plan.capabilities.verifies_trees]
    if not trees:
        return RoundPlan("chain", block_size, block_size - 1)
    mode = "shadow" if any(plan.capabilities.commits_spine_only for plan in trees) else "tree"
    chains = [plan.horizon for plan in drafting if not plan.capabilities.verifies_trees]
    return RoundPlan(mode, block_size, max(*chains, *(plan.budget for plan in trees), 1))


class Policy(Protocol):
    """Chooses the plan of each round from what earlier rounds committed."""

    @property
    def may_draft(self) -> bool:
        """Whether any of its plans needs target features: the drafter's context is then kept in all rounds."""
        ...

    def plan(self) -> RoundPlan:
        """The plan of the next round."""
        ...

    def observe(self, plan: RoundPlan, committed: int) -> None:
        """Learn that a round of that plan committed so many tokens."""
        ...


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """The same plan for every round."""

    fixed: RoundPlan

    @property
    def may_draft(self) -> bool:
        return self.fixed.capabilities.needs_target_features

    def plan(self) -> RoundPlan:
        return self.fixed

    def observe(self, plan: RoundPlan, committed: int) -> None:
        """Nothing is learned."""
