"""Acceptance of a drafter on known continuations: teacher-forced, exact for greedy and for seeded decoding.

At every anchor of an answer the drafter's block and tree are built, and the answer itself says how far each would
have been accepted. Walking from the first answer token to the last by those steps gives the rounds that decoding
would have taken, so one pass serves the chain and any number of trees: the first n nodes of a best-first tree are
the best tree of n nodes, and one walk through the largest holds all that are built from the same candidates.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.models.block import draft_along
from ddtree.models.load import LoadedDrafter
from ddtree.ops import reference_ops
from ddtree.speculation.rescoring import EDGE_CANDIDATES, edge_count
from ddtree.tree import (
    Candidates,
    DraftTree,
    accept,
    best_chain,
    build_tree,
    cut,
    edge_candidates,
    factorised_candidates,
    spine_tree,
)

__all__ = [
    "Acceptance",
    "Steps",
    "accepted_steps",
    "hidden_after",
    "labels_after",
    "measure_example",
    "offer",
    "rank_tokens",
    "sharing",
    "steps_by_budget",
    "walk_rounds",
]


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


@dataclass(frozen=True, slots=True)
class Steps:
    """What a round at each of A anchors would do with one budget.

    committed_A: int64, accepted nodes and the bonus. drafted_A: int64, nodes offered, root not counted.
    expected_A: float32, what the drafter expects to be committed: the path probabilities of all nodes, root (1)
    included.
    """

    committed_A: Tensor
    drafted_A: Tensor
    expected_A: Tensor


def steps_by_budget(
    candidates: Candidates, labels_AD: Tensor, budgets: Collection[int | None]
) -> dict[int | None, Steps]:
    """Steps for each budget (None: the chain), all from the same candidates.

    labels_AD: what the target says at each depth; -1, past the end, is never accepted.
    """
    anchors_A = torch.zeros_like(labels_AD[:, 0])
    # A node on the answer's own path is judged by the answer's next token; no other node can be accepted.
    padded_AP = torch.cat([labels_AD, labels_AD.new_full((labels_AD.shape[0], 1), -1)], dim=1)
    found: dict[int | None, Steps] = {}
    if None in budgets:
        spine = spine_tree(anchors_A, *best_chain(candidates))
        found |= _cuts(spine, padded_AP, {None: spine.rows})
    sizes: dict[int | None, int] = {budget: budget + 1 for budget in budgets if budget is not None}
    if sizes:
        found |= _cuts(build_tree(candidates, anchors_A, max(sizes.values()) - 1), padded_AP, sizes)
    return found


def _cuts(tree: DraftTree, labels_AP: Tensor, sizes: Mapping[int | None, int]) -> dict[int | None, Steps]:
    """Steps of the first nodes of each tree: `sizes` of them, root included."""
    accepted = accept(tree, labels_AP.gather(1, tree.depths_RN))
    expected_AN = tree.scores_RN.exp().cumsum(dim=1)
    node_N = torch.arange(tree.rows, device=tree.tokens_RN.device)
    found: dict[int | None, Steps] = {}
    for budget, size in sizes.items():
        among_AN = (node_N < size).expand_as(tree.tokens_RN)
        found[budget] = Steps(
            committed_A=cut(tree, accepted, among_AN).lengths_R,
            drafted_A=tree.sizes_R.clamp(max=size) - 1,
            expected_A=expected_AN[:, min(size, tree.rows) - 1],
        )
    return found


def accepted_steps(candidates: Candidates, labels_AD: Tensor, budget: int | None) -> Tensor:
    """How many tokens a round at each anchor commits (accepted nodes and the bonus). int64 [A].

    candidates: the drafter's. labels_AD: what the target says at each depth; -1 past the end is never accepted.
    budget None is the chain.
    """
    return steps_by_budget(candidates, labels_AD, (budget,))[budget].committed_A


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
    depth = drafter.model.spec.block_size - 1
    steps: dict[int | None, list[int]] = {budget: [] for budget in budgets}
    anchors = torch.arange(prompt, tokens_T.numel() - 1, device=tokens_T.device)
    for anchors_A in anchors.split(anchors_per_pass):
        sizes_A = torch.full_like(anchors_A, depth + 1)
        hidden_ADh = hidden_after(drafter, tokens_T, features_TF, anchors_A, sizes_A)
        labels_AD = labels_after(tokens_T, anchors_A, depth)
        ranked = rank_tokens(drafter, hidden_ADh, max(budget or 1 for budget in budgets))
        for group in sharing(budgets, drafter.edges is not None):
            count = max(budget or 1 for budget in group)
            candidates = offer(drafter, ranked, hidden_ADh, tokens_T[anchors_A], count)
            for budget, found in steps_by_budget(candidates, labels_AD, group).items():
                steps[budget] += found.committed_A.tolist()
    return {budget: walk_rounds(taken) for budget, taken in steps.items()}


def sharing(budgets: Collection[int | None], with_edges: bool) -> list[Sequence[int | None]]:
    """Budgets in groups that are built from the same candidates.

    Edges choose among as many candidates as there are nodes, but at least `EDGE_CANDIDATES`, and what one of
    them is worth depends on the others; without edges more candidates never change what fewer would have given.
    """
    if not with_edges:
        return [tuple(budgets)]
    few = [budget for budget in budgets if (budget or 1) <= EDGE_CANDIDATES]
    many = [(budget,) for budget in budgets if (budget or 1) > EDGE_CANDIDATES]
    return [few, *many] if few else list(many)


def hidden_after(
    drafter: LoadedDrafter, tokens_T: Tensor, features_TF: Tensor, anchors_A: Tensor, sizes_A: Tensor
) -> Tensor:
    """The drafter's hidden states of the masked positions. sizes_A: as in `draft_along`. [A, D, h]."""
    return draft_along(drafter.model, drafter.vocabulary, tokens_T, features_TF, anchors_A, sizes_A)[:, 1:]


def labels_after(tokens_T: Tensor, anchors_A: Tensor, depth: int) -> Tensor:
    """What the answer says at each depth after each anchor; -1 past its end. int64 [A, depth]."""
    place_AD = anchors_A[:, None] + 1 + torch.arange(depth, device=anchors_A.device)
    last = tokens_T.numel() - 1
    return torch.where(place_AD <= last, tokens_T[place_AD.clamp(max=last)], -1)


def rank_tokens(drafter: LoadedDrafter, hidden_ADh: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best tokens of each masked position and their log-probabilities, [A, D, K] each: at least `count`, or as
    many as the edges choose among."""
    logits_ADV = drafter.vocabulary.logits(hidden_ADh.to(drafter.vocabulary.head.dtype))
    log_probs_ADK, columns_ADK = reference_ops().top_log_probs(logits_ADV, edge_count(count))
    return drafter.vocabulary.tokens(columns_ADK), log_probs_ADK


def offer(
    drafter: LoadedDrafter,
    ranked: tuple[Tensor, Tensor],
    hidden_ADh: Tensor,
    anchors_A: Tensor,
    count: int,
    sharpness: float = 1.0,
) -> Candidates:
    """What a round that wants `count` candidates would build its tree from. ranked: as `rank_tokens` has it.

    anchors_A: their tokens. sharpness: what the drafter's log-probabilities were multiplied by to become scores.
    """
    if drafter.edges is None:
        return factorised_candidates(*(column[..., :count] for column in ranked))
    tokens_ADK, log_probs_ADK = (column[..., : edge_count(count)] for column in ranked)
    edges_ADKK = drafter.edges(anchors_A, tokens_ADK, hidden_ADh) * sharpness
    return edge_candidates(tokens_ADK, log_probs_ADK, edges_ADKK)
