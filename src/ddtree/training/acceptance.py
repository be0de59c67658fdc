"""Acceptance of a drafter on known continuations: teacher-forced, exact for greedy decoding.

At every anchor of an answer the drafter's block and tree are built, and the answer itself says how far each would
have been accepted. Walking from the first answer token to the last by those steps gives the rounds that decoding
would have taken, so one pass serves the chain and any number of trees.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.models.block import block_tokens
from ddtree.models.dflash import DFlashModel, DraftVocabulary
from ddtree.models.load import LoadedDrafter
from ddtree.ops import reference_ops
from ddtree.speculation.chooser import EDGE_CANDIDATES
from ddtree.training.attention import BlockLayout, block_masks, draft_blocks
from ddtree.tree import (
    Candidates,
    accept,
    best_chain,
    build_tree,
    edge_candidates,
    factorised_candidates,
    spine_tree,
)

__all__ = ["Acceptance", "accepted_steps", "measure_example", "offer", "rank_tokens", "walk_rounds"]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Tokens committed and the rounds they took; their ratio is the acceptance length, bonus included."""

    tokens: int
    rounds: int

    @property
    def length(self) -> float:
        return self.tokens / max(self.rounds, 1)

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(self.tokens + other.tokens, self.rounds + other.rounds)


def accepted_steps(candidates: Candidates, labels_AD: Tensor, budget: int | None) -> Tensor:
    """How many tokens a round at each anchor commits (accepted nodes and the bonus). int64 [A].

    candidates: the drafter's. labels_AD: what the target says at each depth; -1 past the end is never accepted.
    budget None is the chain.
    """
    anchors_A = torch.zeros_like(labels_AD[:, 0])
    if budget is None:
        tree = spine_tree(anchors_A, *best_chain(candidates))
    else:
        tree = build_tree(candidates, anchors_A, budget)
    # A node on the answer's own path is judged by the answer's next token; no other node can be accepted.
    padded_AP = torch.cat([labels_AD, labels_AD.new_full((labels_AD.shape[0], 1), -1)], dim=1)
    return accept(tree, padded_AP.gather(1, tree.depths_RN)).lengths_R


def walk_rounds(steps: list[int]) -> Acceptance:
    """Rounds from the first anchor to the end, given what a round at each anchor commits."""
    place = rounds = 0
    while place < len(steps):
        place += steps[place]
        rounds += 1
    return Acceptance(min(place, len(steps)), rounds)


@torch.no_grad()
def measure_example(
    drafter: LoadedDrafter,
    tokens_T: Tensor,
    features_TF: Tensor,
    prompt: int,
    budgets: tuple[int | None, ...],
    anchors_per_pass: int = 128,
) -> dict[int | None, Acceptance]:
    """Acceptance on one example for each budget (None: the chain). prompt: place of the first answer token."""
    block_size = drafter.model.spec.block_size
    length, device = tokens_T.numel(), tokens_T.device
    offset_b = torch.arange(block_size, device=device)
    steps: dict[int | None, list[int]] = {budget: [] for budget in budgets}
    anchors = torch.arange(prompt, length - 1, device=device)
    for anchors_A in anchors.split(anchors_per_pass):
        place_AD = anchors_A[:, None] + offset_b[1:]
        labels_AD = torch.where(place_AD < length, tokens_T[place_AD.clamp(max=length - 1)], -1)
        hidden_ADh = _hidden(drafter.model, drafter.vocabulary, tokens_T, features_TF, anchors_A)[:, 1:]
        ranked = rank_tokens(drafter, hidden_ADh, max(budget or 1 for budget in budgets))
        for budget in budgets:
            candidates = offer(drafter, ranked, hidden_ADh, tokens_T[anchors_A], budget or 1)
            steps[budget] += accepted_steps(candidates, labels_AD, budget).tolist()
    return {budget: walk_rounds(found) for budget, found in steps.items()}


def rank_tokens(drafter: LoadedDrafter, hidden_ADh: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best tokens of each masked position and their log-probabilities, [A, D, K] each: at least `count`, or as
    many as the edges choose among."""
    logits_ADV = drafter.vocabulary.logits(hidden_ADh.to(drafter.vocabulary.head.dtype))
    log_probs_ADK, columns_ADK = reference_ops().top_log_probs(logits_ADV, max(count, EDGE_CANDIDATES))
    return drafter.vocabulary.tokens(columns_ADK), log_probs_ADK


def offer(
    drafter: LoadedDrafter, ranked: tuple[Tensor, Tensor], hidden_ADh: Tensor, anchors_A: Tensor, count: int
) -> Candidates:
    """What a greedy round that wants `count` candidates would build its tree from. ranked: of `rank_tokens`."""
    if drafter.edges is None:
        return factorised_candidates(*(column[..., :count] for column in ranked))
    tokens_ADK, log_probs_ADK = (column[..., : max(count, EDGE_CANDIDATES)] for column in ranked)
    return edge_candidates(tokens_ADK, log_probs_ADK, drafter.edges(anchors_A, tokens_ADK, hidden_ADh))


def _hidden(
    model: DFlashModel, vocabulary: DraftVocabulary, tokens_T: Tensor, features_TF: Tensor, anchors_A: Tensor
) -> Tensor:
    """Hidden states of one block at each anchor of one example. [A, b, h]."""
    block_size, device = model.spec.block_size, tokens_T.device
    count = anchors_A.numel()
    positions_T = torch.arange(tokens_T.numel(), device=device)
    layout = BlockLayout(positions_T, torch.zeros_like(positions_T), anchors_A, block_size)
    ids_Ab = block_tokens(tokens_T[anchors_A], block_size, model.spec.mask_token_id)
    embedded_Mh = vocabulary.embedding[ids_Ab.flatten()].to(model.dtype)
    positions_M = (anchors_A[:, None] + torch.arange(block_size, device=device)).flatten()
    masks = block_masks(layout, model.spec.views, fused=False)
    hidden_Mh = draft_blocks(model, features_TF, positions_T, embedded_Mh, positions_M, masks)
    return hidden_Mh.view(count, block_size, -1)
