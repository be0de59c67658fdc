"""One round: draft, select, verify, walk, commit. State goes in and comes out.

A batch runs one drafter pass and one verification, wide enough for the most ambitious of its requests; the others
have fewer real nodes in them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ddtree.speculation.chooser import Chooser
from ddtree.speculation.history import History
from ddtree.speculation.plan import RoundPlan, joint_plan
from ddtree.speculation.protocols import Drafter, Lengths, Verifier
from ddtree.tree import (
    Accepted,
    Candidates,
    DraftTree,
    best_chain,
    committed_tokens,
    cut,
    first_nodes,
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
    tokens the tree would have committed; None for sequences in other modes. logits_RNV: what the target said of
    every node. seconds: host time of draft, select, verify, walk and commit.
    """

    state: RoundState
    committed: tuple[tuple[int, ...], ...]
    tree: DraftTree
    accepted: Accepted
    would_accept: tuple[int | None, ...]
    logits_RNV: Tensor
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class Limits:
    """What each sequence of a batch may do in a round that is wider than its own plan.

    horizon_R: how deep it drafts. sizes_R: nodes of its tree, root included. chain_R, shadow_R: bool, no branches,
    and none committed.
    """

    horizon_R: Tensor
    sizes_R: Tensor
    chain_R: Tensor
    shadow_R: Tensor


@lru_cache(maxsize=64)
def _limits(plans: tuple[RoundPlan, ...], device: torch.device) -> Limits:
    budgets = [plan.budget if plan.capabilities.verifies_trees else plan.horizon for plan in plans]
    return Limits(
        horizon_R=torch.tensor([plan.horizon for plan in plans], device=device),
        sizes_R=torch.tensor([budget + 1 for budget in budgets], device=device),
        chain_R=torch.tensor([not plan.capabilities.verifies_trees for plan in plans], device=device),
        shadow_R=torch.tensor([plan.capabilities.commits_spine_only for plan in plans], device=device),
    )


