"""Best-first draft trees, one program a sequence: what `tree.build.build_tree` does depth by depth, in one launch.

A program holds the children that wait: the best candidate of each node that is not taken yet, with its score. Each
step takes the best of them, by one minimum over 64-bit keys, and lets its next sibling and its own first child
wait instead. A key orders as the builders order: score, then depth, parent, rank. Scores are summed root to leaf
in float32, as there, so the trees are the same to the bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ddtree.tree import Candidates, DraftTree
from ddtree.tree import build_tree as build_in_torch

__all__ = ["build_tree"]

# How many the fields of a key can tell apart; together they fill the 31 bits below the score's.
LEVELS, NODES, RANKS = tl.constexpr(1 << 7), tl.constexpr(1 << 12), tl.constexpr(1 << 12)
NO_SCORE = tl.constexpr(0x7F800000)  # the bits of |-inf|: nothing waits there
FEWEST_SLOTS = 16


def build_tree(candidates: Candidates, anchors_R: Tensor, budget: int) -> DraftTree:
    """As `tree.build.build_tree`, on a device. Trees that the keys cannot hold are built by that."""
    sequences, levels, states, ranks = candidates.log_probs_RDSK.shape
    assert anchors_R.shape == (sequences,), "one anchor for each sequence"
    anchors_R = anchors_R.long()  # what the tree's numbers are made of
    held = levels <= LEVELS.value and ranks <= RANKS.value and budget < NODES.value
    if not held or levels * ranks == 0 or candidates.log_probs_RDSK.dtype != torch.float32:
        return build_in_torch(candidates, anchors_R, budget)
    tree = DraftTree(
        tokens_RN=anchors_R.new_empty(sequences, budget + 1),
        parents_RN=anchors_R.new_empty(sequences, budget + 1),
        depths_RN=anchors_R.new_empty(sequences, budget + 1),
        scores_RN=anchors_R.new_empty(sequences, budget + 1, dtype=torch.float32),
        sizes_R=anchors_R.new_empty(sequences),
        horizon=levels,
    )
    with torch.cuda.device_of(anchors_R):  # Triton launches on the current device, whatever its arguments lie on
        _grow[(sequences,)](
            candidates.tokens_RDSK.contiguous(),
            candidates.log_probs_RDSK.contiguous(),
            candidates.states_RDSK.contiguous(),
            anchors_R.contiguous(),
            tree.tokens_RN,
            tree.parents_RN,
            tree.depths_RN,
            tree.scores_RN,
            tree.sizes_R,
            levels,
            states,
            ranks,
            budget,
            WAITING=max(triton.next_power_of_2(budget + 1), FEWEST_SLOTS),
            num_warps=1,  # one warp takes a minimum without waiting for others
        )
    return tree


@triton.jit
def _key(score, level, parent, rank):
    """The smaller, the better. Scores are at most 0, so the bits of their magnitudes are in the order wanted."""
    bits = tl.abs(score).to(tl.int32, bitcast=True).to(tl.int64)
    return (bits << 32) + (level * NODES + parent) * RANKS + rank


@triton.jit
def _of(taken, values):
    """The value of the one slot that is taken; 0 when none is."""
    return tl.sum(tl.where(taken, values, 0), axis=0)


# One binary for each number of slots: what `ops/select.py` has tried at the start is what rounds run.
@triton.jit(
    do_not_specialize=["level_count", "state_count", "rank_count", "budget"],
    do_not_specialize_on_alignment=[
        "tokens",
        "log_probs",
        "states",
        "anchors",
        "tree_tokens",
        "tree_parents",
        "tree_depths",
        "tree_scores",
        "tree_sizes",
    ],
)
def _grow(
    tokens,
    log_probs,
    states,
    anchors,
    tree_tokens,
    tree_parents,
    tree_depths,
    tree_scores,
    tree_sizes,
    level_count,
    state_count,
    rank_count,
    budget,
    WAITING: tl.constexpr,  # slots of children that wait; a node's first child waits in the slot of its number
):
    sequence = tl.program_id(0).to(tl.int64)
    first_cell = sequence * level_count * state_count * rank_count
    tokens += first_cell
    log_probs += first_cell
    states += first_cell
    first_row = sequence * (budget + 1)
    tree_tokens += first_row
    tree_parents += first_row
    tree_depths += first_row
    tree_scores += first_row
    tl.store(tree_tokens, tl.load(anchors + sequence))
    tl.store(tree_parents, 0)
    tl.store(tree_depths, 0)
    tl.store(tree_scores, 0.0)

    slot = tl.arange(0, WAITING)
    score = tl.where(slot == 0, tl.load(log_probs), float("-inf"))
    level = tl.zeros([WAITING], tl.int64)
    parent = tl.zeros([WAITING], tl.int64)
    rank = tl.zeros([WAITING], tl.int64)
    parent_score = tl.zeros([WAITING], tl.float32)
    parent_state = tl.zeros([WAITING], tl.int64)
    size = tl.full([], 1, tl.int64)
    for node in range(1, budget + 1):
        key = _key(score, level, parent, rank)
        best = tl.min(key, axis=0)
        there = (best >> 32) < NO_SCORE
        taken = (key == best) & there
        taken_rank = best % RANKS
        taken_parent = best // RANKS % NODES
        taken_level = best // (RANKS * NODES) % LEVELS
        taken_score = _of(taken, score)
        its_parent_score = _of(taken, parent_score)
        its_parent_state = _of(taken, parent_state)
        cell = (taken_level * state_count + its_parent_state) * rank_count + taken_rank
        state = tl.load(states + cell, mask=there, other=0)
        tl.store(tree_tokens + node, tl.load(tokens + cell, mask=there, other=0))
        tl.store(tree_parents + node, tl.where(there, taken_parent, 0))
        tl.store(tree_depths + node, tl.where(there, taken_level + 1, 0))
        tl.store(tree_scores + node, tl.where(there, taken_score, float("-inf")))
        size += there.to(tl.int64)

        more = there & (taken_rank + 1 < rank_count)
        sibling = its_parent_score + tl.load(log_probs + cell + 1, mask=more, other=float("-inf"))
        deeper = there & (taken_level + 1 < level_count)
        below = ((taken_level + 1) * state_count + state) * rank_count
        child = taken_score + tl.load(log_probs + below, mask=deeper, other=float("-inf"))
        fresh = slot == node
        score = tl.where(taken, sibling, tl.where(fresh, child, score))
        rank = tl.where(taken, taken_rank + 1, tl.where(fresh, 0, rank))
        level = tl.where(fresh, taken_level + 1, level)
        parent = tl.where(fresh, node, parent)
        parent_score = tl.where(fresh, taken_score, parent_score)
        parent_state = tl.where(fresh, state, parent_state)
    tl.store(tree_sizes + sequence, size)
