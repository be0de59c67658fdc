"""Tool calls: read the same however the text was cut, and handed on in OpenAI's shape."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.server.tools import ToolParser
from tests.unit.fake_service import TOOL_TEMPLATE, FakeService
from tests.unit.test_server_api import chat, chunks, client_of, submitted

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
TEXTS = [
    "no call at all",
    CALL,
    f"Let me see.\n{CALL}",
    f"one\n\n{CALL}\n{CALL}\n\ntwo",
    "a <tool_ and <tool_callx> are words\n",
    "<tool_call>{broken</tool_call> after",
    '<tool_call>{"name": 5}</tool_call>',
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    f'{CALL}<tool_call>{{"name": "cut", "argu',
    "ends with a break\n\n",
    "1 < 2 <",
]


def read(pieces):
    """Words and calls of a text in pieces, ids aside."""
    parser = ToolParser()
    words, calls = "", []
    for place, piece in enumerate(pieces):
        more, found = parser.feed(piece, final=place == len(pieces) - 1)
        words += more
        calls += [(call.name, call.arguments) for call in found]
    return words, calls


def test_what_is_read():
    assert read([CALL]) == ("", [("add", '{"a": 1, "b": "é"}')])
    words, calls = read([f"one\n\n{CALL}\n{CALL}\n\ntwo"])
    assert words == "onetwo"
    assert len(calls) == 2
    assert read(["<tool_call>{broken</tool_call> after"]) == ("<tool_call>{broken</tool_call> after", [])
    assert read(["ends with a break\n\n"]) == ("ends with a break\n\n", [])


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 11])
def test_pieces_of_a_size(text, size):
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert read(pieces) == read([text])
    assert read([*pieces, ""]) == read([text])


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(TEXTS), st.lists(st.integers(0, 200), max_size=8))
def test_pieces_cut_anywhere(text, cuts):
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert read([text[a:b] for a, b in itertools.pairwise(places)]) == read([text])


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
]


@pytest.mark.parametrize("per_round", [1, 3, 100])
def test_calls_in_an_answer(per_round):
    service = FakeService(lambda _: f"Adding.\n{CALL}", per_round=per_round, template=TOOL_TEMPLATE)
    with client_of(service) as client:
        choice = chat(client, tools=TOOLS).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Adding."
        call = choice["message"]["tool_calls"][0]
        assert (call["type"], call["function"]["name"]) == ("function", "add")
        assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": "é"}
        parts = [part["choices"][0] for part in chunks(chat(client, tools=TOOLS, stream=True))]
        assert "".join(one["delta"].get("content", "") for one in parts) == "Adding."
        streamed = [call for one in parts for call in one["delta"].get("tool_calls", [])]
        assert [call["index"] for call in streamed] == [0]
        assert streamed[0]["function"] == call["function"]
        assert parts[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("text", ["it ends with <tool_", "it ends with breaks\n\n", f"{CALL}<tool_call>cut"])
def test_what_was_held_back_comes_at_the_end(text):
    with client_of(FakeService(lambda _: text, template=TOOL_TEMPLATE)) as client:
        whole = chat(client, tools=TOOLS).json()["choices"][0]["message"]["content"]
        parts = chunks(chat(client, tools=TOOLS, stream=True))
        assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts) == whole
        assert text.endswith(whole)


def test_the_model_is_shown_tools_and_results():
    with client_of(FakeService(lambda _: CALL, template=TOOL_TEMPLATE)) as client:
        first = chat(client, tools=TOOLS).json()["choices"][0]["message"]
        assert "content" in first
        assert first["content"] is None
        sent = {key: value for key, value in first.items() if value is not None}
        result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "2"}
        messages = [{"role": "user", "content": "1 + 1?"}, sent, result]
        assert chat(client, messages=messages, tools=TOOLS).status_code == 200
        shown = client.service.tokenizer.decode_all(submitted(client).prompt)
        assert '"name": "add"' in shown
        assert "<|im_start|>tool\n2<|im_end|>" in shown
        chat(client, tools=TOOLS, tool_choice="none")
        assert "add" not in client.service.tokenizer.decode_all(submitted(client).prompt)
        assert submitted(client).params.constraint is None


@pytest.mark.parametrize(
    ("choice", "first"),
    [
        ("required", {"<"}),
        ({"type": "function", "function": {"name": "add"}}, {"<"}),
        ("auto", None),
        (None, None),
    ],
)
def test_choices_become_grammars(choice, first):
    with client_of(FakeService(lambda _: CALL, template=TOOL_TEMPLATE)) as client:
        assert chat(client, tools=TOOLS, tool_choice=choice).status_code == 200
        constraint = submitted(client).params.constraint
        allowed = constraint.allowed(constraint.start()).nonzero()[:, 0].tolist()
        texts = {client.service.tokenizer.decode_all([token]) for token in allowed}
        assert texts == first if first else len(texts) > 100


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tools": [*TOOLS, *TOOLS]},
        {"response_format": {"type": "json_object"}},
        {"ignore_eos": True},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}]},
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": "no"}}],
                }
            ]
        },
    ],
)
def test_tools_that_cannot_be_honoured(fields):
    with client_of(FakeService(lambda _: CALL, template=TOOL_TEMPLATE)) as client:
        assert chat(client, **({"tools": TOOLS} | fields)).status_code == 400
