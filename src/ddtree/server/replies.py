"""What the API gives, in OpenAI's words. What is ours has `ddtree` in its name."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from ddtree.server.schema import ToolCall

__all__ = [
    "ChatChoice",
    "ChatCompletion",
    "ChatLogprobs",
    "ChatTokenLogprob",
    "CompletionChoice",
    "CompletionLogprobs",
    "ErrorBody",
    "Model",
    "ModelList",
    "ResponseMessage",
    "RoundReport",
    "SpeculationUsage",
    "TextCompletion",
    "TopLogprob",
    "Usage",
]


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprob]
    refusal: None = None


class SpeculationUsage(BaseModel):
    """Extension: how the answer was decoded. All counts are of emitted tokens, all choices together."""

    rounds: int = Field(
        description="Verification passes after the first token, which the prompt's own pass gives."
    )
    acceptance_length: float | None = Field(description="Tokens per round, bonus included; null without a round.")
    passes_saved: int = Field(description="How many more passes plain decoding would have taken.")
    prefill_s: float
    decode_s: float
    would_commit: int | None = Field(None, description="In mode shadow: what the trees would have committed.")


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    ddtree: SpeculationUsage


class RoundReport(BaseModel):
    """Extension: one round's draft tree, node 0 the anchor, parents before children."""

    mode: str
    texts: list[str]
    tokens: list[int]
    parents: list[int]
    depths: list[int]
    probabilities: list[float]
    path: list[int]
    emitted: list[str]
    would_commit: int | None = None


class ResponseMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: ResponseMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    ddtree_rounds: list[RoundReport] | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    finish_reason: str
    logprobs: CompletionLogprobs | None = None
    ddtree_rounds: list[RoundReport] | None = None


class TextCompletion(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "ddtree"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail
