"""Candidates for the drafter and choices of the target, for one batch of requests and their sampling settings.

Invariant: no request is decoded greedily because a device or a backend lacks something: a sampled request is drawn
with the project's noise, or, in SGLang's deterministic mode, by SGLang's own sampler. Under tensor parallelism
every rank computes, and rank 0's candidates and choices are everyone's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.speculative.dflash_utils import apply_dflash_verify_logits_adjustments
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask
from torch import Tensor

from ddtree.models.edges import EdgeTables
from ddtree.sglang_plugin.head import DraftHead
from ddtree.sglang_plugin.host_noise import host_draw, host_gumbel
from ddtree.sglang_plugin.sampling import Draw, SamplingView, coupled, keyed_draw, sharpness, view_of, walk_choices
from ddtree.sglang_plugin.settings import Settings
from ddtree.sglang_plugin.trees import child_links
from ddtree.speculation.noise import gumbel
from ddtree.speculation.rescoring import edge_count, rescored
from ddtree.tree import Candidates, DraftTree, factorised_candidates

__all__ = ["Chooser", "Turn"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One round's requests: their settings, seeds, lengths, and how the target's tokens are drawn."""

    view: SamplingView
    seeds_R: Tensor
    prefix_R: Tensor
    draw: Draw

    @property
    def sync_site(self) -> SpecTpSyncSite:
        greedy = self.view.all_greedy
        return SpecTpSyncSite.DFLASH_ACCEPT_GREEDY if greedy else SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE


class Chooser:
    """Knows the head, the vocabulary and the mode of sampling; holds no state of requests."""

    def __init__(
        self,
        head: DraftHead,
        edges: EdgeTables | None,
        vocab_size: int,
        settings: Settings,
        sync: Any,
        sampler: Any,
        deterministic: bool,
    ) -> None:
        """edges: the drafter's edge correction, where it has one. sync: SGLang's broadcast of speculative
        decisions. sampler: the target's. deterministic: SGLang's mode."""
        self._head = head
        self._edges = edges
        self._vocab_size = vocab_size
        self._coupling = settings.coupling
        self._sync = sync
        self._sampler = sampler
        self._deterministic = deterministic

    def turn(self, info: Any, seeds_R: Tensor, prefix_R: Tensor) -> Turn:
        """A round of the requests that SGLang's sampling parameters `info` belong to."""
        view = view_of(info)
        if self._deterministic:
            return Turn(view, info.sampling_seed, prefix_R, host_draw(self._sampler, info, view))
        return Turn(view, seeds_R, prefix_R, keyed_draw(view, seeds_R))

    def candidates(self, anchors_R: Tensor, hidden_RDh: Tensor, count: int, turn: Turn) -> Candidates:
        """The `count` best tokens of each drafted position, a few more where edges may raise them."""
        if self._edges is None:
            return factorised_candidates(*self._ranked(hidden_RDh, count, turn))
        tokens_RDK, scores_RDK = self._ranked(hidden_RDh, edge_count(count), turn)
        edges_RDKK = self._edges(anchors_R, tokens_RDK, hidden_RDh).contiguous()
        # Hidden states are all-reduced, so other ranks' edges may differ from these in the last bit.
        self._sync.sync(turn.sync_site, edges_RDKK)
        return rescored(tokens_RDK, scores_RDK, edges_RDKK, sharpness(turn.view, self._scale(turn)))

    def _ranked(self, hidden_RDh: Tensor, count: int, turn: Turn) -> tuple[Tensor, Tensor]:
        """Rank 0's best tokens of each position by themselves and their scores, [R, D, K] each, descending."""
        sequences, depth, _ = hidden_RDh.shape
        if turn.view.all_greedy:
            ranked = self._head.ranked(hidden_RDh.flatten(0, 1), count, None)
            tokens_RDK, log_probs_RDK = (part.view(sequences, depth, -1) for part in ranked)
        else:
            # One depth at a time: the noise of a whole block over the vocabulary would be the largest tensor of
            # all.
            levels = [self._level(hidden_RDh[:, d], turn.prefix_R + d, count, turn) for d in range(depth)]
            tokens_RDK, log_probs_RDK = (torch.stack(parts, dim=1) for parts in zip(*levels, strict=True))
        tokens_RDK, log_probs_RDK = tokens_RDK.contiguous(), log_probs_RDK.contiguous()
        self._sync.sync(turn.sync_site, tokens_RDK)
        self._sync.sync(turn.sync_site, log_probs_RDK)
        return tokens_RDK, log_probs_RDK

    def adjust(
        self, batch: Any, logits_MV: Tensor, tree: DraftTree, grammar: GrammarTree | None, barrier: Any
    ) -> None:
        """Logit bias, which is every row's alike, and grammar along each row's own path, in place."""
        mask = None
        if grammar is not None:
            mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=grammar,
                sampling_info=batch.sampling_info,
                device=logits_MV.device,
                barrier=barrier,
            )
        apply_dflash_verify_logits_adjustments(
            next_token_logits=logits_MV, sampling_info=batch.sampling_info, draft_token_num=tree.rows
        )
        if mask is not None:
            mask.apply(logits_MV)

    def grammar_tree(self, batch: Any, tree: DraftTree) -> GrammarTree | None:
        """The links that SGLang's grammar walk needs; their copy to the host starts before the target's pass."""
        if not batch.has_grammar:
            return None
        return GrammarTree.from_device(*child_links(tree), tree.tokens_RN)

    def choices(self, logits_MV: Tensor, tree: DraftTree, turn: Turn) -> Tensor:
        """The target's token after each row; after rows off the realised path anything. int64 [R, N]."""
        logits_RNV = logits_MV.view(*tree.tokens_RN.shape, -1)
        if turn.view.all_greedy:
            return self.decide(logits_RNV.argmax(dim=-1), turn)
        return self.decide(walk_choices(tree, logits_RNV, turn.prefix_R, turn.draw), turn)

    def decide(self, choices_RN: Tensor, turn: Turn) -> Tensor:
        """Rank 0's choices, on every rank."""
        choices_RN = choices_RN.contiguous()
        self._sync.sync(turn.sync_site, choices_RN)
        return choices_RN

    def _level(self, hidden_Rh: Tensor, positions_R: Tensor, count: int, turn: Turn) -> tuple[Tensor, Tensor]:
        """Candidates for the token after each position."""
        noise_RV = self._noise(positions_R, turn)

        def adjust(scores_RV: Tensor) -> Tensor:
            return coupled(scores_RV, noise_RV, turn.view, self._coupling or 1.0)

        return self._head.ranked(hidden_Rh, count, adjust)

    def _scale(self, turn: Turn) -> float | None:
        """The scale of coupled drafting, None in a round whose drafts go without noise."""
        return None if self._deterministic and turn.view.filters else self._coupling

    def _noise(self, positions_R: Tensor, turn: Turn) -> Tensor | None:
        """The noise that the target will be judged with, for this rank's tokens; None where drafts go without."""
        if self._scale(turn) is None:
            return None
        if self._deterministic:
            noise_RV = host_gumbel(turn.seeds_R, positions_R, self._vocab_size)
        else:
            noise_RV = gumbel(turn.seeds_R, positions_R[:, None] + 1, self._vocab_size)[:, 0]
        shard = self._head.shard
        return noise_RV[:, shard.first : shard.first + shard.size]
