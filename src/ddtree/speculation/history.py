"""What choices depend on beyond the logits, for sequences that are decoded together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from ddtree.speculation.penalties import TokenCounts

__all__ = ["History", "joined_histories"]


@dataclass(frozen=True, slots=True)
class History:
    """Token counts (where a request has penalties), and the grammar state of each sequence (where it has a
    constraint)."""

    counts: TokenCounts | None
    grammar: tuple[Hashable, ...]

    def of(self, r: int) -> History:
        """The history of one of the sequences."""
        counts = self.counts
        if counts is not None:
            counts = TokenCounts(counts.prompt_RV[r : r + 1], counts.output_RV[r : r + 1])
        return History(counts, self.grammar[r : r + 1])


def joined_histories(histories: Sequence[History]) -> History:
    """The history of sequences that are decoded together from now on."""
    grammar = tuple(state for history in histories for state in history.grammar)
    some = next((history.counts for history in histories if history.counts is not None), None)
    if some is None:
        return History(None, grammar)
    nothing = TokenCounts(torch.zeros_like(some.prompt_RV[:1]), torch.zeros_like(some.output_RV[:1]))
    every = [history.counts or nothing for history in histories]
    return History(
        TokenCounts(torch.cat([c.prompt_RV for c in every]), torch.cat([c.output_RV for c in every])), grammar
    )
