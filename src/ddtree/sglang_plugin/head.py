"""The target's output head over the drafter's hidden states, with its vocabulary split among tensor-parallel
ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ddtree.errors import UnsupportedError
from ddtree.ops import Ops
from ddtree.sglang_plugin.proposal import Shard, merge_shards, shard_top

__all__ = ["DraftHead"]


class DraftHead:
    """Scores tokens at drafted positions. group: SGLang's tensor-parallel group; draft: the drafter's settings."""

    def __init__(self, lm_head: Any, vocab_size: int, group: Any, draft: Any, ops: Ops) -> None:
        if lm_head is None:
            raise UnsupportedError("the target has no lm_head that a drafter could use; DDTREE cannot serve it")
        self._head = lm_head
        self._group = group
        self._ops = ops
        self._multiplier = float(draft.output_multiplier)
        self._softcap = draft.final_logit_softcapping
        self.shard = _shard(lm_head, vocab_size, group.world_size)
        self.dense = torch.is_floating_point(getattr(lm_head, "weight", torch.empty(0, dtype=torch.int8)))
        if not self.dense and group.world_size > 1:
            raise UnsupportedError(
                "the target's lm_head is quantised, and DDTREE reads such heads on one GPU only; use --tp-size "
                "1, or "
                "a target with an unquantised lm_head"
            )

    def ranked(
        self, hidden_Mh: Tensor, count: int, adjust: Callable[[Tensor], Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """The `count` best tokens of the whole vocabulary, and their log-probabilities. [M, K] each,
        descending."""
        top = shard_top(self._logits(hidden_Mh), self.shard, count, self._ops, adjust)
        parts = (top.scores_MK, top.tokens_MK, top.norm_M)
        scores_SMK, tokens_SMK, norm_SM = (self._gathered(part) for part in parts)
        return merge_shards(scores_SMK, tokens_SMK, norm_SM, count)

    def _logits(self, hidden_Mh: Tensor) -> Tensor:
        """This rank's columns, padding at the end."""
        if self.dense:
            logits_MV = torch.matmul(hidden_Mh.to(self._head.weight.dtype), self._head.weight.T).float()
        else:
            logits_MV = self._head.quant_method.apply(self._head, hidden_Mh, None).float()
        if self._multiplier != 1.0:
            logits_MV = logits_MV * self._multiplier
        if self._softcap is not None:
            logits_MV = (logits_MV / self._softcap).tanh() * self._softcap
        return logits_MV

    def _gathered(self, part: Tensor) -> Tensor:
        """The same part of every rank, in the order of ranks, which is that of token ids. [S, ...]."""
        size = self._group.world_size
        if size == 1:
            return part[None]
        whole = torch.empty(size * part.shape[0], *part.shape[1:], dtype=part.dtype, device=part.device)
        self._group.all_gather_into_tensor(whole, part.contiguous())
        return whole.view(size, *part.shape)


def _shard(lm_head: Any, vocab_size: int, ranks: int) -> Shard:
    """Which token ids this rank's columns stand for. A tied head may be a plain embedding without shard
    metadata."""
    indices = getattr(lm_head, "shard_indices", None)
    if indices is None:
        if ranks > 1:
            raise UnsupportedError(
                "the target's lm_head does not say which tokens this rank holds, so drafts could name wrong "
                "tokens; "
                "use --tp-size 1"
            )
        return Shard(0, vocab_size)
    if int(indices.num_added_elements):
        raise UnsupportedError(
            "the target's lm_head has added vocabulary, whose ids DDTREE does not follow; merge it into the model"
        )
    return Shard(int(indices.org_vocab_start_index), int(indices.num_org_elements))
