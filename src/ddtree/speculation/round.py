"""One round: draft, select, verify, walk, commit. State goes in and comes out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.speculation.chooser import Chooser, History
from ddtree.speculation.plan import RoundPlan
from ddtree.speculation.protocols import Drafter, Lengths, Verifier
from ddtree.tree import (
    Accepted,
    DraftTree,
    best_chain,
    build_tree,
    committed_tokens,
    cut,
    spine_nodes,
    spine_tree,
    with_spine,
)

__all__ = ["RoundOutcome", "RoundState", "run_round"]


@dataclass(frozen=True, slots=True)
class RoundState:
    """Where R sequences stand: the last committed token, whose key and value are not in the cache yet, the
    positions before it, and the history that choices depend on."""

    anchors_R: Tensor
    lengths: Lengths
    history: History


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """What a round did. committed: for each sequence the tokens that it adds to the text, bonus last.

    tree and accepted: what was verified and the path that was committed. would_accept: in shadow mode, how many
    tokens the tree would have committed; else None.
    """

    state: RoundState
    committed: tuple[tuple[int, ...], ...]
    tree: DraftTree
    accepted: Accepted
    would_accept: tuple[int, ...] | None


def run_round(
    state: RoundState, plan: RoundPlan, drafter: Drafter | None, verifier: Verifier, chooser: Chooser
) -> RoundOutcome:
    """Take every sequence one round further.

    A drafter that is given keeps its context even in rounds that do not draft; only plain decoding can do without.
    """
    tree, spine_RN = _draft(state, plan, drafter, chooser)
    verification = verifier.verify(tree, state.lengths)
    accepted = chooser.walk(tree, verification.logits_RNV, state.history, state.lengths)
    would_accept = None
    if plan.capabilities.commits_spine_only:
        core_RN = torch.arange(tree.rows, device=tree.tokens_RN.device) <= plan.budget
        grown_RN = core_RN[None] & tree.real_RN
        would_accept = tuple(cut(tree, accepted, grown_RN).lengths_R.tolist())
        accepted = cut(tree, accepted, spine_RN)
    counts = tuple(accepted.lengths_R.tolist())
    path_RP = accepted.path_RP[:, : max(counts)]
    accepted = Accepted(path_RP, accepted.lengths_R, accepted.bonus_R)
    if plan.capabilities.verifies_trees:  # a chain's path already lies where it belongs
        verifier.commit(accepted, state.lengths)
    if drafter is not None:
        features_RNF = verification.features_RNF
        index_RPF = path_RP[..., None].expand(-1, -1, features_RNF.shape[-1])
        drafter.absorb(features_RNF.gather(1, index_RPF), state.lengths, accepted.lengths_R)
    tokens = committed_tokens(tree, accepted).tolist()
    committed = tuple(tuple(row[:count]) for row, count in zip(tokens, counts, strict=True))
    return RoundOutcome(_next(state, accepted, committed, chooser), committed, tree, accepted, would_accept)


def _draft(
    state: RoundState, plan: RoundPlan, drafter: Drafter | None, chooser: Chooser
) -> tuple[DraftTree, Tensor]:
    """The rows to verify, and which of them are the drafter's own chain."""
    anchors_R = state.anchors_R
    if not plan.capabilities.drafts_blocks:
        nothing_RD = anchors_R[:, None][:, :0]
        root = spine_tree(anchors_R, nothing_RD, nothing_RD.float())
        return root, root.real_RN
    assert drafter is not None, "a mode that drafts blocks needs a drafter"
    proposal = drafter.propose(anchors_R, state.lengths, plan.block_size)
    count = plan.budget if plan.capabilities.verifies_trees else 1
    candidates = chooser.candidates(proposal, state.history, state.lengths, count)
    if not plan.capabilities.verifies_trees:
        chain = spine_tree(anchors_R, *best_chain(candidates))
        return chain, chain.real_RN
    tree = build_tree(candidates, anchors_R, plan.budget)
    if plan.capabilities.commits_spine_only:
        tree = with_spine(tree, candidates)
        return tree, spine_nodes(tree, candidates)
    return tree, tree.real_RN


def _next(
    state: RoundState, accepted: Accepted, committed: tuple[tuple[int, ...], ...], chooser: Chooser
) -> RoundState:
    lengths = Lengths(
        state.lengths.device_R + accepted.lengths_R,
        tuple(n + len(tokens) for n, tokens in zip(state.lengths.host, committed, strict=True)),
    )
    return RoundState(accepted.bonus_R, lengths, chooser.extend(state.history, committed))
