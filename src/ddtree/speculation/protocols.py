"""The two parties of a round, as the round sees them.

Neither keeps a length: how far a sequence is committed comes with every call, so nothing of one request can leak
into the next through them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ddtree.tree import Accepted, DraftTree

__all__ = ["Drafter", "Lengths", "Proposal", "Verification", "Verifier"]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Committed positions of R sequences, which is also where their anchors stand.

    device_R: int64. host: the same numbers on the host, as bounds where the device is ahead of it.
    """

    device_R: Tensor
    host: tuple[int, ...]

    @property
    def longest(self) -> int:
        return max(self.host)


@dataclass(frozen=True, slots=True)
class Verification:
    """What the target says of a tree's nodes. logits_RNV; features_RNF has F = 0 when none were asked for."""

    logits_RNV: Tensor
    features_RNF: Tensor


@dataclass(frozen=True, slots=True)
class Proposal:
    """A drafter's guess for the positions of a block. logits_RDV: over the target's vocabulary.

    edges: from candidates tokens_RDK to what each parent adds to each child's log-probability, [R, D, K, K] as
    `tree.edge_candidates` takes it; None when the positions are guessed independently of each other.
    """

    logits_RDV: Tensor
    edges: Callable[[Tensor], Tensor] | None = None


class Drafter(Protocol):
    """Proposes a distribution for each position of the block that follows an anchor."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Target layers whose outputs it wants, in order."""
        ...

    def propose(self, anchors_R: Tensor, lengths: Lengths, block_size: int) -> Proposal:
        """A guess for each of the block's D = block_size - 1 masked positions."""
        ...

    def absorb(self, features_RPF: Tensor, lengths: Lengths, counts_R: Tensor) -> None:
        """Add features of newly committed positions, the first of which is lengths. counts_R: how many count."""
        ...


class Verifier(Protocol):
    """Judges all nodes of a tree in one pass, and keeps what is accepted."""

    def verify(self, tree: DraftTree, lengths: Lengths) -> Verification:
        """Run the tree's rows after the committed positions."""
        ...

    def commit(self, accepted: Accepted, lengths: Lengths) -> None:
        """Move the accepted path to the places that follow the committed ones; the others are free again."""
        ...
