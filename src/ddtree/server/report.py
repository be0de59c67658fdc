"""What an answer says beside its text: log-probabilities, rounds, usage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ddtree.engine.request import Completion, RoundRecord, TokenLogprob
from ddtree.server.backend import Backend
from ddtree.server.replies import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    RoundReport,
    SpeculationUsage,
    TopLogprob,
    Usage,
)

__all__ = ["characters", "chat_logprobs", "completion_logprobs", "round_report", "usage"]

NEVER = -9999.0  # what OpenAI writes for a probability of nothing; JSON has no infinities


def chat_logprobs(tokens: Iterable[TokenLogprob], ends: frozenset[int], backend: Backend) -> ChatLogprobs:
    """ends: tokens that end a request; they are no part of the text, so they are left out."""
    content = [
        ChatTokenLogprob(
            **_entry(one.token_id, one.logprob, backend),
            top_logprobs=[TopLogprob(**_entry(token, logprob, backend)) for token, logprob in one.top],
        )
        for one in tokens
        if one.token_id not in ends
    ]
    return ChatLogprobs(content=content)


def completion_logprobs(
    tokens: Iterable[TokenLogprob], ends: frozenset[int], backend: Backend, offset: int
) -> CompletionLogprobs:
    """offset: characters of the text before the first of these tokens."""
    result = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for one in tokens:
        if one.token_id in ends:
            continue
        raw = backend.grammars.token_bytes(one.token_id)
        result.tokens.append(_text(raw))
        result.token_logprobs.append(_finite(one.logprob))
        top = {_text(backend.grammars.token_bytes(token)): _finite(logprob) for token, logprob in one.top}
        result.top_logprobs.append(top)
        result.text_offset.append(offset)
        offset += characters(raw)
    return result


def characters(raw: bytes) -> int:
    """How many characters begin in these bytes of UTF-8."""
    return sum(byte & 0xC0 != 0x80 for byte in raw)


def round_report(record: RoundRecord, backend: Backend) -> RoundReport:
    texts = [backend.tokenizer.decode_all([token]) for token in record.tokens]
    return RoundReport(
        mode=record.mode,
        texts=texts,
        tokens=list(record.tokens),
        parents=list(record.parents),
        depths=list(record.depths),
        probabilities=[round(math.exp(min(score, 0.0)), 6) for score in record.scores],
        path=list(record.path),
        emitted=[backend.tokenizer.decode_all([token]) for token in record.emitted],
        would_commit=record.would_commit,
    )


def usage(completions: Sequence[Completion], prompts: Sequence[int]) -> Usage:
    """Of all choices together; each prompt counts once, however many answers it got."""
    tokens = sum(len(one.token_ids) for one in completions)
    rounds = sum(one.rounds for one in completions)
    by_rounds = tokens - len(completions)
    shadowed = [one.would_commit for one in completions if one.would_commit is not None]
    return Usage(
        prompt_tokens=sum(prompts),
        completion_tokens=tokens,
        total_tokens=sum(prompts) + tokens,
        ddtree=SpeculationUsage(
            rounds=rounds,
            acceptance_length=by_rounds / rounds if rounds else None,
            passes_saved=by_rounds - rounds,
            prefill_s=max(one.timing.prefill_s for one in completions),
            decode_s=max(one.timing.decode_s for one in completions),
            would_commit=sum(shadowed) if shadowed else None,
        ),
    )


def _entry(token: int, logprob: float, backend: Backend) -> dict[str, Any]:
    raw = backend.grammars.token_bytes(token)
    return {"token": _text(raw), "logprob": _finite(logprob), "bytes": list(raw)}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else NEVER


def _text(raw: bytes) -> str:
    """Text of a token; a part of a character is written as OpenAI writes it."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
