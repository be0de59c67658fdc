"""What the server stands on: an engine's service, its tokenizer, and what requests have to be checked against."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ddtree.engine.service import OnEnd, OnPiece, Snapshot, Submission, Ticket
from ddtree.errors import RequestError
from ddtree.models.tokenizer import ChatTokenizer
from ddtree.server.grammar import Grammars

if TYPE_CHECKING:
    from ddtree.engine.llm import LLM

__all__ = ["Backend", "ServiceLike", "open_backend"]


class ServiceLike(Protocol):
    """`engine.service.Service`, as far as the server uses it."""

    def submit(self, submission: Submission, on_piece: OnPiece, on_end: OnEnd) -> Ticket: ...

    def cancel(self, ticket: Ticket) -> None: ...

    def snapshot(self) -> Snapshot: ...

    def drain(self, timeout_s: float) -> bool: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Backend:
    """One loaded model.

    names: what requests may call it, the first in answers. vocab_size, eos_ids, max_context: the engine's. places:
    how many answers may run and wait. facts: what `/server_info` adds.
    """

    service: ServiceLike
    tokenizer: ChatTokenizer
    names: tuple[str, ...]
    vocab_size: int
    eos_ids: frozenset[int]
    max_context: int
    places: int
    mode: str
    budget: int
    facts: Mapping[str, Any]
    grammars: Grammars
    # Tokenizers may be read by many threads, but not while one of them changes its settings, as encoding does.
    _encoding: threading.Lock = field(default_factory=threading.Lock)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text. RequestError when there are none."""
        with self._encoding:
            ids = tuple(self.tokenizer.encode(text))
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        return ids

    def chat_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> tuple[int, ...]:
        """Ids of a chat in the model's own template."""
        return self.encode(self.tokenizer.chat_text(messages, tools=tools, variables=variables))


def open_backend(llm: LLM, *, names: Sequence[str], max_queue: int) -> Backend:
    """Start a loaded model's service. names: what requests may call it; the model's own when empty. max_queue: how
    many accepted requests may wait."""
    engine = llm.engine
    spec = engine.target.spec
    plan = engine.plan
    return Backend(
        service=llm.service(max_queue=max_queue),
        tokenizer=llm.tokenizer,
        names=tuple(names) or (llm.name,),
        vocab_size=spec.vocab_size,
        eos_ids=frozenset(spec.eos_ids),
        max_context=engine.max_context,
        places=engine.memory.sequences + max_queue,
        mode=plan.mode,
        budget=plan.budget,
        facts={
            "drafter": llm.drafter_name,
            "block_size": plan.block_size,
            "dtype": str(engine.target.dtype).removeprefix("torch."),
            "device": str(engine.target.device),
            "max_queue": max_queue,
            "max_sequences": engine.memory.sequences,
            "memory": engine.memory.lines(),
        },
        grammars=Grammars(llm.tokenizer.backend, spec.vocab_size, sorted(spec.eos_ids)),
    )
