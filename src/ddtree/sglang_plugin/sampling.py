"""What the target says after each node: greedy, sampled with the project's noise, or by SGLang's own sampler.

SGLang filters in its own order, top-k and top-p jointly over the distribution after temperature, then min-p, and
DDTREE must not change what SGLang says, so the same filters stand here. A token is argmax(log p + g), g keyed by
(seed, absolute position of the token being drawn, token id): which rows were verified, and how many, cannot change
what is said. Sampling looks at the rows of the realised path alone, one a depth, because no other row is ever
read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddtree.speculation.noise import gumbel
from ddtree.tree import DraftTree

__all__ = [
    "Draw",
    "SamplingView",
    "coupled",
    "filtered_log_probs",
    "keyed_draw",
    "sharpness",
    "view_of",
    "walk_choices",
]

# Logits of one row a request and the positions before the drawn tokens, to tokens. int64 [R].
Draw = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class SamplingView:
    """The sampling settings of R requests. temperature_R1, top_p_R1, min_p_R1: float; top_k_R1: integer, 1 where
    greedy. filters: which filters any request has."""

    temperature_R1: Tensor
    top_k_R1: Tensor
    top_p_R1: Tensor
    min_p_R1: Tensor
    filters: bool
    all_greedy: bool


def view_of(info: Any) -> SamplingView:
    """SGLang's batch of sampling parameters, as this module reads it."""
    return SamplingView(
        temperature_R1=info.temperatures.view(-1, 1),
        top_k_R1=info.top_ks.view(-1, 1),
        top_p_R1=info.top_ps.view(-1, 1),
        min_p_R1=info.min_ps.view(-1, 1),
        filters=bool(info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling),
        all_greedy=bool(info.is_all_greedy),
    )


def filtered_log_probs(logits_RV: Tensor, view: SamplingView) -> Tensor:
    """Log-probabilities after temperature, with -inf for what SGLang's filters remove. float32 [R, V].

    They are not renormalised: argmax with noise does not see a constant.
    """
    log_probs_RV = (logits_RV.float() / view.temperature_R1).log_softmax(dim=1)
    if not view.filters:
        return log_probs_RV
    ranked_RV, order_RV = log_probs_RV.exp().sort(dim=1, descending=True, stable=True)
    rank_V = torch.arange(ranked_RV.shape[1], device=ranked_RV.device)
    removed_RV = rank_V >= view.top_k_R1
    removed_RV |= (ranked_RV.cumsum(dim=1) - ranked_RV) > view.top_p_R1
    removed_RV |= ranked_RV < ranked_RV[:, :1] * view.min_p_R1
    return log_probs_RV.masked_fill(torch.zeros_like(removed_RV).scatter_(1, order_RV, removed_RV), -torch.inf)


def keyed_draw(view: SamplingView, seeds_R: Tensor) -> Draw:
    """Draws with the project's noise. The token after position p is drawn with the noise of position p + 1."""

    def draw(logits_RV: Tensor, positions_R: Tensor) -> Tensor:
        noise_RV = gumbel(seeds_R, positions_R[:, None] + 1, logits_RV.shape[1])[:, 0]
        return (filtered_log_probs(logits_RV, view).double() + noise_RV).argmax(dim=1)

    return draw


def coupled(scores_RV: Tensor, noise_RV: Tensor | None, view: SamplingView, scale: float) -> Tensor:
    """The score that trees are built from: log q after temperature, and where a request samples with the noise
    that the target will be judged with, over the scale. Rows of greedy requests stay as they are."""
    heated_RV = scores_RV / view.temperature_R1
    if noise_RV is None:
        return heated_RV
    noisy_RV = (heated_RV + noise_RV.to(heated_RV.dtype)) / scale
    return torch.where(view.top_k_R1 <= 1, heated_RV, noisy_RV)


def sharpness(view: SamplingView, scale: float | None) -> Tensor:
    """What a log-probability of the drafter is multiplied by on its way into the score that trees are built from:
    by nothing in an all-greedy batch, else as `coupled` has it. scale: None where no noise is added. [R]."""
    heat_R1 = view.temperature_R1
    if view.all_greedy:
        return torch.ones_like(heat_R1)[:, 0]
    if scale is None:
        return 1 / heat_R1[:, 0]
    return 1 / torch.where(view.top_k_R1 <= 1, heat_R1, heat_R1 * scale)[:, 0]


def walk_choices(tree: DraftTree, logits_RNV: Tensor, prefix_R: Tensor, draw: Draw) -> Tensor:
    """The drawn token after every node of the realised path; 0 after the others. int64 [R, N].

    One draw for each depth, for the whole batch; a request whose path has ended draws on without effect.
    """
    sequences, rows = tree.tokens_RN.shape
    choices_RN = torch.zeros_like(tree.tokens_RN)
    node_R = torch.zeros(sequences, dtype=torch.int64, device=choices_RN.device)
    alive_R = torch.ones(sequences, dtype=torch.bool, device=choices_RN.device)
    place_N = torch.arange(rows, device=choices_RN.device)
    child_RN = tree.real_RN & (place_N > 0)
    for depth in range(tree.horizon + 1):
        row_RV = logits_RNV.gather(1, node_R[:, None, None].expand(-1, 1, logits_RNV.shape[2]))[:, 0]
        token_R = draw(row_RV, prefix_R + depth).to(torch.int64)
        at_RN = (place_N == node_R[:, None]) & alive_R[:, None]
        choices_RN = torch.where(at_RN, token_R[:, None], choices_RN)
        match_RN = child_RN & (tree.parents_RN == node_R[:, None]) & (tree.tokens_RN == token_R[:, None])
        alive_R = alive_R & match_RN.any(dim=1)
        node_R = torch.where(alive_R, match_RN.int().argmax(dim=1), node_R)
    return choices_RN
