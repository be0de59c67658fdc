"""Filters that keep the likely part of a distribution: top-k, then top-p, then min-p.

Each says which tokens it removes, never the best one. The sets are those of Hugging Face's warpers of the same
names, ties at the cut of top-p aside, and a row's set does not depend on the other rows in the call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Filters", "filter_scores"]

HEADS = (512, 4096)  # how many of the best tokens are tried before a whole row is sorted


@dataclass(frozen=True, slots=True)
class Filters:
    """Filters of M rows, [M, 1] each; None where no row has one.

    top_k_M1: int64, 0 is off; largest_k is their maximum, known on the host. top_p_M1, min_p_M1: float64, 1
    and 0 are off.
    """

    top_k_M1: Tensor | None
    largest_k: int
    top_p_M1: Tensor | None
    min_p_M1: Tensor | None


def filter_scores(scores_MV: Tensor, filters: Filters) -> Tensor:
    """The scores with -inf for every token that a filter removes; each sees what the one before has left."""
    if filters.top_k_M1 is None and filters.top_p_M1 is None and filters.min_p_M1 is None:
        return scores_MV
    kept_MV = scores_MV.clone()
    if filters.top_k_M1 is not None:
        kept_MV.masked_fill_(top_k_removes(kept_MV, filters.top_k_M1, filters.largest_k), -torch.inf)
    if filters.top_p_M1 is not None:
        kept_MV.masked_fill_(top_p_removes(kept_MV, filters.top_p_M1), -torch.inf)
    if filters.min_p_M1 is not None:
        kept_MV.masked_fill_(min_p_removes(kept_MV, filters.min_p_M1), -torch.inf)
    return kept_MV


def top_k_removes(scores_MV: Tensor, top_k_M1: Tensor, largest_k: int) -> Tensor:
    """All but the k best tokens and whatever ties with the k-th. bool [M, V]."""
    best_MK = scores_MV.topk(min(largest_k, scores_MV.shape[1]), dim=1).values
    last_M1 = best_MK.gather(1, (top_k_M1 - 1).clamp(0, best_MK.shape[1] - 1))
    return scores_MV < last_M1.masked_fill(top_k_M1 == 0, -torch.inf)


def top_p_removes(scores_MV: Tensor, top_p_M1: Tensor) -> Tensor:
    """All outside the nucleus (arXiv 1904.09751): tokens that, with all less likely ones, hold at most 1 - top_p.

    Of tokens that tie at the cut, those with smaller ids go first. bool [M, V].
    """
    # Off is off: the rule would remove tokens whose probability rounds to 0.
    spare_M1 = torch.where(top_p_M1 < 1, 1 - top_p_M1, -torch.inf).to(scores_MV.dtype)
    # The short way reads results on the host, so it is for CPUs.
    if scores_MV.device.type == "cpu" and scores_MV.shape[1] > HEADS[0]:
        return _outside_nucleus_by_heads(scores_MV, spare_M1)
    return _outside_nucleus(scores_MV, spare_M1)


def min_p_removes(scores_MV: Tensor, min_p_M1: Tensor) -> Tensor:
    """Tokens less than min_p times as likely as the best one (arXiv 2407.01082). bool [M, V]."""
    probs_MV = scores_MV.softmax(dim=1)
    return probs_MV < min_p_M1.to(probs_MV.dtype) * probs_MV.amax(dim=1, keepdim=True)


def _outside_nucleus(scores_MV: Tensor, spare_M1: Tensor) -> Tensor:
    ranked_MV, order_MV = scores_MV.sort(dim=1, stable=True)
    gone_MV = ranked_MV.softmax(dim=1).cumsum(dim=1) <= spare_M1
    gone_MV[:, -1] = False
    return gone_MV.scatter(1, order_MV, gone_MV)


def _outside_nucleus_by_heads(scores_MV: Tensor, spare_M1: Tensor) -> Tensor:
    """The same sets, mostly without the full sort: a row goes on to the next head until one decides it."""
    gone_MV = torch.zeros_like(scores_MV, dtype=torch.bool)
    row_S, scores_SV, spare_S1 = torch.arange(len(scores_MV)), scores_MV, spare_M1
    probs_SV = scores_SV.softmax(dim=1)
    open_S = spare_M1[:, 0] >= 0
    for head in (head for head in HEADS if head < scores_MV.shape[1]):
        if not bool(open_S.all()):
            row_S, scores_SV, probs_SV, spare_S1 = (t[open_S] for t in (row_S, scores_SV, probs_SV, spare_S1))
        kept_SH, order_SH, sure_S = _inside_nucleus(scores_SV, probs_SV, spare_S1, head)
        gone_SV = torch.ones_like(scores_SV, dtype=torch.bool).scatter_(1, order_SH, ~kept_SH)
        gone_MV[row_S[sure_S]] = gone_SV[sure_S]
        open_S = ~sure_S
        if not bool(open_S.any()):
            return gone_MV
    gone_MV[row_S[open_S]] = _outside_nucleus(scores_SV[open_S], spare_S1[open_S])
    return gone_MV


def _inside_nucleus(
    scores_SV: Tensor, probs_SV: Tensor, spare_S1: Tensor, head: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Which of the best `head` tokens are kept [S, H], their ids [S, H], and whether this is certain [S].

    It is when the cut and all that tie with it lie inside the head, and the cut not so close to a step of the
    cumulated mass that summing in another order could move it.
    """
    # Float32 sums of up to 262,144 terms in either order differ by less than 8e-7.
    margin = 2e-6 if scores_SV.dtype == torch.float32 else 1e-12
    head_SH, order_SH = scores_SV.topk(head, dim=1)
    # The softmax of an unsorted row adds small terms to large sums: up to 5e-5 off, too much for the margin.
    probs_SH = probs_SV.gather(1, order_SH).double() / probs_SV.sum(dim=1, keepdim=True)
    # Mass from each token down, less the mass that may go: positive inside the nucleus.
    excess_SH = 1 - (probs_SH.cumsum(dim=1) - probs_SH) - spare_S1
    size_S1 = (excess_SH > 0).sum(dim=1, keepdim=True).clamp(min=1)
    last_S1 = head_SH.gather(1, size_S1 - 1)
    sure_S1 = (excess_SH.abs().amin(dim=1, keepdim=True) > margin) & (head_SH[:, -1:] < last_S1)
    better_SH = head_SH > last_S1
    ties_SH = torch.where(head_SH == last_S1, order_SH, -1)
    place_S1 = size_S1 - better_SH.sum(dim=1, keepdim=True) - 1
    first_tie_S1 = ties_SH.sort(dim=1, descending=True).values.gather(1, place_S1)
    return better_SH | (ties_SH >= first_tie_S1), order_SH, sure_S1[:, 0]
