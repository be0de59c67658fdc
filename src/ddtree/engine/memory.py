"""What an engine will need, before it serves: weights, pages, and the logits of the widest round. No tensors.

What does not fit is made smaller here, with a note, rather than running out of memory later: first the tree
budget, then the sequences at once, then the pages. One whole sequence must fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ddtree.errors import ConfigError
from ddtree.speculation.plan import LARGEST_BUDGET, RoundPlan

__all__ = ["GIB", "Footprint", "MemoryPlan", "most_places", "plan_memory"]

GIB = 2**30


def most_places(max_context: int, block_size: int) -> int:
    """Places that one sequence may use: its context, and the widest round behind it that any plan may ask for, a
    tree joined with its spine."""
    return max_context + LARGEST_BUDGET + 1 + block_size


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of a target and its drafter. weights; place: keys and values of one position in both caches;
    logits_row: one row over the vocabulary while a token is chosen; prefill_row: one row of a prefill pass."""

    weights: int
    place: int
    logits_row: int
    prefill_row: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes, and what they buy. available: for pages and passes, once the weights are loaded. plan: of rounds.
    sequences: decoded at once. notes: what had to be made smaller, and why."""

    available: int
    weights: int
    logits: int
    prefill: int
    page: int
    pages: int
    page_size: int
    sequences: int
    plan: RoundPlan
    notes: tuple[str, ...] = ()

    @property
    def cache(self) -> int:
        """Bytes of all pages."""
        return self.pages * self.page

    def lines(self) -> dict[str, str]:
        """For people."""
        return {
            "weights": _gib(self.weights),
            "pages": f"{self.pages:,} of {self.page_size} places, {_gib(self.cache)}",
            "logits": f"{_gib(self.logits)} for {self.sequences} x {self.plan.rows} rows",
            "prefill": _gib(self.prefill),
            "free_after": f"{_gib(self.available - self.cache - self.logits - self.prefill)} "
            f"of {_gib(self.available)}",
        } | ({"reduced": "; ".join(self.notes)} if self.notes else {})


def plan_memory(
    footprint: Footprint,
    available: int,
    *,
    plan: RoundPlan,
    sequences: int,
    places: int,
    page_size: int,
    pages: int | None,
    prefill_chunk: int,
) -> MemoryPlan:
    """Fit an engine into `available` bytes. places: the most that one sequence may use. pages: as many as asked
    for, None for a whole context of every sequence. ConfigError when one sequence does not fit."""
    page = footprint.place * page_size
    whole = -(-places // page_size)
    prefill = prefill_chunk * footprint.prefill_row
    notes = []
    if pages is not None and pages < whole:
        raise ConfigError(
            f"{pages} pages of {page_size} places hold less than one sequence of {places} places, rounds "
            f"included; ask for {whole} or more, or for a smaller max_context"
        )
    asked_plan, asked_sequences = plan, sequences
    while _logits(footprint, plan, sequences) + prefill + whole * page > available:
        if plan.capabilities.verifies_trees and plan.budget > 1:
            plan = replace(plan, budget=plan.budget // 2)
        elif sequences > 1:
            sequences //= 2
        else:
            needed = _logits(footprint, plan, sequences) + prefill + whole * page
            raise ConfigError(
                f"one sequence of {places} places needs {_gib(needed)} beyond the weights, and {_gib(available)} "
                "are there; ask for a smaller max_context"
            )
    if plan != asked_plan:
        notes.append(f"tree budget {plan.budget} instead of {asked_plan.budget}: logits of more rows do not fit")
    if sequences != asked_sequences:
        notes.append(f"{sequences} sequences at once instead of {asked_sequences}: their logits do not fit")
    logits = _logits(footprint, plan, sequences)
    wanted = sequences * whole if pages is None else pages
    fitting = (available - logits - prefill) // page
    if fitting < wanted:
        notes.append(f"{fitting:,} pages instead of {wanted:,}: more do not fit")
    return MemoryPlan(
        available=available,
        weights=footprint.weights,
        logits=logits,
        prefill=prefill,
        page=page,
        pages=min(wanted, fitting),
        page_size=page_size,
        sequences=sequences,
        plan=plan,
        notes=tuple(notes),
    )


def _logits(footprint: Footprint, plan: RoundPlan, sequences: int) -> int:
    drafted = plan.horizon
    return sequences * (plan.rows + drafted) * footprint.logits_row


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"
