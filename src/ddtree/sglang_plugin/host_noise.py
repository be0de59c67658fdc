"""SGLang's own seeded sampling, for its deterministic mode: what is said there must be what SGLang says without
DDTREE.

SGLang keys its noise by (seed, position of the token before, column). Without filters the column is the token id,
so drafts can be coupled to it; with filters the column is the token's rank in the target's distribution, which a
drafter cannot know."""

from __future__ import annotations

from typing import Any

import torch
from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32
from torch import Tensor

from ddtree.sglang_plugin.sampling import Draw, SamplingView

__all__ = ["host_draw", "host_gumbel"]


def host_draw(sampler: Any, info: Any, view: SamplingView) -> Draw:
    """Draws with SGLang's sampler and the seeds of its batch. `info` is SGLang's batch of sampling parameters."""

    def draw(logits_RV: Tensor, positions_R: Tensor) -> Tensor:
        probs_RV = (logits_RV.float() / view.temperature_R1).softmax(dim=-1)
        tokens_R, _ = sampler._sample_from_probs(probs_RV, info, positions_R, not view.filters)
        return tokens_R

    return draw


def host_gumbel(seeds_R: Tensor, positions_R: Tensor, vocab_size: int) -> Tensor:
    """The noise that SGLang's sampler adds without filters, for the token after each position. float64 [R, V]."""
    columns_V = torch.arange(vocab_size, device=seeds_R.device)
    hashed_RV = murmur_hash32(seeds_R.to(torch.uint64), positions_R, columns_V)
    noise_RV = hashed_RV.to(torch.float64) / torch.iinfo(torch.uint32).max
    noise_RV.log_().clamp_(min=torch.finfo(torch.float64).min, max=-(2.0**-32)).neg_()
    return noise_RV.log_().neg_()
