"""Answers from a feed: gathered into one document, or as a stream of chunks.

Invariant: the chunks of a choice, joined, are what the gathered answer holds.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from ddtree.engine.request import Completion, Piece, TokenLogprob
from ddtree.server.backend import Backend
from ddtree.server.feed import Feed
from ddtree.server.prepare import Work
from ddtree.server.replies import ChatChoice, ChatCompletion, CompletionChoice, ResponseMessage, TextCompletion
from ddtree.server.report import characters, chat_logprobs, completion_logprobs, round_report, usage
from ddtree.server.schema import FunctionCall, ToolCall
from ddtree.server.tools import Call, ToolParser

__all__ = ["Exchange", "chat_answer", "chat_chunks", "completion_answer", "completion_chunks"]


@dataclass
class Exchange:
    """One request under way: what was asked, where it is answered from, and who wants to know of its end.

    on_first: called when the first token is there. on_done: called with all completions.
    """

    work: Work
    backend: Backend
    feed: Feed
    on_first: Callable[[], None]
    on_done: Callable[[list[Completion]], None]
    include_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(default_factory=lambda: secrets.token_hex(12))

    def ends(self, index: int) -> frozenset[int]:
        """Tokens that end a choice."""
        return self.work.submissions[index].params.ends(self.backend.eos_ids)

    async def events(self) -> AsyncIterator[tuple[int, Piece | Completion]]:
        """The feed's events, watched for the first token and the end."""
        completions: dict[int, Completion] = {}
        waiting = True
        async for index, event in self.feed.events():
            if waiting:
                self.on_first()
                waiting = False
            if isinstance(event, Completion):
                completions[index] = event
            yield index, event
        self.on_done([completions[index] for index in sorted(completions)])

    async def gathered(self) -> tuple[list[Completion], list[list[TokenLogprob]]]:
        """All completions, and the log-probabilities of each choice, in the order of choices."""
        count = len(self.work.submissions)
        completions: dict[int, Completion] = {}
        logprobs: list[list[TokenLogprob]] = [[] for _ in range(count)]
        async for index, event in self.events():
            if isinstance(event, Completion):
                completions[index] = event
            else:
                logprobs[index] += event.logprobs or ()
        return [completions[index] for index in range(count)], logprobs


async def chat_answer(exchange: Exchange) -> ChatCompletion:
    completions, logprobs = await exchange.gathered()
    choices = []
    for index, done in enumerate(completions):
        submission = exchange.work.submissions[index]
        words, calls = ToolParser().feed(done.text, final=True) if exchange.work.tools else (done.text, ())
        choices.append(
            ChatChoice(
                index=index,
                message=ResponseMessage(
                    content=words or (None if calls else ""),
                    tool_calls=[_tool_call(call) for call in calls] or None,
                ),
                finish_reason=_reason(done, bool(calls)),
                logprobs=None
                if submission.logprobs is None
                else chat_logprobs(logprobs[index], exchange.ends(index), exchange.backend),
                ddtree_rounds=_rounds(exchange, index, done),
            )
        )
    return ChatCompletion(
        id=f"chatcmpl-{exchange.id}",
        created=exchange.created,
        model=exchange.backend.names[0],
        choices=choices,
        usage=usage(completions, exchange.work.prompts),
    )


async def completion_answer(exchange: Exchange) -> TextCompletion:
    completions, logprobs = await exchange.gathered()
    choices = [
        CompletionChoice(
            index=index,
            text=done.text,
            finish_reason=done.finish_reason,
            logprobs=None
            if exchange.work.submissions[index].logprobs is None
            else completion_logprobs(logprobs[index], exchange.ends(index), exchange.backend, 0),
            ddtree_rounds=_rounds(exchange, index, done),
        )
        for index, done in enumerate(completions)
    ]
    return TextCompletion(
        id=f"cmpl-{exchange.id}",
        created=exchange.created,
        model=exchange.backend.names[0],
        choices=choices,
        usage=usage(completions, exchange.work.prompts),
    )


