"""A service without a model: it says what it is told, a few tokens a round, and keeps the engine's contract.

Its tokenizer is real: one token for each byte, so every character beyond ASCII is spread over several tokens.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from ddtree.engine.counters import PHASES, ModeCounts, Snapshot
from ddtree.engine.output import Output
from ddtree.engine.request import Completion, Piece, RoundRecord, Timing, TokenLogprob
from ddtree.engine.service import OnEnd, OnPiece, Submission, Ticket
from ddtree.errors import BusyError, ClosedError, DDTreeError, RequestError
from ddtree.models.tokenizer import ChatTokenizer
from ddtree.server.backend import Backend
from ddtree.server.grammar import Grammars

EOS = "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL_TEMPLATE = "{% if tools %}{{ tools | tojson }} answer with <tool_call>{% endif %}" + TEMPLATE
TOP = ((65, -1.0), (66, -2.0), (67, float("-inf")))


@cache
def tokenizer(template: str = TEMPLATE) -> ChatTokenizer:
    """One token a byte."""
    import tempfile

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(BPE({one: i for i, one in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    whole = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=EOS, bos_token="<|im_start|>")
    whole.chat_template = template
    with tempfile.TemporaryDirectory() as folder:
        whole.save_pretrained(folder)
        return ChatTokenizer(Path(folder))


@cache
def grammars(template: str = TEMPLATE) -> Grammars:
    one = tokenizer(template)
    return Grammars(one.backend, len(one.backend), [one.backend.eos_token_id])


@dataclass
class Run:
    ticket: Ticket
    submission: Submission
    on_piece: OnPiece
    on_end: OnEnd
    tokens: list[int]
    output: Output
    begun_s: float
    error: DDTreeError | None
    text: str = ""
    rounds: int = -1
    records: list[RoundRecord] = field(default_factory=list)
    cancelled: bool = False


class FakeService:
    """Answers on a thread of its own, `per_round` tokens of every running request in each round.

    reply: text or tokens of the answer, or an error to end with. gate: rounds wait for it.
    """

    def __init__(
        self,
        reply: Callable[[Submission], str | list[int] | DDTreeError] = lambda _: "Hello there.",
        *,
        per_round: int = 3,
        seats: int = 4,
        max_queue: int = 8,
        round_s: float = 0.0,
        template: str = TEMPLATE,
    ) -> None:
        self.reply = reply
        self.per_round = per_round
        self.seats = seats
        self.max_queue = max_queue
        self.round_s = round_s
        self.tokenizer = tokenizer(template)
        self.template = template
        self.eos = self.tokenizer.backend.eos_token_id
        self.submitted: list[Submission] = []
        self.ended: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self._waiting: deque[Run] = deque()
        self._running: list[Run] = []
        self._changed = threading.Condition()
        self._closed = self._draining = False
        self._ids = 0
        self._round_began: float | None = None
        self._emitted = self._rounds = 0
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def submit(self, submission: Submission, on_piece: OnPiece, on_end: OnEnd) -> Ticket:
        with self._changed:
            if self._draining or self._closed:
                raise ClosedError("the engine is shutting down; send the request elsewhere")
            if any(token >= len(self.tokenizer.backend) for token in submission.prompt):
                raise RequestError("the prompt holds a token outside the vocabulary; use this model's ids")
            submission.params.check_vocabulary(len(self.tokenizer.backend))
            if len(self._running) + len(self._waiting) >= self.seats + self.max_queue:
                raise BusyError("the queue is full; try again later", 1.5)
            self._ids += 1
            self.submitted.append(submission)
            ticket = Ticket(self._ids)
            answer = self.reply(submission)
            error = answer if isinstance(answer, DDTreeError) else None
            tokens = [] if isinstance(answer, DDTreeError) else answer
            if isinstance(tokens, str):
                tokens = [*self.tokenizer.encode(tokens), self.eos]
            output = Output(submission.params, {self.eos}, self.tokenizer.decode)
            run = Run(ticket, submission, on_piece, on_end, list(tokens), output, time.perf_counter(), error)
            self._waiting.append(run)
            self._changed.notify_all()
            return ticket

    def cancel(self, ticket: Ticket) -> None:
        with self._changed:
            for run in [*self._running, *self._waiting]:
                run.cancelled |= run.ticket == ticket
            self._changed.notify_all()

    def snapshot(self) -> Snapshot:
        with self._changed:
            began = self._round_began
            counts = ModeCounts(self._rounds, self._emitted, 4 * self._rounds, 2 * self._rounds, (9, 8), (7, 3))
            return Snapshot(
                running=len(self._running),
                waiting=len(self._waiting),
                pages_total=64,
                pages_used=len(self._running),
                pages_cached=1,
                prompt_tokens=10,
                prefix_hit_tokens=2,
                preemptions=0,
                finished={"stop": self.ended.count("stop"), "cancelled": self.ended.count("cancelled")},
                modes={"tree": counts},
                phase_seconds=dict.fromkeys(PHASES, 0.25),
                zero_acceptance_rounds=0,
                zero_acceptance=False,
                since_round_s=None if began is None else time.perf_counter() - began,
            )

    def drain(self, timeout_s: float) -> bool:
        with self._changed:
            self._draining = True
            return self._changed.wait_for(lambda: not self._running and not self._waiting, timeout_s)

    def close(self) -> None:
        with self._changed:
            self._closed = self._draining = True
            for run in [*self._running, *self._waiting]:
                run.cancelled = True
            self._changed.notify_all()
        self.gate.set()
        self._thread.join(10)

    def idle(self) -> bool:
        with self._changed:
            return not self._running and not self._waiting

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._running or self._waiting or self._closed)
                if self._closed and not self._running and not self._waiting:
                    return
                self._round_began = time.perf_counter()
            while not self.gate.wait(0.01):
                with self._changed:
                    if any(run.cancelled for run in [*self._running, *self._waiting]):
                        break
            if self.round_s:
                time.sleep(self.round_s)
            with self._changed:
                while self._waiting and len(self._running) < self.seats:
                    self._running.append(self._waiting.popleft())
                for run in [*self._running, *(one for one in self._waiting if one.cancelled)]:
                    if run.cancelled or self.gate.is_set():
                        self._step(run)
                if not self._running and not self._waiting:
                    self._round_began = None
                self._changed.notify_all()

    def _step(self, run: Run) -> None:
        if run.cancelled:
            self._end(run, "cancelled")
            return
        if run.error is not None:
            self._running.remove(run)
            self.ended.append("error")
            run.on_end(run.error)
            return
        count = 1 if run.rounds < 0 else self.per_round
        taken, run.tokens = run.tokens[:count], run.tokens[count:]
        emitted = run.output.push(taken, bool(run.tokens))
        run.rounds += 1
        run.text += emitted.text
        self._rounds += 1
        self._emitted += len(emitted.token_ids)
        asked = run.submission.logprobs
        logprobs = None
        if asked is not None:
            logprobs = tuple(TokenLogprob(token, -0.5, TOP[:asked]) for token in emitted.token_ids)
        record = None
        if run.submission.records and run.rounds:
            tokens = (taken[0], *taken, 65)
            parents = (0, *range(len(taken)), 0)
            record = RoundRecord(
                mode=run.submission.mode or "tree",
                tokens=tokens,
                parents=parents,
                depths=(0, *range(1, len(taken) + 1), 1),
                scores=tuple(-0.1 * i for i in range(len(tokens))),
                path=tuple(range(len(taken))),
                emitted=emitted.token_ids,
                would_commit=None,
            )
            run.records.append(record)
        run.on_piece(Piece(emitted.text, emitted.token_ids, emitted.finish_reason, None, record, logprobs))
        if emitted.finish_reason:
            self._end(run, emitted.finish_reason)

    def _end(self, run: Run, reason: str) -> None:
        (self._running if run in self._running else self._waiting).remove(run)
        self.ended.append(reason)
        run.on_end(
            Completion(
                text=run.text,
                token_ids=run.output.token_ids,
                finish_reason=reason,
                prompt_tokens=len(run.submission.prompt),
                rounds=max(run.rounds, 0),
                timing=Timing(0.01, max(time.perf_counter() - run.begun_s, 1e-6)),
                records=tuple(run.records),
            )
        )


def backend(service: FakeService, *, max_context: int = 2048) -> Backend:
    """What a server needs beside a fake service."""
    return Backend(
        service=service,
        tokenizer=service.tokenizer,
        names=("toy", "toy-alias"),
        vocab_size=len(service.tokenizer.backend),
        eos_ids=frozenset({service.eos}),
        max_context=max_context,
        places=service.seats + service.max_queue,
        mode="tree",
        budget=16,
        facts={"device": "none"},
        grammars=grammars(service.template),
    )
