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
from ddtree.ops import reference_ops
from ddtree.training.attention import BlockLayout, block_masks, draft_blocks
from ddtree.tree import accept, build_tree, factorised_candidates, spine_tree

__all__ = ["Acceptance", "accepted_steps", "measure_example", "walk_rounds"]


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


def accepted_steps(logits_ADV: Tensor, labels_AD: Tensor, budget: int | None) -> Tensor:
    """How many tokens a round at each anchor commits (accepted nodes and the bonus). int64 [A].

    labels_AD: what the target says at each depth; -1 past the end is never accepted. budget None is the chain.
    """
    top = 1 if budget is None else min(budget, logits_ADV.shape[-1])
    log_probs_ADK, tokens_ADK = reference_ops().top_log_probs(logits_ADV, top)
    anchors_A = torch.zeros(logits_ADV.shape[0], dtype=torch.int64, device=logits_ADV.device)
    if budget is None:
        tree = spine_tree(anchors_A, tokens_ADK[..., 0], log_probs_ADK[..., 0])
    else:
        tree = build_tree(factorised_candidates(tokens_ADK, log_probs_ADK), anchors_A, budget)
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
    model: DFlashModel,
    vocabulary: DraftVocabulary,
    tokens_T: Tensor,
    features_TF: Tensor,
    prompt: int,
    budgets: tuple[int | None, ...],
    anchors_per_pass: int = 128,
) -> dict[int | None, Acceptance]:
    """Acceptance on one example for each budget (None: the chain). prompt: place of the first answer token."""
    block_size = model.spec.block_size
    length, device = tokens_T.numel(), tokens_T.device
    offset_b = torch.arange(block_size, device=device)
    steps: dict[int | None, list[int]] = {budget: [] for budget in budgets}
    anchors = torch.arange(prompt, length - 1, device=device)
    for anchors_A in anchors.split(anchors_per_pass):
        place_AD = anchors_A[:, None] + offset_b[1:]
        labels_AD = torch.where(place_AD < length, tokens_T[place_AD.clamp(max=length - 1)], -1)
        hidden_ADh = _hidden(model, vocabulary, tokens_T, features_TF, anchors_A)[:, 1:]
        logits_ADV = vocabulary.logits(hidden_ADh.to(vocabulary.head.dtype))
        for budget in budgets:
            steps[budget] += accepted_steps(logits_ADV, labels_AD, budget).tolist()
    return {budget: walk_rounds(found) for budget, found in steps.items()}


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