async def chat_chunks(exchange: Exchange) -> AsyncIterator[dict[str, Any]]:
    """Chunks of a chat completion: the role, deltas, a finish reason for each choice, and usage if asked for."""
    count = len(exchange.work.submissions)
    parsers = [ToolParser() for _ in range(count)] if exchange.work.tools else None
    called = [0] * count

    def chunk(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | more
        return _chunk(exchange, "chat.completion.chunk", "chatcmpl", [choice])

    def deltas(index: int, text: str, final: bool) -> list[dict[str, Any]]:
        if parsers is None:
            return [{"content": text}] if text else []
        words, calls = parsers[index].feed(text, final=final)
        found: list[dict[str, Any]] = [{"content": words}] if words else []
        for call in calls:
            found.append({"tool_calls": [{"index": called[index], **_tool_call(call).model_dump()}]})
            called[index] += 1
        return found

    for index in range(count):
        yield chunk(index, {"role": "assistant", "content": ""})
    completions = []
    async for index, event in exchange.events():
        if isinstance(event, Completion):
            completions.append(event)
            for delta in deltas(index, "", True):
                yield chunk(index, delta)
            yield chunk(index, {}, finish_reason=_reason(event, called[index] > 0))
            continue
        extras = _extras(exchange, index, event)
        if event.logprobs is not None:
            shown = chat_logprobs(event.logprobs, exchange.ends(index), exchange.backend)
            if shown.content:
                extras["logprobs"] = shown.model_dump()
        found = deltas(index, event.text, False)
        if not found and extras:
            found = [{}]
        for place, delta in enumerate(found):
            yield chunk(index, delta, **(extras if place == 0 else {}))
    if exchange.include_usage:
        yield _usage_chunk(exchange, "chat.completion.chunk", "chatcmpl", completions)


async def completion_chunks(exchange: Exchange) -> AsyncIterator[dict[str, Any]]:
    """Chunks of a text completion."""
    offsets = [0] * len(exchange.work.submissions)
    completions = []
    async for index, event in exchange.events():
        choice: dict[str, Any] = {"index": index, "text": "", "logprobs": None, "finish_reason": None}
        if isinstance(event, Completion):
            completions.append(event)
            choice["finish_reason"] = event.finish_reason
        else:
            choice |= {"text": event.text} | _extras(exchange, index, event)
            if event.logprobs is not None:
                shown = completion_logprobs(event.logprobs, exchange.ends(index), exchange.backend, offsets[index])
                offsets[index] += sum(
                    characters(exchange.backend.grammars.token_bytes(one.token_id)) for one in event.logprobs
                )
                choice["logprobs"] = shown.model_dump()
            if not event.text and choice["logprobs"] is None and "ddtree_round" not in choice:
                continue
        yield _chunk(exchange, "text_completion", "cmpl", [choice])
    if exchange.include_usage:
        yield _usage_chunk(exchange, "text_completion", "cmpl", completions)


def _chunk(exchange: Exchange, kind: str, prefix: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    head = {
        "id": f"{prefix}-{exchange.id}",
        "object": kind,
        "created": exchange.created,
        "model": exchange.backend.names[0],
        "choices": choices,
    }
    return head | ({"usage": None} if exchange.include_usage else {})


def _usage_chunk(exchange: Exchange, kind: str, prefix: str, completions: list[Completion]) -> dict[str, Any]:
    return _chunk(exchange, kind, prefix, []) | {"usage": usage(completions, exchange.work.prompts).model_dump()}


def _extras(exchange: Exchange, index: int, piece: Piece) -> dict[str, Any]:
    """Extension: the round of this chunk, where it was asked for."""
    if piece.record is None or not exchange.work.submissions[index].records:
        return {}
    return {"ddtree_round": round_report(piece.record, exchange.backend).model_dump()}


def _rounds(exchange: Exchange, index: int, done: Completion) -> Any:
    if not exchange.work.submissions[index].records:
        return None
    return [round_report(record, exchange.backend) for record in done.records]


def _reason(done: Completion, called: bool) -> str:
    return "tool_calls" if called and done.finish_reason == "stop" else done.finish_reason


def _tool_call(call: Call) -> ToolCall:
    return ToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))
