"""From a drafter's hidden states to ranked candidates, over a vocabulary that may be split among ranks.

Invariant: token ids are global and below the vocabulary's size, and scores have one scale, the log-probability
over the whole vocabulary, however many shards there are: a tree of two shards is the tree of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.ops import Ops

__all__ = ["Shard", "ShardTop", "merge_shards", "shard_top"]


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's slice of the vocabulary: logits of `size` tokens, the first of which has the global id
    `first`."""

    first: int
    size: int


@dataclass(frozen=True, slots=True)
class ShardTop:
    """The best of a shard: scores_MK descending, tokens_MK global ids, and the log-sum-exp of all its scores."""

    scores_MK: Tensor
    tokens_MK: Tensor
    norm_M: Tensor


def shard_top(
    logits_MV: Tensor, shard: Shard, count: int, ops: Ops, adjust: Callable[[Tensor], Tensor] | None = None
) -> ShardTop:
    """The `count` best tokens of one shard. logits_MV: the shard's own columns, padding columns at the end.

    adjust: what makes the score that is used out of the logits: temperature, noise.
    """
    scores_MV = logits_MV[:, : shard.size].float()
    if adjust is not None:
        scores_MV = adjust(scores_MV)
    scores_MV = scores_MV.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    scores_MK, local_MK = ops.ranked(scores_MV, min(count, shard.size))
    return ShardTop(scores_MK, local_MK + shard.first, scores_MV.logsumexp(dim=-1))


def merge_shards(scores_SMK: Tensor, tokens_SMK: Tensor, norm_SM: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best of all shards, in the order of their ids: tokens_MK and log_probs_MK, descending, ties by token id.

    A row without a finite score (a broken drafter) has no candidates: all its log-probabilities are -inf.
    """
    flat_MC = scores_SMK.transpose(0, 1).flatten(1)
    ids_MC = tokens_SMK.transpose(0, 1).flatten(1)
    ranked_MC, order_MC = flat_MC.sort(dim=1, descending=True, stable=True)
    log_probs_MK = ranked_MC[:, :count] - norm_SM.logsumexp(dim=0)[:, None]
    log_probs_MK = log_probs_MK.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    return ids_MC.gather(1, order_MC[:, :count]), log_probs_MK
