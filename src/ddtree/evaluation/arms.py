"""What is measured: arms (a mode, its budget, coupled or not) and the rounds that each takes through an answer.

Offline and online measurement both end in rounds, and every figure is made from those alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ddtree.errors import ConfigError

__all__ = ["BUDGETS", "LARGEST_MEASURED", "Arm", "Round", "arms_of", "check_budgets", "horizon_at"]

BUDGETS = (4, 8, 16, 32, 64, 128, 256)
# Trees are measured beyond what an engine verifies in one round: the source (arXiv 2604.12989) looks at 1,024.
LARGEST_MEASURED = 1024


@dataclass(frozen=True, slots=True)
class Arm:
    """mode: chain, tree, or shadow (the chain commits, and what the tree would have is recorded). budget: nodes of
    the tree, 0 for the chain. coupled: drafts know the noise that the target draws with; True where greedy."""

    mode: str
    budget: int = 0
    coupled: bool = True

    @property
    def name(self) -> str:
        """`chain`, `tree-64`, `shadow-64`; sampled and uncoupled ones end in `-uncoupled`."""
        size = f"-{self.budget}" if self.budget else ""
        return f"{self.mode}{size}" + ("" if self.coupled else "-uncoupled")


@dataclass(frozen=True, slots=True)
class Round:
    """One round of an answer.

    context: positions before its anchor. committed: tokens that it emitted, bonus included (in shadow: that the
    tree would have). accepted: drafted tokens among the answer's. drafted: nodes offered. horizon: how deep
    it could draft. expected: what the drafter expected to be committed, None where it was not asked.
    """

    context: int
    committed: int
    accepted: int
    drafted: int
    horizon: int
    expected: float | None = None


def arms_of(budgets: Iterable[int], sampled: bool, shadow: bool) -> tuple[Arm, ...]:
    """Chain and trees, each also as shadow where asked for, and all again uncoupled where tokens are sampled."""
    sizes = list(budgets)
    arms = [Arm("chain"), *(Arm("tree", size) for size in sizes)]
    if shadow:
        arms += [Arm("shadow", size) for size in sizes]
    if sampled:
        arms += [Arm(arm.mode, arm.budget, False) for arm in arms]
    return tuple(arms)


def check_budgets(values: Sequence[int], largest: int, why: str) -> tuple[int, ...]:
    """Budgets in order, each once. ConfigError when one cannot be measured; why: what sets the bound."""
    wrong = [value for value in values if not 1 <= value <= largest]
    if wrong:
        raise ConfigError(f"a budget must lie between 1 and {largest} nodes ({why}): got {wrong[0]}")
    if not values:
        raise ConfigError("no budget was given; name some, as in --budget 16,64")
    return tuple(sorted(set(values)))


def horizon_at(block_size: int, said: int, limit: int) -> int:
    """How deep a round may draft when `said` of at most `limit` tokens are out: it must not overrun the limit."""
    return min(block_size, limit - said) - 1
