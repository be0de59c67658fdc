"""Grammars as constraints: JSON, JSON schemas and tool calls, compiled by llguidance.

Invariant: a state is the tuple of tokens said so far, a plain value. The matcher behind it is a cursor that is
moved to whatever state is asked about, by rolling back and going forward; what was asked about rejected branches
of a draft tree therefore leaves no trace. Each choice has a cursor of its own, used by the engine's thread.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import llguidance
import llguidance.hf
import numpy as np
import torch
from torch import Tensor

from ddtree.errors import RequestError

__all__ = ["Grammar", "GrammarConstraint", "Grammars"]

# Models of any size like to pad JSON; without a bound a small one may never come to an end.
WHITESPACE = r"[\x20\x0A\x0D\x09]{0,16}"
# What a grammar may cost; errors do not quote the schema, which may be somebody's secret.
LIMITS = llguidance.LLParserLimits(max_grammar_size=100_000, verbose_errors=False)


class GrammarConstraint:
    """One choice's grammar: `speculation.params.Constraint`."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._at: tuple[int, ...] = ()

    def start(self) -> Hashable:
        return ()

    def advance(self, state: Hashable, token: int) -> Hashable:
        assert isinstance(state, tuple)
        return (*state, token)

    def allowed(self, state: Hashable) -> Tensor:
        """Tokens that may follow. RequestError when the grammar has become too complex to follow."""
        assert isinstance(state, tuple)
        self._move(state)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise RequestError("the grammar became too complex to follow; make the schema simpler")
        unpacked_V = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
        return torch.from_numpy(unpacked_V.astype(bool))

    def _move(self, state: tuple[int, ...]) -> None:
        common = min(len(self._at), len(state))
        while self._at[:common] != state[:common]:  # branches part within a round: a few steps at most
            common -= 1
        if common < len(self._at):
            self._matcher.rollback(len(self._at) - common)
        ahead = list(state[common:])
        if ahead and self._matcher.try_consume_tokens(ahead) != len(ahead):
            raise RequestError("the grammar does not allow the tokens said so far; make the schema simpler")
        self._at = state


@dataclass(frozen=True, slots=True)
class Grammar:
    """A checked grammar, ready for any number of choices."""

    text: str
    tokenizer: llguidance.LLTokenizer
    vocab_size: int

    def constraint(self) -> GrammarConstraint:
        matcher = llguidance.LLMatcher(self.tokenizer, self.text, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise RequestError(f"the grammar cannot be compiled: {_reason(matcher.get_error())}")
        return GrammarConstraint(matcher, self.vocab_size)


class Grammars:
    """Compiles grammars for one model's vocabulary."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """tokenizer: the Hugging Face one. eos_ids: what may be said when a grammar is satisfied."""
        self._vocab_size = vocab_size
        self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_ids))

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; a special token's own name."""
        return bytes(self._tokenizer.decode_bytes([token]))

    def json_object(self) -> Grammar:
        return self.json_schema({"type": "object"})

    def json_schema(self, schema: Mapping[str, Any]) -> Grammar:
        """RequestError when the schema is none, cannot be met, or uses what cannot be enforced."""
        try:
            text = llguidance.LLMatcher.grammar_from_json_schema(
                _dump(schema), overrides={"whitespace_pattern": WHITESPACE}
            )
        except ValueError as error:
            raise RequestError(f"the schema cannot be read: {_reason(str(error))}") from None
        return self.checked(text)

    def tool_calls(
        self, tools: Mapping[str, Mapping[str, Any] | None], *, required: bool, parallel: bool
    ) -> Grammar:
        """Calls in the form `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, a line each for the tags.

        tools: name -> schema of its arguments. required: nothing but calls; else text, which may lead to calls.
        """
        calls = [_dump(_call_schema(name, schema)) for name, schema in tools.items()]
        rules = "\n".join(f"call_{i}: %json {call}" for i, call in enumerate(calls))
        any_call = " | ".join(f"call_{i}" for i in range(len(calls)))
        body = f'({any_call}) "\\n</tool_call>"'
        if required:
            more = f' ("\\n<tool_call>\\n" {body})*' if parallel else ""
            start = f'start: "<tool_call>\\n" {body}{more}'
        else:
            start = f"start: ({'call*' if parallel else 'call?'}) rest\ncall: head {body}\nrest: TEXT"
            start += '\nhead[lazy]: TEXT "<tool_call>\\n"\nTEXT: /(.|\\n)*/'
        return self.checked(llguidance.LLMatcher.grammar_from_lark(f"%llguidance {{}}\n{start}\n{rules}\n"))

    def checked(self, text: str) -> Grammar:
        """A grammar in llguidance's own language. RequestError when it cannot be enforced."""
        failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(
            text, self._tokenizer, limits=LIMITS
        )
        if failed:
            raise RequestError(f"the schema cannot be enforced: {_reason(' '.join(messages))}")
        return Grammar(text, self._tokenizer, self._vocab_size)


def _call_schema(name: str, arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    inner: dict[str, Any] = dict(arguments or {"type": "object"})
    # References are read from the root of a schema, so what they name has to move there.
    shared: dict[str, Any] = {key: inner.pop(key) for key in ("$defs", "definitions") if key in inner}
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": inner},
        "required": ["name", "arguments"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_pattern": WHITESPACE},
        **shared,
    }


def _dump(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(schema, allow_nan=False)
    except (ValueError, RecursionError):
        raise RequestError("the schema is no JSON: it holds NaN, an infinity, or too many levels") from None


def _reason(text: str) -> str:
    return " ".join(text.split())[:300]
