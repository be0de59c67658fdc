"""From candidates to the rows that are verified, all requests at once and on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ddtree.ops.select import Builder
from ddtree.speculation.plan import RoundPlan
from ddtree.tree import (
    Accepted,
    Candidates,
    DraftTree,
    accept,
    best_chain,
    build_tree,
    spine_nodes,
    spine_tree,
    with_spine,
)

__all__ = ["Drafted", "child_links", "plain_rows", "plant"]


@dataclass(frozen=True, slots=True)
class Drafted:
    """The trees of a round. core_RN: nodes that the budget paid for; spine_RN: nodes of the drafter's own
    chain."""

    tree: DraftTree
    core_RN: Tensor
    spine_RN: Tensor

    def walk(self, choices_RN: Tensor) -> Accepted:
        """The longest path along the target's choices."""
        return accept(self.tree, choices_RN)


def plain_rows(anchors_R: Tensor) -> Drafted:
    """The root alone: plain decoding."""
    nothing_RD = anchors_R[:, None][:, :0]
    root = spine_tree(anchors_R, nothing_RD, nothing_RD.float())
    return Drafted(root, root.real_RN, root.real_RN)


def plant(
    anchors_R: Tensor, candidates: Candidates, plan: RoundPlan, width: int, build: Builder = build_tree
) -> Drafted:
    """Trees of a plan, padded to the width that graphs were captured for. build: the device's own builder."""
    if not plan.capabilities.verifies_trees:
        chain = _padded(spine_tree(anchors_R, *best_chain(candidates)), width)
        return Drafted(chain, chain.real_RN, chain.real_RN)
    tree = build(candidates, anchors_R, plan.budget)
    if not plan.capabilities.commits_spine_only:
        tree = _padded(tree, width)
        return Drafted(tree, tree.real_RN, tree.real_RN)
    core = tree.sizes_R
    tree = _padded(with_spine(tree, candidates), width)
    core_RN = torch.arange(tree.rows, device=core.device) < core[:, None]
    return Drafted(tree, core_RN, spine_nodes(tree, candidates))


def child_links(tree: DraftTree) -> tuple[Tensor, Tensor]:
    """First child and next sibling of every node, -1 where there is none, as SGLang's grammar walk wants them.

    int64 [R, N] each. Padding nodes have neither, and nobody links to them.
    """
    rows = tree.rows
    place_N = torch.arange(rows, device=tree.parents_RN.device)
    real_RN = tree.real_RN & (place_N > 0)
    child_RNN = (tree.parents_RN[:, None, :] == place_N[None, :, None]) & real_RN[:, None, :]
    first_RN = torch.where(child_RNN, place_N, rows).amin(dim=2)
    same_RNN = (tree.parents_RN[:, :, None] == tree.parents_RN[:, None, :]) & real_RN[:, None, :]
    later_RNN = same_RNN & (place_N[None, None, :] > place_N[None, :, None]) & real_RN[:, :, None]
    next_RN = torch.where(later_RNN, place_N, rows).amin(dim=2)
    return first_RN.masked_fill(first_RN == rows, -1), next_RN.masked_fill(next_RN == rows, -1)


def _padded(tree: DraftTree, width: int) -> DraftTree:
    """The same trees with padding nodes up to `width` rows."""
    spare = width - tree.rows
    assert spare >= 0, "a plan's rows fit its width"
    if spare == 0:
        return tree
    tokens_RN, parents_RN, depths_RN = (
        F.pad(a_RN, (0, spare)) for a_RN in (tree.tokens_RN, tree.parents_RN, tree.depths_RN)
    )
    scores_RN = F.pad(tree.scores_RN, (0, spare), value=-torch.inf)
    return replace(tree, tokens_RN=tokens_RN, parents_RN=parents_RN, depths_RN=depths_RN, scores_RN=scores_RN)
