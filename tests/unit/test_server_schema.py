"""What a request may hold: what is honoured, and how everything else is refused by name."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from ddtree.server.problem import Problem, from_validation
from ddtree.server.schema import ChatRequest, CompletionRequest

HELLO = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "toy", "prompt": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def refused(kind, body):
    """The problem that a body brings."""
    with pytest.raises(ValidationError) as found:
        kind.model_validate(body)
    return from_validation([{**error, "loc": ("body", *error["loc"])} for error in found.value.errors()])


@pytest.mark.parametrize(
    ("change", "param"),
    [
        # Fields of others that would change the answer.
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"verbosity": "low"}, "verbosity"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"functions": []}, "functions"),
        ({"guided_json": {}}, "guided_json"),
        ({"thinking_budget": 7}, "thinking_budget"),
        ({"tempertaure": 0.5}, "tempertaure"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"modalities": ["audio"]}, "modalities.0"),
        ({"store": True}, "store"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"ddtree": {"mode": "fast"}}, "ddtree.mode"),
        ({"ddtree": {"budget": 0}}, "ddtree.budget"),
        ({"ddtree": {"budget": 256}}, "ddtree.budget"),
        ({"ddtree": {"bugdet": 3}}, "ddtree.bugdet"),
        # Numbers that are none, or outside of OpenAI's own bounds.
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": float("inf")}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": True}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_completion_tokens": "many"}, "max_completion_tokens"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x.[key]"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"5": float("nan")}}, "logit_bias.5"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop.1"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [3]}, "stop.0"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0"),
        ({"messages": [{"content": "x"}]}, "messages.0"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x", "function_call": {}}]}, "messages.0.function_call"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
        ({"messages": [{"role": "assistant", "audio": {"id": "x"}}]}, "messages.0.audio"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "not a name"}}]}, "tools.0.function.name"),
        ({"model": 5}, "model"),
        ({"model": None}, "model"),
    ],
)
def test_refused_by_name(change, param):
    problem = refused(ChatRequest, HELLO | change)
    assert problem.status == 400
    assert problem.param == param
    assert param.split(".")[0] in problem.message


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "surrogate"),
        ({"metadata": {"\udc00": "x"}}, "surrogate"),
    ],
)
def test_what_does_not_belong_together(change, word):
    assert word in refused(ChatRequest, HELLO | change).message


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "modalities": ["text"]},
        {"max_tokens": 4, "max_completion_tokens": 4},
        {"temperature": 0, "top_p": 1, "n": 16, "seed": -(2**63), "stop": "x"},
        {"stop": ["a", "b"], "logit_bias": {"5": -100, "6": 2.5}},
        {"stop": None, "temperature": None, "n": None, "tools": None, "response_format": None, "seed": None},
        {"logprobs": True, "top_logprobs": 20},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": True}}},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}]}]},
        {"ddtree": {"mode": "chain", "budget": 255, "rounds": True}, "top_k": -1, "min_p": 0.1},
    ],
)
def test_honoured(change):
    ChatRequest.model_validate(HELLO | change)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"messages": []}, "messages"),
    ],
)
def test_completions_refuse_by_name(change, param):
    assert refused(CompletionRequest, TEXT | change).param == param


@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_prompts_of_all_kinds(prompt):
    assert CompletionRequest.model_validate(TEXT | {"prompt": prompt}).prompt == prompt


@pytest.mark.parametrize("prompt", [None, 5, [], [True], ["a", 1], [[-1]], {"a": 1}])
def test_no_prompts(prompt):
    assert "prompt" in (refused(CompletionRequest, TEXT | {"prompt": prompt}).param or "")


def test_a_problem_is_json_whatever_it_quotes():
    problem = Problem(400, "bad \ud83d " + "x" * 10_000, param="a\udc00", retry_after_s=0.2)
    body = json.loads(problem.response().body)
    assert len(body["error"]["message"]) <= 600
    assert problem.headers["Retry-After"] == "1"
