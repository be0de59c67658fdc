"""The drafter's own chain, the spine: as a tree by itself, inside a tree, and joined to one.

Best-first trees may drop part of the spine at any budget. Where the chain must be inside, as when a tree is
compared with the chain it came from, the tree is joined with the spine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.tree.candidates import Candidates
from ddtree.tree.structure import DraftTree

__all__ = ["best_chain", "spine_nodes", "spine_tree", "with_spine"]


def spine_tree(anchors_R: Tensor, tokens_RD: Tensor, log_probs_RD: Tensor) -> DraftTree:
    """The drafter's chain as a tree: every node has one child. A tree that is a spine is the chain.

    anchors_R: int64. tokens_RD: int64, one token for each depth. log_probs_RD: their log-probabilities; the chain
    ends before the first that is -inf.
    """
    sequences, depth = tokens_RD.shape
    device = tokens_RD.device
    places_P = torch.arange(depth + 1, device=device)
    # Added one by one in float32, as a tree's scores are.
    scores = [torch.zeros(sequences, dtype=torch.float32, device=device)]
    for place in range(depth):
        scores.append(scores[-1] + log_probs_RD[:, place].float())
    scores_RN = torch.stack(scores, dim=1)
    real_RN = scores_RN > -torch.inf
    return DraftTree(
        tokens_RN=torch.where(real_RN, torch.cat([anchors_R[:, None], tokens_RD], dim=1), 0),
        parents_RN=torch.where(real_RN, (places_P - 1).clamp(min=0), 0),
        depths_RN=torch.where(real_RN, places_P, 0),
        scores_RN=scores_RN,
        sizes_R=real_RN.sum(dim=1),
        horizon=depth,
    )


def best_chain(candidates: Candidates) -> tuple[Tensor, Tensor]:
    """The best candidate of each depth after the best of the depth before: tokens_RD, log_probs_RD."""
    state_R1 = candidates.tokens_RDSK.new_zeros(candidates.tokens_RDSK.shape[0], 1)
    tokens, log_probs = [state_R1[:, :0]], [candidates.log_probs_RDSK.new_zeros(state_R1.shape[0], 0)]
    for depth in range(candidates.depth):
        tokens.append(candidates.tokens_RDSK[:, depth, :, 0].gather(1, state_R1))
        log_probs.append(candidates.log_probs_RDSK[:, depth, :, 0].gather(1, state_R1))
        state_R1 = candidates.states_RDSK[:, depth, :, 0].gather(1, state_R1)
    return torch.cat(tokens, dim=1), torch.cat(log_probs, dim=1)


def with_spine(tree: DraftTree, candidates: Candidates) -> DraftTree:
    """The tree joined with the drafter's chain: missing spine nodes are appended, deepest last.

    The result has `horizon` more rows. Its first `tree.sizes_R[r]` nodes are the tree as it was.
    """
    sequences, rows = tree.tokens_RN.shape
    device = tree.tokens_RN.device
    chain_tokens_RD, chain_scores_RD = best_chain(candidates)
    sizes_R, last_R = tree.sizes_R, torch.zeros_like(tree.sizes_R)
    grown = [
        torch.cat([a_RN, torch.full((sequences, tree.horizon), fill, dtype=a_RN.dtype, device=device)], dim=1)
        for a_RN, fill in (
            (tree.tokens_RN, 0),
            (tree.parents_RN, 0),
            (tree.depths_RN, 0),
            (tree.scores_RN, -torch.inf),
        )
    ]
    tokens_RM, parents_RM, depths_RM, scores_RM = grown
    slot_M = torch.arange(rows + tree.horizon, device=device)
    running_R = torch.zeros(sequences, dtype=torch.float32, device=device)
    for depth in range(candidates.depth):
        running_R = running_R + chain_scores_RD[:, depth]
        real_RM = slot_M[None] < sizes_R[:, None]
        same_RM = real_RM & (parents_RM == last_R[:, None]) & (tokens_RM == chain_tokens_RD[:, depth, None])
        same_RM[:, 0] = False
        # A depth without a candidate ends the chain of that sequence, as it ends the tree.
        missing_R = ~same_RM.any(dim=1) & (running_R > -torch.inf)
        new_RM = missing_R[:, None] & (slot_M[None] == sizes_R[:, None])
        tokens_RM = torch.where(new_RM, chain_tokens_RD[:, depth, None], tokens_RM)
        parents_RM = torch.where(new_RM, last_R[:, None], parents_RM)
        depths_RM = torch.where(new_RM, depth + 1, depths_RM)
        scores_RM = torch.where(new_RM, running_R[:, None], scores_RM)
        found_R = (same_RM | new_RM).int().argmax(dim=1)
        last_R = torch.where((same_RM | new_RM).any(dim=1), found_R, last_R)
        sizes_R = sizes_R + missing_R
    return DraftTree(tokens_RM, parents_RM, depths_RM, scores_RM, sizes_R, tree.horizon)


def spine_nodes(tree: DraftTree, candidates: Candidates) -> Tensor:
    """Which nodes of the tree lie on the drafter's chain, the root included. bool [R, N]."""
    chain_tokens_RD, _ = best_chain(candidates)
    padded_RP = torch.cat([tree.tokens_RN[:, :1], chain_tokens_RD], dim=1)
    expected_RN = padded_RP.gather(1, tree.depths_RN)
    on_RN = (tree.tokens_RN == expected_RN) & tree.real_RN
    jump_RN, reach = tree.parents_RN, 1
    while reach <= tree.horizon:
        on_RN = on_RN & on_RN.gather(1, jump_RN)
        jump_RN = jump_RN.gather(1, jump_RN)
        reach *= 2
    return on_RN
