"""From a request to submissions: one for each choice of each prompt, checked and bounded.

Runs on a worker thread: templates, tokenizers and grammars take their time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree.engine.service import Submission
from ddtree.server.backend import Backend
from ddtree.server.grammar import Grammar
from ddtree.server.limits import Limits
from ddtree.server.problem import Problem
from ddtree.server.schema import (
    AssistantMessage,
    ChatMessage,
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedTool,
    TextPart,
    Tool,
)
from ddtree.server.tools import OPEN
from ddtree.speculation.noise import choice_seed
from ddtree.speculation.params import SamplingParams

__all__ = ["Work", "prepare_chat", "prepare_completion"]

COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
# Variables of a template that the server fills in itself.
RESERVED = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "chat_template",
    }
)


@dataclass(frozen=True, slots=True)
class Work:
    """What a request asks of the engine. submissions: in the order of choices. prompts: tokens of each prompt.

    tools: whether the text may hold tool calls.
    """

    submissions: tuple[Submission, ...]
    prompts: tuple[int, ...]
    tools: bool = False


def prepare_chat(request: ChatRequest, backend: Backend, limits: Limits) -> Work:
    """Problem or RequestError when something cannot be honoured."""
    _check_model(request.model, backend)
    tools = _tools(request, backend)
    grammar = _chat_grammar(request, tools, backend)
    shown = None if tools is None else [tool.model_dump(exclude_none=True) for tool in tools]
    prompt = backend.chat_ids([_message(m) for m in request.messages], shown, _variables(request))
    _check_choices(request, 1, backend, limits)
    most = request.max_completion_tokens or request.max_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    submissions = _choices(request, prompt, most, logprobs, grammar, backend, limits)
    return Work(submissions, (len(prompt),), tools is not None)


def prepare_completion(request: CompletionRequest, backend: Backend, limits: Limits) -> Work:
    """Problem or RequestError when something cannot be honoured."""
    _check_model(request.model, backend)
    prompts = _prompts(request.prompt, backend)
    _check_choices(request, len(prompts), backend, limits)
    submissions: list[Submission] = []
    for prompt in prompts:
        most = request.max_tokens or COMPLETION_TOKENS
        submissions += _choices(request, prompt, most, request.logprobs, None, backend, limits)
    return Work(tuple(submissions), tuple(len(prompt) for prompt in prompts))


def _check_model(name: str, backend: Backend) -> None:
    if name not in backend.names:
        known = ", ".join(backend.names)
        raise Problem(
            404,
            f"model: {name!r} is not served here; this server has {known}",
            param="model",
            code="model_not_found",
        )


def _check_choices(request: CommonRequest, prompts: int, backend: Backend, limits: Limits) -> None:
    """More answers than there are places would be told to come back later for ever."""
    wanted, most = prompts * (request.n or 1), min(limits.choices, backend.places)
    if wanted > most:
        raise Problem(
            400,
            f"n: {prompts} prompts with n = {request.n or 1} are more than the {most} answers that this server "
            "gives at once; send them as several requests",
            param="n",
            code="too_many_choices",
        )


def _choices(
    request: CommonRequest,
    prompt: tuple[int, ...],
    most: int | None,
    logprobs: int | None,
    grammar: Grammar | None,
    backend: Backend,
    limits: Limits,
) -> tuple[Submission, ...]:
    room = backend.max_context - len(prompt)
    if room < 1:
        raise Problem(
            400,
            f"the prompt has {len(prompt)} tokens, but the context holds {backend.max_context} for prompt and "
            "answer together; shorten it",
            code="context_length_exceeded",
        )
    if most is not None and limits.tokens is not None and most > limits.tokens:
        raise Problem(
            400,
            f"max_tokens: this server answers with at most {limits.tokens} tokens; got {most}",
            param="max_tokens",
        )
    tokens = min(room, most or room, limits.tokens or room)
    extension = request.ddtree
    return tuple(
        Submission(
            prompt=prompt,
            params=_sampling(
                request, tokens, None if request.seed is None else choice_seed(request.seed, i), grammar
            ),
            mode=extension.mode if extension else None,
            budget=extension.budget if extension else None,
            logprobs=logprobs,
            records=bool(extension and extension.rounds),
        )
        for i in range(request.n or 1)
    )


def _sampling(request: CommonRequest, tokens: int, seed: int | None, grammar: Grammar | None) -> SamplingParams:
    bias = request.logit_bias or {}
    return SamplingParams(
        temperature=_or(request.temperature, 1.0),
        top_k=max(request.top_k or 0, 0),
        top_p=_or(request.top_p, 1.0),
        min_p=_or(request.min_p, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        logit_bias={int(token): shift for token, shift in bias.items()},
        seed=seed,
        max_tokens=tokens,
        stop=(request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ()),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        constraint=None if grammar is None else grammar.constraint(),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _prompts(prompt: Any, backend: Backend) -> list[tuple[int, ...]]:
    if isinstance(prompt, str):
        return [backend.encode(prompt)]
    if all(isinstance(item, int) for item in prompt):
        return [tuple(prompt)]
    return [backend.encode(item) if isinstance(item, str) else tuple(item) for item in prompt]


def _message(message: ChatMessage) -> dict[str, Any]:
    """A message as templates expect it: text for content, calls with their arguments as objects."""
    fields = message.model_dump(exclude_none=True)
    fields["role"] = "system" if message.role == "developer" else message.role
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content if isinstance(part, TextPart))
    fields["content"] = content or ""
    if isinstance(message, AssistantMessage) and message.tool_calls:
        for call in fields["tool_calls"]:
            call["function"]["arguments"] = _arguments(call["function"]["arguments"])
    return fields


def _arguments(text: str) -> Mapping[str, Any]:
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise Problem(400, "messages: the arguments of a tool call are no JSON object", param="messages")
    return arguments


def _variables(request: ChatRequest) -> Mapping[str, Any]:
    variables = request.chat_template_kwargs or {}
    taken = sorted(RESERVED & set(variables))
    if taken:
        raise Problem(
            400, f"chat_template_kwargs: {taken[0]} is filled in by the server", param="chat_template_kwargs"
        )
    return variables


def _tools(request: ChatRequest, backend: Backend) -> Sequence[Tool] | None:
    """The tools that the model is shown; None where it is shown none."""
    if not request.tools or request.tool_choice == "none":
        return None
    if OPEN not in backend.tokenizer.chat_template:
        raise Problem(
            400,
            f"tools: this model's chat template does not write {OPEN}, the form of tool calls that this server "
            "reads; leave tools out, or serve a model that was trained with them",
            param="tools",
            code="unsupported",
        )
    names = [tool.function.name for tool in request.tools]
    if len(set(names)) < len(names):
        raise Problem(400, "tools: two tools have the same name", param="tools")
    return request.tools


def _chat_grammar(request: ChatRequest, tools: Sequence[Tool] | None, backend: Backend) -> Grammar | None:
    wanted = request.response_format
    structured = isinstance(wanted, JsonObjectFormat | JsonSchemaFormat)
    if structured and tools:
        raise Problem(
            400,
            "response_format: cannot be enforced together with tools; send one of them",
            param="response_format",
        )
    if (structured or tools) and request.ignore_eos:
        raise Problem(
            400,
            "ignore_eos: nothing may follow a finished JSON document, so it cannot be ignored with a grammar",
            param="ignore_eos",
        )
    if isinstance(wanted, JsonSchemaFormat):
        return backend.grammars.json_schema(wanted.json_schema.schema_)
    if isinstance(wanted, JsonObjectFormat):
        return backend.grammars.json_object()
    if not tools:
        return None
    choice = request.tool_choice
    schemas = {tool.function.name: tool.function.parameters for tool in tools}
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in schemas:
            raise Problem(400, f"tool_choice: {name!r} is not among the tools", param="tool_choice")
        return backend.grammars.tool_calls({name: schemas[name]}, required=True, parallel=False)
    parallel = request.parallel_tool_calls is not False
    return backend.grammars.tool_calls(schemas, required=choice == "required", parallel=parallel)
