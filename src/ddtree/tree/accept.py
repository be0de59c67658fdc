"""The accept walk: from the target's choice at every node to the path that is committed.

A node is accepted when its parent is and its token is what the target chose after its parent. Siblings
differ in their token, so at most one node of each depth is accepted, and the accepted nodes are a path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.tree.structure import DraftTree

__all__ = ["Accepted", "accept", "committed_tokens", "cut"]


@dataclass(frozen=True, slots=True)
class Accepted:
    """What a round commits.

    path_RP: int64, node indices from the root on; places at or past `lengths_R` hold 0. lengths_R: int64,
    nodes on the path, root included, at least 1. bonus_R: int64, the target's choice after the last node.
    """

    path_RP: Tensor
    lengths_R: Tensor
    bonus_R: Tensor


def accept(tree: DraftTree, choices_RN: Tensor, among_RN: Tensor | None = None) -> Accepted:
    """Walk each tree along the target's choices, without a host round trip.

    choices_RN: int64, the token that the target chose after each node (after padding nodes: anything).
    among_RN: bool, the nodes that may be accepted; all real nodes when it is not given.
    """
    allowed_RN = tree.real_RN if among_RN is None else among_RN & tree.real_RN
    follows_RN = tree.tokens_RN == choices_RN.gather(1, tree.parents_RN)
    # A tree that lost its links must not pass for a chain: a child stands one below its parent.
    linked_RN = tree.depths_RN == tree.depths_RN.gather(1, tree.parents_RN) + 1
    follows_RN = follows_RN & linked_RN & allowed_RN
    follows_RN[:, 0] = True
    accepted_RN, jump_RN = follows_RN, tree.parents_RN
    reach = 1
    while reach <= tree.horizon:
        accepted_RN = accepted_RN & accepted_RN.gather(1, jump_RN)
        jump_RN = jump_RN.gather(1, jump_RN)
        reach *= 2
    return _path(tree, accepted_RN, choices_RN)


def cut(tree: DraftTree, accepted: Accepted, among_RN: Tensor) -> Accepted:
    """The longest prefix of a path inside `among_RN`: what had been accepted, had only those nodes been drafted.

    among_RN: bool, holds the root. Where the path leaves it, the target's choice is the node that it left for.
    """
    place_P = torch.arange(accepted.path_RP.shape[1], device=accepted.path_RP.device)
    on_path_RP = place_P[None, :] < accepted.lengths_R[:, None]
    kept_RP = (on_path_RP & among_RN.gather(1, accepted.path_RP)).cumprod(dim=1) == 1
    lengths_R = kept_RP.sum(dim=1)
    whole_R = lengths_R == accepted.lengths_R
    next_R1 = accepted.path_RP.gather(1, lengths_R.clamp(max=place_P.numel() - 1)[:, None])
    left_for_R = tree.tokens_RN.gather(1, next_R1)[:, 0]
    bonus_R = torch.where(whole_R, accepted.bonus_R, left_for_R)
    return Accepted(torch.where(kept_RP, accepted.path_RP, 0), lengths_R, bonus_R)


def committed_tokens(tree: DraftTree, accepted: Accepted) -> Tensor:
    """The tokens that a round adds to the text: the path without its root, then the bonus. int64 [R, P].

    The first lengths_R[r] of a row count; the others hold 0.
    """
    path_tokens_RP = tree.tokens_RN.gather(1, accepted.path_RP)
    shifted_RP = path_tokens_RP.roll(-1, dims=1)
    place_P = torch.arange(shifted_RP.shape[1], device=shifted_RP.device)
    last_R1 = (accepted.lengths_R - 1)[:, None]
    tokens_RP = torch.where(place_P[None, :] < last_R1, shifted_RP, 0)
    return torch.where(place_P[None, :] == last_R1, accepted.bonus_R[:, None], tokens_RP)


def _path(tree: DraftTree, accepted_RN: Tensor, choices_RN: Tensor) -> Accepted:
    sequences, rows = tree.parents_RN.shape
    device = tree.parents_RN.device
    node_RN = torch.arange(rows, device=device).expand(sequences, -1)
    # One accepted node a depth: it goes to the place of its depth, every other node to a spare last place.
    place_RN = torch.where(accepted_RN, tree.depths_RN, tree.horizon + 1)
    path_RP = torch.zeros(sequences, tree.horizon + 2, dtype=torch.int64, device=device)
    path_RP = path_RP.scatter(1, place_RN, node_RN)[:, : tree.horizon + 1]
    lengths_R = accepted_RN.sum(dim=1)
    last_R1 = path_RP.gather(1, (lengths_R - 1)[:, None])
    return Accepted(path_RP, lengths_R, choices_RN.gather(1, last_R1)[:, 0])