class _Stopwatch:
    """Seconds between marks, by name."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = clock()
        self.seconds: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        now = self._clock()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


def run_round(
    state: RoundState,
    plans: RoundPlan | Sequence[RoundPlan],
    drafter: Drafter | None,
    verifier: Verifier,
    chooser: Chooser,
    clock: Callable[[], float] = time.perf_counter,
) -> RoundOutcome:
    """Take every sequence one round further, all by one plan or each by its own.

    A drafter that is given keeps its context even in rounds that do not draft; only plain decoding can do without.
    """
    each = (plans,) * len(state.lengths.host) if isinstance(plans, RoundPlan) else tuple(plans)
    plan = joint_plan(each)
    limits = None if all(one == plan for one in each) else _limits(each, state.anchors_R.device)
    watch = _Stopwatch(clock)
    tree, spine_RN = _draft(state, plan, limits, drafter, chooser, watch)
    watch.mark("select")
    verification = verifier.verify(tree, state.lengths)
    watch.mark("verify")
    accepted = chooser.walk(tree, verification.logits_RNV, state.history, state.lengths)
    would_accept: tuple[int | None, ...] = (None,) * len(each)
    if plan.capabilities.commits_spine_only:
        would_accept = _would_accept(tree, accepted, each)
        accepted = cut(tree, accepted, spine_RN)
    counts = tuple(accepted.lengths_R.tolist())
    path_RP = accepted.path_RP[:, : max(counts)]
    accepted = Accepted(path_RP, accepted.lengths_R, accepted.bonus_R)
    tokens = committed_tokens(tree, accepted).tolist()
    committed = tuple(tuple(row[:count]) for row, count in zip(tokens, counts, strict=True))
    watch.mark("walk")
    if plan.capabilities.verifies_trees:  # a chain's path already lies where it belongs
        verifier.commit(accepted, state.lengths)
    if drafter is not None:
        features_RNF = verification.features_RNF
        index_RPF = path_RP[..., None].expand(-1, -1, features_RNF.shape[-1])
        drafter.absorb(features_RNF.gather(1, index_RPF), state.lengths, accepted.lengths_R)
    after = _next(state, accepted, committed, chooser)
    watch.mark("commit")
    return RoundOutcome(after, committed, tree, accepted, would_accept, verification.logits_RNV, watch.seconds)


def _draft(
    state: RoundState,
    plan: RoundPlan,
    limits: Limits | None,
    drafter: Drafter | None,
    chooser: Chooser,
    watch: _Stopwatch,
) -> tuple[DraftTree, Tensor]:
    """The rows to verify, and those that may be committed: in shadow mode the drafter's own chain."""
    anchors_R = state.anchors_R
    if not plan.capabilities.drafts_blocks:
        nothing_RD = anchors_R[:, None][:, :0]
        root = spine_tree(anchors_R, nothing_RD, nothing_RD.float())
        return root, root.real_RN
    assert drafter is not None, "a mode that drafts blocks needs a drafter"
    proposal = drafter.propose(anchors_R, state.lengths, plan.block_size)
    watch.mark("draft")
    candidates = chooser.candidates(proposal, state.history, state.lengths, plan.candidates)
    if limits is not None:
        candidates = _limited(candidates, limits)
    if not plan.capabilities.verifies_trees:
        chain = spine_tree(anchors_R, *best_chain(candidates))
        return chain, chain.real_RN
    tree = chooser.ops.build_tree(candidates, anchors_R, plan.budget)
    if limits is not None:
        tree = first_nodes(tree, limits.sizes_R)
    if not plan.capabilities.commits_spine_only:
        return tree, tree.real_RN
    tree = with_spine(tree, candidates)
    if limits is None:
        return tree, spine_nodes(tree, candidates)
    tree = first_nodes(tree, torch.where(limits.shadow_R, tree.rows, limits.sizes_R))
    return tree, torch.where(limits.shadow_R[:, None], spine_nodes(tree, candidates), tree.real_RN)


def _limited(candidates: Candidates, limits: Limits) -> Candidates:
    """Without candidates past a sequence's horizon, and with the best alone where it drafts a chain."""
    log_probs_RDSK = candidates.log_probs_RDSK
    depth_D = torch.arange(candidates.depth, device=log_probs_RDSK.device)
    rank_K = torch.arange(log_probs_RDSK.shape[-1], device=log_probs_RDSK.device)
    too_deep_RD = depth_D >= limits.horizon_R[:, None]
    branch_RK = limits.chain_R[:, None] & (rank_K > 0)
    forbidden_RDSK = too_deep_RD[:, :, None, None] | branch_RK[:, None, None, :]
    return replace(candidates, log_probs_RDSK=log_probs_RDSK.masked_fill(forbidden_RDSK, -torch.inf))


def _would_accept(tree: DraftTree, accepted: Accepted, plans: Sequence[RoundPlan]) -> tuple[int | None, ...]:
    """What the trees that were grown, without the spines joined to them, would have committed."""
    budget_R = torch.tensor([plan.budget for plan in plans], device=tree.tokens_RN.device)
    grown_RN = (torch.arange(tree.rows, device=budget_R.device) <= budget_R[:, None]) & tree.real_RN
    lengths = cut(tree, accepted, grown_RN).lengths_R.tolist()
    shadowed = (plan.capabilities.commits_spine_only for plan in plans)
    return tuple(length if shadow else None for length, shadow in zip(lengths, shadowed, strict=True))


def _next(
    state: RoundState, accepted: Accepted, committed: tuple[tuple[int, ...], ...], chooser: Chooser
) -> RoundState:
    lengths = Lengths(
        state.lengths.device_R + accepted.lengths_R,
        tuple(n + len(tokens) for n, tokens in zip(state.lengths.host, committed, strict=True)),
    )
    return RoundState(accepted.bonus_R, lengths, chooser.extend(state.history, committed))
