"""The engine: requests in, pieces out, one loop for one request or for many.

Each step runs part of the texts that are still to be run, then one round of all requests that are being decoded.
Requests join and leave between rounds, in any order, and say what they would say alone. Caches hold no lengths,
and pages are counted exactly, so nothing of a request is left for the next one to find.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ddtree.engine.admission import Admission
from ddtree.engine.batch import Batch, Live, regrouped
from ddtree.engine.blocks import Blocks
from ddtree.engine.config import EngineConfig, context_limit
from ddtree.engine.counters import Snapshot, Tally
from ddtree.engine.logprobs import token_logprobs
from ddtree.engine.memory import most_places
from ddtree.engine.output import Decode, Emitted, Output
from ddtree.engine.prefix import PrefixIndex
from ddtree.engine.records import round_record
from ddtree.engine.request import Completion, Gathering, Job, Piece, RoundRecord, TokenLogprob
from ddtree.engine.runner import PageShape, Runner, batch_bucket, fit
from ddtree.engine.scheduler import Chunk, Scheduler, Track
from ddtree.errors import ClosedError, DDTreeError
from ddtree.models.load import LoadedDrafter
from ddtree.models.target import TargetModel
from ddtree.speculation.chooser import ChoiceError, Chooser
from ddtree.speculation.params import SamplingParams
from ddtree.speculation.plan import FixedPolicy, RoundPlan, fixed_plan
from ddtree.speculation.protocols import Lengths
from ddtree.speculation.round import RoundOutcome

__all__ = ["BatchEngine"]


class BatchEngine:
    """A target, a drafter where there is one, their pages, and the requests on their way.

    Not for several threads at once: `Service` gives it one of its own.
    """

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
        self.target = target
        self.block_size = drafter.model.spec.block_size if drafter is not None else 1
        self.max_context = context_limit(config.max_context, limits)
        self.clock = clock
        self.serving = False  # a service owns the engine: nobody else may step it
        self.admission = Admission(target.spec.vocab_size, self.block_size, self.max_context, target.device.type)
        places = most_places(self.max_context, self.block_size)
        asked = self.admission.plan_for(config)
        self.memory = fit(target, drafter, config, asked, places)
        if self.memory.plan != asked:
            config = replace(config, budget=self.memory.plan.budget)
        self.config = config
        self.plan = self.admission.plan_for(config)
        shape = PageShape(self.memory.pages, config.page_size, self.memory.sequences, places)
        self.runner = Runner(target, drafter, shape)
        prefix = PrefixIndex() if config.shares_prefixes else None
        self.blocks = Blocks(shape.pages, -(-places // config.page_size), prefix)
        self.scheduler = Scheduler(self.blocks, config.page_size, shape.sequences, config.prefill_chunk)
        self._decode = decode
        self._live: dict[Track, Live] = {}
        self._batch: Batch | None = None
        self._nobody = self._chooser(SamplingParams())
        self._tally = Tally()
        self._round_began_s: float | None = None

    def fixed_job(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        plan: RoundPlan | None = None,
        records: bool = False,
        logprobs: int | None = None,
    ) -> Job:
        """A job whose rounds all follow one plan, the engine's own unless another is given."""
        if plan is not None:
            plan = self.admission.checked(fixed_plan(plan.mode, plan.block_size, plan.budget))
        return Job(prompt, params, FixedPolicy(plan or self.plan), records, logprobs)

    def run(self, job: Job) -> Iterator[Piece]:
        """Take a request to its end, piece by piece, and others that are on their way with it. RequestError when
        it cannot be honoured."""
        if self.serving:
            raise ClosedError("this engine answers for a service; submit requests there")
        pieces: deque[Piece] = deque()
        ends: list[Completion | DDTreeError] = []
        live = self.add(job, pieces.append, ends.append)
        try:
            while pieces or not ends:
                if pieces:
                    yield pieces.popleft()
                else:
                    self.step()
        finally:
            self.cancel(live)
        if isinstance(ends[0], DDTreeError):
            raise ends[0]

    # Many requests

    def add(
        self, job: Job, on_piece: Callable[[Piece], None], on_end: Callable[[Completion | DDTreeError], None]
    ) -> Live:
        """Queue a request. `step` calls back: pieces in order, then the end, once. RequestError by `admission`."""
        self.admission.check(job)
        # A request that never drafts needs no features; every other one keeps the drafter's context.
        context = job.policy.may_draft and self.runner.drafters is not None
        width = max(self.plan.rows, self.block_size) if context else 1
        track = Track(list(job.prompt), width, context, goal=len(job.prompt))
        live = Live(
            job=job,
            track=track,
            output=Output(job.params, self.target.spec.eos_ids, self._decode),
            chooser=self._chooser(job.params),
            gathering=Gathering(len(job.prompt), self.clock()),
            on_piece=on_piece,
            on_end=on_end,
        )
        self._live[track] = live
        self.scheduler.add(track)
        self._tally.prompt_tokens += len(job.prompt)
        return live

    def cancel(self, live: Live) -> None:
        """End a request between two steps; its pages are free at once. One that has ended is left alone."""
        if live.track in self._live:
            self._leave(live, "cancelled")
            live.on_end(live.gathering.completion())

    def abandon(self, error: DDTreeError) -> None:
        """End every request with an error."""
        for live in list(self._live.values()):
            self._fail(live, error)

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._live)

    @torch.inference_mode()
    def step(self) -> None:
        """Run a part of the waiting texts, and one round of those that are decoded."""
        self._round_began_s = self.clock()
        for track in self.scheduler.running:
            if track.decoding:
                self._plan_round(self._live[track])
        plan = self.scheduler.plan()
        if plan.fresh:
            self.runner.clear(plan.fresh)
        if plan.chunks:
            self._prefill(plan.chunks)
        if plan.decode:
            self._round([self._live[track] for track in plan.decode])

    def snapshot(self) -> Snapshot:
        """The engine in numbers."""
        return self._tally.snapshot(self.scheduler, self.since_round_s)

    @property
    def since_round_s(self) -> float | None:
        """Seconds since the last step began; None while there is nothing to do."""
        if self._round_began_s is None or not self.busy:
            return None
        return self.clock() - self._round_began_s

    # Steps

    def _plan_round(self, live: Live) -> None:
        """Ask the request's policy, and say how many places its round may write."""
        live.plan = live.job.policy.plan().within(min(live.output.tokens_left, live.room(self.max_context)))
        # A block of the batch may be longer than the request's own.
        live.track.width = max(live.plan.rows, self.block_size if live.track.context else 1)

    def _prefill(self, chunks: Sequence[Chunk]) -> None:
        began_s = self.clock()
        last_Rh = self.runner.prefill(
            [chunk.tokens for chunk in chunks],
            [chunk.first for chunk in chunks],
            [chunk.track.pages for chunk in chunks],
            any(chunk.track.context for chunk in chunks),
        )
        for chunk in chunks:
            self.scheduler.computed(chunk.track, chunk.first + chunk.count)
        lives = [self._live[chunk.track] for chunk in chunks]
        # A request that was pushed out has its anchor already.
        whole = [r for r, live in enumerate(lives) if live.track.decoding and live.history is None]
        if whole:
            logits_RV = self.target.logits(last_Rh[whole] if len(whole) < len(chunks) else last_Rh)
            for live, logits_V in zip([lives[r] for r in whole], logits_RV, strict=True):
                self._first(live, logits_V[None])
        self._tally.seconds({"prefill": self.clock() - began_s})

    def _first(self, live: Live, logits_1V: Tensor) -> None:
        """Choose the first token of an answer, which becomes the first anchor."""
        self._tally.prefix_hit_tokens += live.track.hit or 0
        count = live.track.computed
        lengths = Lengths(torch.tensor([count], device=self.target.device), (count,))
        try:
            history = live.chooser.begin([live.track.tokens])
            tokens = tuple(live.chooser.first(logits_1V, history, lengths).tolist())
            live.history = live.chooser.extend(history, [tokens])
        except ChoiceError as fault:
            self._fail(live, fault.error)
            return
        emitted = live.output.push(tokens, live.room(self.max_context) > 0)
        self._emit(live, emitted, self._logprobs(live, logits_1V, emitted))

    def _round(self, members: list[Live]) -> None:
        size = batch_bucket(len(members), self.target.device, self.memory.sequences)
        self._batch = batch = regrouped(self._batch, members, size, self._nobody)
        context = any(member.track.context for member in members)
        try:
            outcome = self.runner.round(
                batch.state, batch.plans(), batch.pages(), batch.chooser, context, self.clock
            )
        except ChoiceError as fault:
            # Nothing was kept of the round: the others run it again in the next step.
            self._fail(members[fault.sequence], fault.error)
            return
        batch.state = outcome.state
        self._tally.seconds(outcome.seconds)
        shapes = torch.stack([outcome.tree.sizes_R, outcome.tree.depths_RN.amax(dim=1)], dim=1).tolist()
        for r, live in enumerate(members):
            self._advance(live, r, outcome, *shapes[r])

    def _advance(self, live: Live, r: int, outcome: RoundOutcome, nodes: int, deepest: int) -> None:
        """Emit what a round brought to member r."""
        committed = outcome.committed[r]
        live.track.computed += len(committed)
        emitted = live.output.push(committed, live.room(self.max_context) > 0)
        count = len(emitted.token_ids)
        live.job.policy.observe(live.plan, count)
        accepted = min(count, len(committed) - 1)
        self._tally.round(live.plan.mode, drafted=nodes - 1, deepest=deepest, accepted=accepted, emitted=count)
        logprobs = None
        if live.job.logprobs is not None:
            logprobs = self._logprobs(live, outcome.logits_RNV[r, outcome.accepted.path_RP[r, :count]], emitted)
        record = round_record(live.plan, outcome, r, emitted) if live.job.records else None
        self._emit(live, emitted, logprobs, outcome.would_accept[r], record)

    def _logprobs(self, live: Live, logits_PV: Tensor, emitted: Emitted) -> tuple[TokenLogprob, ...] | None:
        if live.job.logprobs is None:
            return None
        return token_logprobs(logits_PV, emitted.token_ids, live.job.logprobs, self.target.ops)

    def _emit(
        self,
        live: Live,
        emitted: Emitted,
        logprobs: tuple[TokenLogprob, ...] | None,
        would: int | None = None,
        record: RoundRecord | None = None,
    ) -> None:
        live.track.tokens += emitted.token_ids
        self.scheduler.computed(live.track, live.track.computed)
        piece = Piece(emitted.text, emitted.token_ids, emitted.finish_reason, would, record, logprobs)
        live.gathering.add(piece, self.clock())
        if emitted.finish_reason is not None:
            self._leave(live, emitted.finish_reason)
        live.on_piece(piece)
        if emitted.finish_reason is not None:
            live.on_end(live.gathering.completion())

    def _fail(self, live: Live, error: DDTreeError) -> None:
        self._leave(live, "error")
        live.on_end(error)

    def _leave(self, live: Live, reason: str) -> None:
        self.scheduler.remove(live.track)
        del self._live[live.track]
        self._tally.finished[reason] += 1
        if not self._live:
            self._batch = None  # nobody is left whose history it would keep

    def _chooser(self, params: SamplingParams) -> Chooser:
        spec = self.target.spec
        horizon = max(self.block_size - 1, 1)
        coupling = self.config.coupling
        return Chooser(
            [params], spec.vocab_size, self.target.ops, self.target.device, horizon, coupling, spec.eos_ids
        )
