"""Best-first draft trees under a node budget (DDTree, arXiv 2604.12989: maximise expected acceptance).

The expected number of accepted nodes of a tree is the sum of its nodes' path probabilities, so the best tree
of B nodes holds the B most probable prefixes. Prefixes are ordered by score, descending; ties by depth, then
by the parents' own order, then by rank under the parent. A parent comes before its child in that order, so
the first B prefixes always form a tree.

Two builders give the same arrays: `build_reference`, a heap that is obviously right, and `build_tree`, the
whole batch at once, depth by depth, without a host round trip.
"""

from __future__ import annotations

import heapq
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ddtree.tree.candidates import Candidates
from ddtree.tree.structure import DraftTree

__all__ = ["build_reference", "build_tree"]


def build_tree(candidates: Candidates, anchors_R: Tensor, budget: int) -> DraftTree:
    """The best tree of at most `budget` nodes besides the root, for each sequence. anchors_R: int64.

    Depth by depth it keeps the `budget` best nodes of each depth; a node that is not among them cannot be
    among the `budget` best of all, nor can its descendants. One stable sort over all depths then picks the
    tree. Rows: budget + 1; fewer real nodes when the candidates run out.
    """
    sequences, device = anchors_R.shape[0], anchors_R.device
    root_R1 = torch.zeros(sequences, 1, dtype=torch.int64, device=device)
    scores = [torch.zeros(sequences, 1, dtype=torch.float32, device=device)]
    tokens, parents, depths = [anchors_R[:, None]], [root_R1], [root_R1]
    state_RF = root_R1
    first = 0  # index of the depth's first node among all nodes kept so far
    for depth in range(candidates.depth):
        score_RF = scores[-1]
        level_RSK = (candidates.log_probs_RDSK[:, depth], candidates.tokens_RDSK[:, depth])
        parent_C, rank_C = _pairs(score_RF.shape[1], level_RSK[0].shape, budget, device)
        cell_RC = state_RF[:, parent_C] * level_RSK[0].shape[2] + rank_C
        child_RC = score_RF[:, parent_C] + level_RSK[0].flatten(1).gather(1, cell_RC)
        # Pairs stand in (parent order, rank) order, so a stable sort breaks ties as the order demands.
        child_RC, order_RC = child_RC.sort(dim=1, descending=True, stable=True)
        order_RF = order_RC[:, :budget]
        cell_RF = cell_RC.gather(1, order_RF)
        scores.append(child_RC[:, :budget])
        tokens.append(level_RSK[1].flatten(1).gather(1, cell_RF))
        parents.append(parent_C[order_RF] + first)
        depths.append(torch.full_like(order_RF, depth + 1))
        state_RF = candidates.states_RDSK[:, depth].flatten(1).gather(1, cell_RF)
        first += score_RF.shape[1]
    nodes = (torch.cat(levels, dim=1) for levels in (scores, tokens, parents, depths))
    return _take_best(*nodes, rows=budget + 1, horizon=candidates.depth)


def _take_best(
    score_RM: Tensor, token_RM: Tensor, parent_RM: Tensor, depth_RM: Tensor, *, rows: int, horizon: int
) -> DraftTree:
    """The first `rows` of M nodes in best-first order; levels are concatenated, so ties go by depth."""
    spare = max(rows - score_RM.shape[1], 0)  # candidates may run out before the budget does
    score_RM = F.pad(score_RM, (0, spare), value=-torch.inf)
    token_RM, parent_RM, depth_RM = (F.pad(a_RM, (0, spare)) for a_RM in (token_RM, parent_RM, depth_RM))
    score_RM, order_RM = score_RM.sort(dim=1, descending=True, stable=True)
    place_RM = torch.empty_like(order_RM).scatter_(
        1, order_RM, torch.arange(order_RM.shape[1], device=order_RM.device).expand_as(order_RM)
    )
    order_RN, score_RN = order_RM[:, :rows], score_RM[:, :rows]
    real_RN = score_RN > -torch.inf
    parent_RN = place_RM.gather(1, parent_RM.gather(1, order_RN))
    return DraftTree(
        tokens_RN=torch.where(real_RN, token_RM.gather(1, order_RN), 0),
        parents_RN=torch.where(real_RN, parent_RN, 0),
        depths_RN=torch.where(real_RN, depth_RM.gather(1, order_RN), 0),
        scores_RN=score_RN,
        sizes_R=real_RN.sum(dim=1),
        horizon=horizon,
    )


@lru_cache(maxsize=256)
def _pairs(parents: int, level_shape: torch.Size, budget: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which (parent, rank) children can be among the `budget` best of their depth, parent-major.

    When all parents share one ranking, the pair (i, j), counted from 0, has (i + 1)(j + 1) - 1 pairs that
    come before it whatever the scores, so only the pairs under that hyperbola matter: 304 of 4,096 for a
    budget of 64. With a ranking for each state every pair may matter.
    """
    _, states, ranks = level_shape
    keep = [
        (i, j)
        for i in range(parents)
        for j in range(ranks)
        if j < budget and (states > 1 or (i + 1) * (j + 1) <= budget)
    ]
    pairs_2C = torch.tensor(keep, dtype=torch.int64, device=device).reshape(-1, 2).T
    return pairs_2C[0].contiguous(), pairs_2C[1].contiguous()


def build_reference(candidates: Candidates, anchors_R: Tensor, budget: int) -> DraftTree:
    """The same trees by a heap, one node at a time: the oracle for `build_tree` and for kernels."""
    rows = budget + 1
    trees = [_grow(candidates, r, int(anchors_R[r]), budget) for r in range(anchors_R.shape[0])]

    def column(pick: int, fill: float, dtype: torch.dtype) -> Tensor:
        padded = [[node[pick] for node in nodes] + [fill] * (rows - len(nodes)) for nodes in trees]
        return torch.tensor(padded, dtype=dtype)

    return DraftTree(
        tokens_RN=column(0, 0, torch.int64),
        parents_RN=column(1, 0, torch.int64),
        depths_RN=column(2, 0, torch.int64),
        scores_RN=column(3, -np.inf, torch.float32),
        sizes_R=torch.tensor([len(nodes) for nodes in trees]),
        horizon=candidates.depth,
    )


def _grow(candidates: Candidates, r: int, anchor: int, budget: int) -> list[tuple[int, int, int, float]]:
    """Nodes (token, parent, depth, score) of one tree in best-first order."""
    tokens_DSK, log_probs_DSK, states_DSK = (
        a[r].cpu().numpy() for a in (candidates.tokens_RDSK, candidates.log_probs_RDSK, candidates.states_RDSK)
    )
    nodes: list[tuple[int, int, int, float]] = [(anchor, 0, 0, 0.0)]
    states = [0]
    heap: list[tuple[float, int, int, int]] = []

    def offer(parent: int, rank: int) -> None:
        """Put the child of that rank on the heap, if there is one: smallest key is the best node."""
        depth = nodes[parent][2]
        if depth < candidates.depth and rank < tokens_DSK.shape[2]:
            score = np.float32(nodes[parent][3]) + log_probs_DSK[depth, states[parent], rank]
            if score > -np.inf:
                heapq.heappush(heap, (-float(score), depth + 1, parent, rank))

    offer(0, 0)
    while heap and len(nodes) <= budget:
        negated, depth, parent, rank = heapq.heappop(heap)
        state = states[parent]
        nodes.append((int(tokens_DSK[depth - 1, state, rank]), parent, depth, -negated))
        states.append(int(states_DSK[depth - 1, state, rank]))
        offer(len(nodes) - 1, 0)
        offer(parent, rank + 1)
    return nodes
