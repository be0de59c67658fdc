"""Grammars as constraints: pure in their states, tight, and loud about what they cannot enforce."""

from __future__ import annotations

import json
import random

import pytest

from ddtree.errors import RequestError
from ddtree.speculation.params import Constraint, SamplingParams
from tests.unit.fake_service import grammars, tokenizer

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def along(constraint, text, state=None):
    """The state after a text; an assertion error where the grammar refuses one of its tokens."""
    state = constraint.start() if state is None else state
    for token in tokenizer().encode(text):
        assert bool(constraint.allowed(state)[token]), f"{tokenizer().decode([token])!r} of {text!r} is refused"
        state = constraint.advance(state, token)
    return state


def may_follow(constraint, state):
    return {tokenizer().decode_all([token]) for token in constraint.allowed(state).nonzero()[:, 0].tolist()}


def test_it_is_a_constraint():
    constraint = grammars().json_object().constraint()
    assert isinstance(constraint, Constraint)
    SamplingParams(constraint=constraint)


def test_only_a_finished_document_may_end():
    constraint = grammars().json_schema(PERSON).constraint()
    text = '{"name": "Jo", "age": 42}'
    for length in range(len(text)):
        assert "<|im_end|>" not in may_follow(constraint, along(constraint, text[:length]))
    assert may_follow(constraint, along(constraint, text)) == {"<|im_end|>"}


def test_branches_leave_no_trace():
    """Whatever was asked about rejected branches, the answer about a state is what a fresh matcher says."""
    draw = random.Random(3)
    grammar = grammars().json_schema(PERSON)
    constraint = grammar.constraint()
    committed = constraint.start()
    for _ in range(40):
        for _ in range(3):  # drafts, some of them deep, none of them committed
            state = committed
            for _ in range(draw.randrange(1, 6)):
                open_tokens = constraint.allowed(state).nonzero()[:, 0].tolist()
                token = draw.choice(open_tokens)
                if token == tokenizer().backend.eos_token_id:
                    break
                state = constraint.advance(state, token)
        allowed = constraint.allowed(committed)
        fresh = grammar.constraint()
        assert bool((fresh.allowed(committed) == allowed).all())
        choices = allowed.nonzero()[:, 0].tolist()
        token = draw.choice(choices)
        if token == tokenizer().backend.eos_token_id:
            break
        committed = constraint.advance(committed, token)


def test_states_are_values():
    constraint = grammars().json_object().constraint()
    start = constraint.start()
    after = constraint.advance(start, 5)
    assert start == constraint.start() == ()
    assert hash(after) == hash(constraint.advance(start, 5))


def test_choices_do_not_share_a_cursor():
    grammar = grammars().json_object()
    one, two = grammar.constraint(), grammar.constraint()
    along(one, '{"a": [1, 2')
    assert "{" in may_follow(two, two.start())


def test_white_space_comes_to_an_end():
    constraint = grammars().json_object().constraint()
    state = along(constraint, "{" + " " * 16)
    assert " " not in may_follow(constraint, state)


def test_a_state_that_the_grammar_refuses_is_an_error():
    constraint = grammars().json_object().constraint()
    with pytest.raises(RequestError, match="does not allow"):
        constraint.allowed(tuple(tokenizer().encode("no")))


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "nonsense"}, "nonsense"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "string", "format": "weird"}, "weird"),
        ({"minItems": 5, "type": "array", "maxItems": 2}, "minItems"),
        ({"type": "string", "pattern": "(("}, "regex"),
        ({"type": "number", "minimum": float("nan")}, "NaN"),
    ],
)
def test_what_cannot_be_enforced_is_named(schema, word):
    with pytest.raises(RequestError, match=word):
        grammars().json_schema(schema)


def test_tool_calls_that_are_required():
    tools = {"weather": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
    grammar = grammars().tool_calls(tools | {"now": None}, required=True, parallel=True)
    constraint = grammar.constraint()
    assert may_follow(constraint, constraint.start()) == {"<"}
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    state = along(constraint, call)
    assert may_follow(constraint, state) == {"<|im_end|>", "\n"}
    along(constraint, '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', state)
    single = grammars().tool_calls(tools, required=True, parallel=False).constraint()
    assert may_follow(single, along(single, call)) == {"<|im_end|>"}
    with pytest.raises(AssertionError, match="is refused"):
        along(constraint, '<tool_call>\n{"name": "rm"')
    with pytest.raises(AssertionError, match="is refused"):
        along(constraint, '<tool_call>\n{"name": "weather", "arguments": {}}')


def test_tool_calls_that_may_be():
    """Text is free until a call begins; from there the schema holds."""
    tools = {"now": {"type": "object", "properties": {}, "additionalProperties": False}}
    constraint = grammars().tool_calls(tools, required=False, parallel=True).constraint()
    state = along(constraint, "I shall look < and see. ")
    assert "<|im_end|>" in may_follow(constraint, state)
    state = along(constraint, "<tool_call>\n", state)
    assert "<|im_end|>" not in may_follow(constraint, state)
    state = along(constraint, '{"name": "now", "arguments": {}}\n</tool_call>', state)
    assert "<|im_end|>" in may_follow(constraint, state)
    along(constraint, " done", state)


def test_references_inside_a_tool():
    schema = {"type": "object", "properties": {"at": {"$ref": "#/$defs/Place"}}, "required": ["at"]}
    schema["$defs"] = {"Place": {"enum": ["here", "there"]}}
    constraint = grammars().tool_calls({"go": schema}, required=True, parallel=False).constraint()
    along(constraint, '<tool_call>\n{"name": "go", "arguments": {"at": "there"}}\n</tool_call>')
    assert json.dumps(schema), "the caller's schema is left whole"
    assert "$defs" in schema


def test_bytes_of_tokens():
    one = grammars()
    ids = tokenizer().encode("é")
    assert b"".join(one.token_bytes(token) for token in ids) == "é".encode()
