"""What a drafter offers at each depth: the top candidates of the score that will be used, and their scores.

The distribution of a depth may depend on the parent token (edge correction). It is then given once for each
*state*, the parent's candidate index at its own depth; a factorised drafter has the single state 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Candidates", "edge_candidates", "factorised_candidates"]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Ranked candidates for D depths of R sequences, in S states.

    tokens_RDSK: int64. log_probs_RDSK: float32, descending along K, at most 0; -inf marks "no candidate".
    states_RDSK: int64 below S, the state in which the children of that candidate are scored.
    """

    tokens_RDSK: Tensor
    log_probs_RDSK: Tensor
    states_RDSK: Tensor

    @property
    def depth(self) -> int:
        """D, the draft horizon."""
        return self.tokens_RDSK.shape[1]


def factorised_candidates(tokens_RDK: Tensor, log_probs_RDK: Tensor) -> Candidates:
    """Candidates whose score does not depend on their parent. log_probs_RDK is descending along K."""
    log_probs_RDSK = _proper(log_probs_RDK)[:, :, None]
    tokens_RDSK = tokens_RDK[:, :, None]
    return Candidates(tokens_RDSK, log_probs_RDSK, torch.zeros_like(tokens_RDSK))


def edge_candidates(tokens_RDK: Tensor, log_probs_RDK: Tensor, edges_RDKK: Tensor) -> Candidates:
    """Candidates rescored for each parent: log q(child) + e(parent, child), renormalised.

    edges_RDKK[r, d, i, j] is e for parent candidate i of depth d - 1 and child candidate j of depth d; at
    depth 0 the parent is the anchor and row 0 counts. Mass outside the candidates keeps its probability, so
    the denominator is sum(q exp(e)) + (1 - sum(q)): no child outweighs its parent.
    """
    base_RD1K = _proper(log_probs_RDK)[:, :, None]
    scored_RDKK = base_RD1K + edges_RDKK.float()
    tail_RD11 = (1 - base_RD1K.exp().sum(-1, keepdim=True)).clamp(min=0)
    norm_RDK1 = torch.logaddexp(scored_RDKK.logsumexp(-1, keepdim=True), tail_RD11.log())
    ranked_RDKK, order_RDKK = _proper(scored_RDKK - norm_RDK1).sort(dim=-1, descending=True, stable=True)
    tokens_RDKK = tokens_RDK[:, :, None].expand_as(order_RDKK).gather(-1, order_RDKK)
    return Candidates(tokens_RDKK, ranked_RDKK, order_RDKK)


def _proper(log_probs: Tensor) -> Tensor:
    """Float32 log-probabilities: at most 0 whatever the rounding, and NaN (a broken drafter) never chosen."""
    return log_probs.float().clamp(max=0.0).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
