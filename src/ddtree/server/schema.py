"""What the API takes, in OpenAI's words.

Invariant: a field is either honoured or refused by name. `extra="forbid"` refuses what is not written here; a
field with a single allowed value is one that others know, and only that value can be honoured. Fields that change
nothing about an answer (`user`, `metadata`, cache hints) are taken and forgotten.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from ddtree.speculation.plan import LARGEST_BUDGET

__all__ = [
    "AssistantMessage",
    "ChatMessage",
    "ChatRequest",
    "CommonRequest",
    "CompletionRequest",
    "DDTreeOptions",
    "FunctionCall",
    "JsonObjectFormat",
    "JsonSchemaFormat",
    "NamedTool",
    "TextPart",
    "Tool",
    "ToolCall",
]

LARGEST_INT64 = 2**63 - 1
MOST_CHOICES = 16
MOST_STOPS = 16
MOST_LOGPROBS = 20


class Strict(BaseModel):
    """A part of a request: no unknown fields, no silent conversions, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _is_text(value: Any) -> str:
    return "text" if isinstance(value, str) else "parts"


def _broken(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


class TextPart(Strict):
    type: Literal["text"]
    text: str


# One kind of part today; the type is checked by name, so that an image is refused as an image.
Parts = Annotated[list[TextPart], Field(min_length=1)]
Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[Parts, Tag("parts")],
    Discriminator(_is_text),
]


class FunctionCall(Strict):
    name: str
    arguments: str = Field(description="A JSON object, as text.")


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class SystemMessage(Strict):
    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Strict):
    role: Literal["user"]
    content: Content
    name: str | None = None


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


class ToolMessage(Strict):
    role: Literal["tool"]
    content: Content
    tool_call_id: str


ChatMessage = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class FunctionSpec(Strict):
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(
        None, description="Arguments always follow the schema here; the flag changes nothing."
    )


class Tool(Strict):
    type: Literal["function"]
    function: FunctionSpec


class ToolName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: ToolName


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class SchemaSpec(Strict):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True)

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description="The schema is always enforced here; the flag changes nothing.")


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: SchemaSpec


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class DDTreeOptions(Strict):
    """Extension: how this request is decoded. Neither changes what is said."""

    mode: Literal["off", "chain", "tree", "shadow"] | None = Field(None, description="A cap on the server's mode.")
    budget: int | None = Field(None, ge=1, le=LARGEST_BUDGET, description="A cap on the nodes of a draft tree.")
    rounds: bool = Field(False, description="Report every round's draft tree.")


StopText = Annotated[str, Field(min_length=1)]
Stop = Annotated[
    Annotated[StopText, Tag("text")] | Annotated[list[StopText], Field(max_length=MOST_STOPS), Tag("parts")],
    Discriminator(_is_text),
]


class CommonRequest(Strict):
    """What both kinds of request have in common."""

    model: str
    temperature: float | None = Field(None, ge=0, le=2, description="1 when not given, as OpenAI has it.")
    top_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    seed: int | None = Field(None, ge=-LARGEST_INT64 - 1, le=LARGEST_INT64)
    stop: Stop | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: (
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,18}$")], Annotated[float, Field(ge=-100, le=100)]] | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    # Extensions that other servers have under the same names.
    top_k: int | None = Field(None, ge=-1, le=LARGEST_INT64, description="0 and -1 keep every token.")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    stop_token_ids: list[Annotated[int, Field(ge=0, le=LARGEST_INT64)]] | None = None
    ignore_eos: bool | None = None
    ddtree: DDTreeOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _whole_characters(cls, values: Any) -> Any:
        """JSON can write half a surrogate pair, which is no character and which no tokenizer can read."""
        left = [values]
        while left:
            value = left.pop()
            if isinstance(value, dict):
                left += [*value.keys(), *value.values()]
            elif isinstance(value, list):
                left += value
            elif isinstance(value, str) and not value.isascii() and _broken(value):
                raise ValueError("a text holds half a surrogate pair, which is no character; send whole ones")
        return values

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> CommonRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for streams alone: set stream to true, or leave it out")
        return self


class ChatRequest(CommonRequest):
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, le=LARGEST_INT64)
    max_completion_tokens: int | None = Field(None, ge=1, le=LARGEST_INT64)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, str | bool | int] | None = Field(
        None, description="Extension: variables for the model's own chat template."
    )
    # Known to others; only these values leave the answer as it is.
    modalities: list[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _belong_together(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: set it to true")
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens say different things; give one of them")
        if self.tools is None and self.tool_choice not in (None, "none"):
            raise ValueError("tool_choice needs tools")
        return self


def _prompt_kind(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return "text" if isinstance(value, str) else "ids"
    if isinstance(value[0], str):
        return "texts"
    return "lists" if isinstance(value[0], list) else "ids"


TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=LARGEST_INT64)]], Field(min_length=1)]
Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Tag("texts")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[list[TokenIds], Tag("lists")],
    Discriminator(_prompt_kind),
]


class CompletionRequest(CommonRequest):
    prompt: Prompt
    max_tokens: int | None = Field(
        None, ge=1, le=LARGEST_INT64, description="16 when not given, as OpenAI has it."
    )
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: Literal[False] | None = None
    suffix: None = None
    best_of: Literal[1] | None = None
