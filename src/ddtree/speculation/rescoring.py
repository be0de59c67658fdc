"""From ranked tokens to candidates where a drafter has an edge correction: the same in every engine that drafts.

Invariant: an edge is a difference of log-probabilities, so it is multiplied by whatever they were multiplied by on
their way into a score, temperature and coupling included.
"""

from __future__ import annotations

from torch import Tensor

from ddtree.tree import Candidates, edge_candidates

__all__ = ["EDGE_CANDIDATES", "edge_count", "rescored"]

# Candidates of a position that edges choose among, even where only one is drafted.
EDGE_CANDIDATES = 16


def edge_count(count: int) -> int:
    """How many tokens to rank for a round that wants `count` candidates of a position."""
    return max(count, EDGE_CANDIDATES)


def rescored(tokens_RDK: Tensor, scores_RDK: Tensor, edges_RDKK: Tensor, sharpness_R: Tensor) -> Candidates:
    """Ranked tokens scored anew for each parent. edges_RDKK: as the drafter gives them; sharpness_R: float32, what
    its log-probabilities were multiplied by to become scores_RDK."""
    return edge_candidates(tokens_RDK, scores_RDK, edges_RDKK * sharpness_R[:, None, None, None])
