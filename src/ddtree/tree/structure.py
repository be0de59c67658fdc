"""A batch of draft trees as arrays.

Invariants: node 0 of every tree is its root, the anchor token; a parent stands before its children; the
root is its own parent; nodes at or past `sizes_R[r]` are padding (parent 0, depth 0, token 0, score -inf).
Real nodes are in best-first order, so the first n nodes of a tree are the best tree of n nodes.

Shape letters used throughout the project: R sequences of a batch, N rows or nodes of a sequence, M the rows of
all sequences, D depths, P places on a path (D + 1), K candidates, V vocabulary, W 64-bit words; H query heads,
G key/value heads, d the width of a head, h the hidden width, F features; b block size, A anchors, E examples,
T packed tokens. S, L and C are explained where they stand.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ROW_BUCKETS", "DraftTree", "check_tree", "first_nodes", "row_bucket"]

ROW_BUCKETS = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Draft trees of R sequences, each of at most N nodes, none deeper than `horizon`.

    tokens_RN, parents_RN, depths_RN: int64. scores_RN: float32, the summed log-probability of the path from
    the root. sizes_R: int64, how many nodes are real, root included; 1 is a tree of the root alone.
    """

    tokens_RN: Tensor
    parents_RN: Tensor
    depths_RN: Tensor
    scores_RN: Tensor
    sizes_R: Tensor
    horizon: int

    @property
    def rows(self) -> int:
        """N, the node slots of each tree, padding included."""
        return self.tokens_RN.shape[1]

    @property
    def real_RN(self) -> Tensor:
        """Which node slots hold a node. bool [R, N]."""
        slots = torch.arange(self.rows, device=self.tokens_RN.device)
        return slots[None, :] < self.sizes_R[:, None]


def first_nodes(tree: DraftTree, sizes_R: Tensor) -> DraftTree:
    """The best trees of at most sizes_R nodes, roots included. Rows stay as many as they are."""
    sizes_R = torch.minimum(tree.sizes_R, sizes_R)
    kept_RN = torch.arange(tree.rows, device=sizes_R.device) < sizes_R[:, None]
    return DraftTree(
        tokens_RN=torch.where(kept_RN, tree.tokens_RN, 0),
        parents_RN=torch.where(kept_RN, tree.parents_RN, 0),
        depths_RN=torch.where(kept_RN, tree.depths_RN, 0),
        scores_RN=torch.where(kept_RN, tree.scores_RN, -torch.inf),
        sizes_R=sizes_R,
        horizon=tree.horizon,
    )


def row_bucket(rows: int) -> int:
    """The smallest bucket of rows that holds `rows`; kernels are tuned and captured for buckets only."""
    for bucket in ROW_BUCKETS:
        if rows <= bucket:
            return bucket
    raise ValueError(f"{rows} rows exceed the largest bucket, {ROW_BUCKETS[-1]}")


def check_tree(tree: DraftTree) -> None:
    """Assert every invariant of `DraftTree`. For tests and debugging: it reads the whole tree on the host."""
    for r in range(tree.tokens_RN.shape[0]):
        size = int(tree.sizes_R[r])
        tokens, parents, depths = (a[r].tolist() for a in (tree.tokens_RN, tree.parents_RN, tree.depths_RN))
        assert 1 <= size <= tree.rows
        assert parents[0] == 0
        assert depths[0] == 0
        children: set[tuple[int, int]] = set()
        for node in range(1, size):
            assert 0 <= parents[node] < node, "a parent stands before its children"
            assert depths[node] == depths[parents[node]] + 1
            assert depths[node] <= tree.horizon
            child = (parents[node], tokens[node])
            assert child not in children, "siblings differ in their token"
            children.add(child)
        for node in range(size, tree.rows):
            assert (parents[node], depths[node]) == (0, 0), "padding hangs from the root"
