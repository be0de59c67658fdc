"""The engine, first form: one request at a time over static buffers.

A request is prefilled in chunks, then taken round by round. Caches are allocated once and hold no lengths: those
live in the request's round state, so nothing is left for the next request to find.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ddtree.engine.config import EngineConfig, context_limit
from ddtree.engine.output import Decode, Emitted, Output
from ddtree.engine.request import Piece, RoundRecord
from ddtree.errors import ConfigError, RequestError
from ddtree.models.load import LoadedDrafter
from ddtree.models.target import TargetModel
from ddtree.speculation.chooser import Chooser
from ddtree.speculation.drafter import DFlashDrafter
from ddtree.speculation.params import SamplingParams
from ddtree.speculation.plan import LARGEST_BUDGET, FixedPolicy, Policy, RoundPlan, fixed_plan
from ddtree.speculation.protocols import Drafter, Lengths
from ddtree.speculation.round import RoundOutcome, RoundState, run_round
from ddtree.speculation.verifier import TargetVerifier

__all__ = ["Engine", "Job"]


@dataclass(frozen=True, slots=True)
class Job:
    """One request: token ids, sampling, who plans its rounds, and whether rounds are recorded."""

    prompt: Sequence[int]
    params: SamplingParams
    policy: Policy
    records: bool = False


class Engine:
    """A target, a drafter where there is one, and their buffers."""

    def __init__(
        self,
        target: TargetModel,
        drafter: LoadedDrafter | None,
        config: EngineConfig,
        decode: Decode,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        limits = {"target": target.spec.decoder.max_positions}
        if drafter is not None:
            limits["drafter"] = drafter.model.spec.decoder.max_positions
        self.config = config
        self.target = target
        self.block_size = drafter.model.spec.block_size if drafter is not None else 1
        self.max_context = context_limit(config.max_context, limits)
        self.plan = self.plan_for(config)
        self.clock = clock
        self._decode = decode
        self._turn = 0  # which request owns the buffers
        # The widest round that any plan may ask for: a tree joined with its spine.
        capacity = self.max_context + LARGEST_BUDGET + 1 + self.block_size
        self._cache = target.new_cache(1, capacity)
        self._drafter: Drafter | None = None
        if drafter is not None:
            context = drafter.model.new_cache(1, capacity)
            self._drafter = DFlashDrafter(drafter, context, target.spec.vocab_size)

    def plan_for(self, config: EngineConfig) -> RoundPlan:
        """The plan that a configuration means here. ConfigError when this engine cannot run it."""
        return self._checked(config.plan(self.target.device.type, max(self.block_size, 2)))

    def _checked(self, plan: RoundPlan) -> RoundPlan:
        if plan.capabilities.drafts_blocks and self.block_size == 1:
            raise ConfigError(
                f"mode {plan.mode} needs a drafter, and this engine was made without one; use mode off"
            )
        if plan.block_size > max(self.block_size, 1):
            raise ConfigError(
                f"block size {plan.block_size} exceeds the drafter's {self.block_size}: it was trained for no more"
            )
        return plan

    def fixed_job(
        self, prompt: Sequence[int], params: SamplingParams, plan: RoundPlan | None = None, records: bool = False
    ) -> Job:
        """A job whose rounds all follow one plan, the engine's own unless another is given."""
        if plan is not None:
            plan = self._checked(fixed_plan(plan.mode, plan.block_size, plan.budget))
        return Job(prompt, params, FixedPolicy(plan or self.plan), records)

    @torch.inference_mode()
    def run(self, job: Job) -> Iterator[Piece]:
        """Take a request to its end, piece by piece. RequestError when it cannot be honoured."""
        self._check(job)
        self._turn += 1
        turn = self._turn
        # A request that never drafts needs no features; every other one keeps the drafter's context.
        drafter = self._drafter if job.policy.may_draft else None
        layers = () if drafter is None else drafter.feature_layers
        verifier = TargetVerifier(self.target, self._cache, layers)
        coupling = self.config.coupling
        chooser = Chooser(
            [job.params],
            self.target.spec.vocab_size,
            self.target.ops,
            self.target.device,
            max(self.block_size - 1, 1),
            coupling,
            self.target.spec.eos_ids,
        )
        output = Output(job.params, self.target.spec.eos_ids, self._decode)
        state = self._prefill(job.prompt, verifier, drafter, chooser)
        emitted = output.push(state.anchors_R.tolist(), self._room(state) > 0)
        yield Piece(emitted.text, emitted.token_ids, emitted.finish_reason)
        while output.finish_reason is None:
            if turn != self._turn:
                raise RequestError(
                    "another request was begun on this engine before this one had ended; an engine answers one at "
                    "a time, so finish or close a request before the next"
                )
            plan = job.policy.plan().within(min(output.tokens_left, self._room(state)))
            outcome = run_round(state, plan, drafter, verifier, chooser)
            state = outcome.state
            emitted = output.push(outcome.committed[0], self._room(state) > 0)
            job.policy.observe(plan, len(emitted.token_ids))
            would = None if outcome.would_accept is None else outcome.would_accept[0]
            record = _record(plan, outcome, emitted) if job.records else None
            yield Piece(emitted.text, emitted.token_ids, emitted.finish_reason, would, record)

    def _prefill(
        self, prompt: Sequence[int], verifier: TargetVerifier, drafter: Drafter | None, chooser: Chooser
    ) -> RoundState:
        """Run the prompt and choose the first token, which becomes the first anchor."""
        device = self.target.device
        for first, hidden_11h, features_1NF in verifier.prefill(prompt, self.config.prefill_chunk):
            last_11h = hidden_11h
            if drafter is not None:
                count = features_1NF.shape[1]
                at = Lengths(torch.tensor([first], device=device), (first,))
                drafter.absorb(features_1NF, at, torch.tensor([count], device=device))
        lengths = Lengths(torch.tensor([len(prompt)], device=device), (len(prompt),))
        history = chooser.begin([prompt])
        anchors_R = chooser.first(self.target.logits(last_11h)[:, 0], history, lengths)
        history = chooser.extend(history, [tuple(anchors_R.tolist())])
        return RoundState(anchors_R, lengths, history)

    def _check(self, job: Job) -> None:
        if not job.prompt:
            raise RequestError("the prompt is empty; give at least one token")
        if len(job.prompt) >= self.max_context:
            raise RequestError(
                f"the prompt has {len(job.prompt)} tokens, but the context holds {self.max_context} for prompt "
                "and answer together; shorten it, or raise max_context where the model allows it"
            )
        vocabulary = self.target.spec.vocab_size
        outside = [token for token in job.prompt if not 0 <= token < vocabulary]
        if outside:
            raise RequestError(f"the prompt holds token {outside[0]}, outside the vocabulary of {vocabulary}")

    def _room(self, state: RoundState) -> int:
        """How many tokens still fit into the context after the anchor."""
        return self.max_context - state.lengths.host[0] - 1


def _record(plan: RoundPlan, outcome: RoundOutcome, emitted: Emitted) -> RoundRecord:
    tree = outcome.tree
    size = int(tree.sizes_R[0])
    tokens, parents, depths = (
        tuple(a[0, :size].tolist()) for a in (tree.tokens_RN, tree.parents_RN, tree.depths_RN)
    )
    would = outcome.would_accept
    return RoundRecord(
        mode=plan.mode,
        tokens=tokens,
        parents=parents,
        depths=depths,
        scores=tuple(tree.scores_RN[0, :size].tolist()),
        path=tuple(outcome.accepted.path_RP[0, : int(outcome.accepted.lengths_R[0])].tolist()),
        emitted=emitted.token_ids,
        would_commit=None if would is None else would[0],
    )
