"""Which token the target chooses after each node, and what a drafter should expect it to choose.

A choice is a function of (logits, history on the node's own path, seed, position), so mode, budget and batch
cannot change what is said. With the anchor at position a, what follows a node of depth d is drawn with the noise
of position a + d + 1.

Two walks give the same path. `_walk_all` judges every node at once, without a host read. `_walk_steps` judges only
the nodes that are reached, as step-by-step decoding would: on a CPU, where a sort of the vocabulary for each node
would cost more than the tree gains, and wherever a grammar has to be asked on the host.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.errors import RequestError
from ddtree.ops import Ops
from ddtree.speculation.history import History
from ddtree.speculation.noise import NoiseRing, fresh_seed, gumbel, seed_tensor
from ddtree.speculation.params import SamplingParams
from ddtree.speculation.penalties import TokenCounts, count_tokens, node_paths
from ddtree.speculation.processors import RowParams, draft_scores, row_params, target_scores
from ddtree.speculation.protocols import Lengths, Proposal
from ddtree.speculation.rescoring import edge_count, rescored
from ddtree.tree import Accepted, Candidates, DraftTree, accept, factorised_candidates

__all__ = ["ChoiceError", "Chooser"]


class ChoiceError(Exception):
    """A sequence of a batch cannot be continued, through its own constraint. `error` says why; nothing of the
    round was kept, and the others can go on without it."""

    def __init__(self, sequence: int, error: RequestError) -> None:
        super().__init__(str(error))
        self.sequence, self.error = sequence, error


@dataclass(frozen=True, slots=True)
class Voice:
    """What one request takes along from batch to batch: its settings, and the noise that it is drawn with."""

    params: SamplingParams
    seed: int
    ring: NoiseRing
    alone: RowParams
    ends: frozenset[int]


class Chooser:
    """The sampling settings of R requests, fixed for their lifetime. It holds no state of theirs: histories go in
    and come out, and the noise that it remembers is a pure function of seed and position."""

    def __init__(
        self,
        params: Sequence[SamplingParams],
        vocab_size: int,
        ops: Ops,
        device: torch.device,
        horizon: int,
        coupling: float | None,
        eos_ids: Collection[int] = (),
    ) -> None:
        """horizon: the deepest draft. coupling: scale of coupled drafting, None for drafts without noise. eos_ids:
        the model's end tokens: what stands behind an end is never said, so no constraint is asked about it."""
        for one in params:
            one.check_vocabulary(vocab_size)
        self._vocab_size = vocab_size
        self.ops = ops
        self._device = device
        self._coupling = coupling
        voices = []
        for one in params:
            seed = fresh_seed() if one.seed is None else one.seed
            # A window reaches from the first drafted position to the one after the deepest node.
            ring = NoiseRing(seed, vocab_size, horizon + 2, device)
            voices.append(Voice(one, seed, ring, row_params([one], 1, device), one.ends(eos_ids)))
        self._settle(voices)

    @property
    def device(self) -> torch.device:
        """Where its choices are made."""
        return self._device

    @classmethod
    def joined(cls, choosers: Sequence[Chooser]) -> Chooser:
        """One chooser for the requests of several, which were made for the same model."""
        whole = copy.copy(choosers[0])
        whole._settle([voice for chooser in choosers for voice in chooser._voices])
        return whole

    def _settle(self, voices: Sequence[Voice]) -> None:
        self._voices = tuple(voices)
        self._params = params = tuple(voice.params for voice in voices)
        self._seeds_R = seed_tensor([voice.seed for voice in voices], self._device)
        self._together: dict[int, RowParams] = {}  # by the rows of each sequence
        # What a log-probability of the drafter is multiplied by on its way into a score.
        sharpness = [1.0 if p.greedy else 1 / (p.temperature * (self._coupling or 1.0)) for p in params]
        self._sharpness_R = torch.tensor(sharpness, dtype=torch.float32, device=self._device)
        self._sampled = any(not one.greedy for one in params)
        self._plain = all(one.plain_greedy for one in params)
        self._constrained = any(one.constraint is not None for one in params)
        self._counted = any(one.needs_history for one in params)

    def begin(self, prompts: Sequence[Sequence[int]]) -> History:
        """The history of requests that have said nothing yet."""
        counts = None
        if self._counted:
            counts = count_tokens(prompts, [()] * len(prompts), self._vocab_size, self._device)
        states: list[Hashable] = []
        for r, one in enumerate(self._params):
            with self._blaming(r):
                states.append(None if one.constraint is None else one.constraint.start())
        return History(counts, tuple(states))

    def first(self, logits_RV: Tensor, history: History, lengths: Lengths) -> Tensor:
        """The token after each prompt. lengths: of the prompts. int64 [R]."""
        if self._plain:
            return self.ops.best(logits_RV)
        drawn = [
            self._draw(r, logits_RV[r : r + 1], history, (), lengths.host[r]) for r in range(len(self._params))
        ]
        return torch.tensor(drawn, device=self._device)

    def extend(self, history: History, committed: Sequence[Sequence[int]]) -> History:
        """The history after each sequence has said more tokens."""
        counts = history.counts
        if counts is not None:
            widest = max(len(tokens) for tokens in committed)
            padded = [[*tokens, *[0] * (widest - len(tokens))] for tokens in committed]
            real = [[i < len(tokens) for i in range(widest)] for tokens in committed]
            counts = counts.committed(
                torch.tensor(padded, device=self._device), torch.tensor(real, device=self._device)
            )
        states = list(history.grammar)
        for r, tokens in enumerate(committed):
            for token in self._until_end(r, tokens):
                states[r] = self._advance(r, states[r], token)
        return History(counts, tuple(states))

    def candidates(self, proposal: Proposal, history: History, lengths: Lengths, count: int) -> Candidates:
        """The `count` best tokens of each drafted position, a few more where edges may raise them.

        The score is the drafter's under the request's own settings and, where it samples, coupled to the noise
        that the target will be judged with.
        """
        if proposal.edges is None:
            return factorised_candidates(*self._ranked(proposal.logits_RDV, history, lengths, count))
        tokens_RDK, scores_RDK = self._ranked(proposal.logits_RDV, history, lengths, edge_count(count))
        return rescored(tokens_RDK, scores_RDK, proposal.edges(tokens_RDK), self._sharpness_R)

    def _ranked(self, logits_RDV: Tensor, history: History, lengths: Lengths, count: int) -> tuple[Tensor, Tensor]:
        """The best tokens of each position by themselves and their log-probabilities, [R, D, K], descending."""
        if self._plain:
            log_probs_RDK, tokens_RDK = self.ops.top_log_probs(logits_RDV, count)
            return tokens_RDK, log_probs_RDK
        sequences, depth, vocabulary = logits_RDV.shape
        noise_MV = None
        if self._coupling is not None and self._sampled:
            noise_MV = self._noise(lengths, 1, depth).flatten(0, 1)
        scores_MV = draft_scores(
            logits_RDV.flatten(0, 1), self._row_params(depth), history.counts, noise_MV, self._coupling or 1.0
        )
        scores_RDK, tokens_RDK = self.ops.ranked(scores_MV.view(sequences, depth, vocabulary), count)
        return tokens_RDK, scores_RDK

    def walk(self, tree: DraftTree, logits_RNV: Tensor, history: History, lengths: Lengths) -> Accepted:
        """The longest path of each tree that the target itself would have said, and its choice after it."""
        if self._plain:
            return accept(tree, self.ops.best(logits_RNV))
        if self._constrained or self._device.type == "cpu":
            return self._walk_steps(tree, logits_RNV, history, lengths)
        return self._walk_all(tree, logits_RNV, history, lengths)

    def _walk_all(self, tree: DraftTree, logits_RNV: Tensor, history: History, lengths: Lengths) -> Accepted:
        counts = history.counts
        if counts is not None:
            counts = counts.along(*node_paths(tree))
        rows = self._row_params(tree.rows)
        scores_MV = target_scores(logits_RNV.flatten(0, 1), rows, counts)
        if self._sampled:
            noise_RPV = self._noise(lengths, 1, tree.horizon + 1)
            depth_RNV = tree.depths_RN[..., None].expand(-1, -1, noise_RPV.shape[-1])
            noise_MV = noise_RPV.gather(1, depth_RNV).flatten(0, 1).to(scores_MV.dtype)
            if rows.greedy_M1 is not None:
                noise_MV = noise_MV.masked_fill(rows.greedy_M1, 0.0)
            scores_MV = scores_MV + noise_MV
        return accept(tree, scores_MV.argmax(dim=-1).view(tree.tokens_RN.shape))

    def _walk_steps(self, tree: DraftTree, logits_RNV: Tensor, history: History, lengths: Lengths) -> Accepted:
        choices = torch.zeros_like(tree.tokens_RN)
        for r in range(choices.shape[0]):
            if self._params[r].plain_greedy:
                choices[r] = self.ops.best(logits_RNV[r])
                continue
            children: dict[tuple[int, int], int] = {}
            size = int(tree.sizes_R[r])
            parents, tokens = tree.parents_RN[r].tolist(), tree.tokens_RN[r].tolist()
            for node in range(1, size):
                children[parents[node], tokens[node]] = node
            node = 0
            said: tuple[int, ...] = ()
            while True:
                position = lengths.host[r] + len(said) + 1
                token = self._draw(r, logits_RNV[r, node : node + 1], history, said, position)
                choices[r, node] = token
                if (node, token) not in children:
                    break
                node, said = children[node, token], (*said, token)
        return accept(tree, choices)

    def _draw(self, r: int, logits_1V: Tensor, history: History, said: tuple[int, ...], position: int) -> int:
        """The token that sequence r says at `position`, after its history and the tokens `said` since."""
        counts = history.counts
        if counts is not None:
            counts = TokenCounts(counts.prompt_RV[r : r + 1], counts.output_RV[r : r + 1])
            path_1L = torch.tensor([said], dtype=torch.int64, device=self._device)
            counts = counts.along(path_1L, torch.ones_like(path_1L, dtype=torch.bool))
        scores_1V = target_scores(logits_1V, self._voices[r].alone, counts, self._allowed(r, history, said))
        if not self._params[r].greedy:
            scores_1V = scores_1V + self._voices[r].ring.rows(position, 1).to(scores_1V.dtype)
        return int(scores_1V.argmax(dim=-1))

    def _allowed(self, r: int, history: History, said: tuple[int, ...]) -> Tensor | None:
        """What the request's constraint lets follow: evaluated along the path, without moving its state."""
        constraint = self._params[r].constraint
        if constraint is None:
            return None
        if not self._voices[r].ends.isdisjoint(said):
            return None
        with self._blaming(r):
            state = history.grammar[r]
            for token in said:
                state = constraint.advance(state, token)
            allowed_V = constraint.allowed(state)
            if allowed_V is None:
                return None
            if not bool(allowed_V.any()):
                raise RequestError(
                    "the constraint allows no token at all here; it should let an end-of-sequence token follow"
                )
            return allowed_V.to(self._device)[None]

    def _until_end(self, r: int, tokens: Sequence[int]) -> Sequence[int]:
        """Tokens up to the one that ends the request; that one and what is behind it no constraint sees."""
        return tokens[: next((i for i, token in enumerate(tokens) if token in self._voices[r].ends), len(tokens))]

    def _advance(self, r: int, state: Hashable, token: int) -> Hashable:
        constraint = self._params[r].constraint
        if constraint is None:
            return None
        with self._blaming(r):
            return constraint.advance(state, token)

    @contextmanager
    def _blaming(self, r: int) -> Iterator[None]:
        """Charge what goes wrong inside to sequence r alone."""
        try:
            yield
        except RequestError as error:
            raise ChoiceError(r, error) from error
        except Exception as error:  # constraints are code of others: whatever they raise must not end the batch
            what = f"{type(error).__name__}: {error}"
            raise ChoiceError(r, RequestError(f"the constraint failed ({what}); ask without it")) from error

    def _noise(self, lengths: Lengths, offset: int, count: int) -> Tensor:
        """Noise of `count` positions of each sequence, the first `offset` after its anchor. [R, count, V]."""
        if self._device.type == "cpu":
            # Greedy requests get none: nobody looks at it, and a row of it takes a while.
            none_NV = torch.zeros(1, 1, dtype=torch.float64).expand(count, self._vocab_size)
            voices = zip(self._voices, lengths.host, strict=True)
            return torch.stack(
                [
                    none_NV if voice.params.greedy else voice.ring.rows(length + offset, count)
                    for voice, length in voices
                ]
            )
        positions_RN = lengths.device_R[:, None] + offset + torch.arange(count, device=self._device)
        return gumbel(self._seeds_R, positions_RN, self._vocab_size)

    def _row_params(self, rows_each: int) -> RowParams:
        if rows_each not in self._together:
            self._together[rows_each] = row_params(self._params, rows_each, self._device)
        return self._together[rows_each]
