"""Requests of the OpenAI-compatible route of chats: messages, tools, and the form of answers."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from skyrl_tinker.protocol.answer_schemas import check_schemas, require_read, with_floats
from skyrl_tinker.protocol.schemas.base import Items, JsonObject, StrictInt
from skyrl_tinker.protocol.schemas.openai import (
    MAX_TOP_LOGPROBS,
    NEUTRAL,
    Neutral,
    OpenAIMessage,
    OpenAIRequest,
    StrictBool,
    Unread,
)
from skyrl_tinker.protocol.schemas.sampling import MaxTokens

MAX_TOOLS = 128
Schema = Annotated[JsonObject, BeforeValidator(with_floats)]
"""JSON schema. Samplers read bounds as floats, so that one of more than 64 bits is no other number there."""
NEUTRAL_IN_CHATS: Neutral = {
    "tools": ([],),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "top_logprobs": (0,),
    "echo": (False,),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "include_reasoning": (True,),
}
NEUTRAL_IN_MESSAGES: Neutral = {"tool_calls": ([],), "annotations": ([],)}
NEUTRAL_IN_TOOL_CALLS: Neutral = {"index": tuple(range(MAX_TOOLS))}
"""An answer that was put together from a stream has them still."""
SET_HERE = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
"""Arguments of a chat template that are no client's: given by the request's own fields, or fixed."""


def _role(value: Any) -> Any:
    """Read OpenAI's newer name of the system."""
    return "system" if value == "developer" else value


def _content(value: Any) -> Any:
    parts = value if isinstance(value, list) else []
    kinds = [part.get("type") if isinstance(part, dict) else part for part in parts]
    if other := [kind for kind in kinds if kind != "text"]:
        raise ValueError(f"only text is supported, not {other[0]}")
    return value


def _template_arguments(value: Any) -> Any:
    if isinstance(value, Mapping) and (taken := [name for name in SET_HERE if name in value]):
        raise ValueError(f"{taken[0]} is set by the server, expected other arguments of the chat template")
    return value


def _object(text: str) -> str:
    """Return a JSON object as it is, {} for other text: one engine shows that, another refuses the chat."""
    try:
        return text if isinstance(orjson.loads(text), dict) else "{}"
    except orjson.JSONDecodeError:
        return "{}"


class TextPart(OpenAIMessage):
    type: Literal["text"]
    text: str
    cache_control: Unread = None


class FunctionDefinition(OpenAIMessage):
    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    description: str | None = None
    parameters: Schema | None = Field(None, description="JSON schema of the arguments")
    strict: StrictBool | None = Field(None, description="Sample arguments that fit the schema only")


class Tool(OpenAIMessage):
    type: Literal["function"] = "function"
    function: FunctionDefinition


class JsonSchema(OpenAIMessage):
    """Schema of an answer. `strict` changes nothing: every answer fits it."""

    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    description: str | None = None
    of_answer: Schema = Field(alias="schema")
    strict: StrictBool | None = None

    @field_validator("of_answer")
    @classmethod
    def _is_short(cls, schema: dict[str, Any]) -> dict[str, Any]:
        check_schemas(schema)
        require_read(schema)
        return schema


class ResponseFormat(OpenAIMessage):
    """Form of an answer. One that ends by max_tokens is cut, and no JSON."""

    type: Literal["json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_fits_the_type(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("expected json_schema with type json_schema, and only there")
        return self


class FunctionCall(OpenAIMessage):
    """`arguments`: JSON, as the model wrote it; the model is shown {} for text that is no object."""

    name: str
    arguments: Annotated[str, AfterValidator(_object)] = "{}"


class ToolCall(OpenAIMessage):
    neutral: ClassVar[Neutral] = NEUTRAL_IN_TOOL_CALLS

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(OpenAIMessage):
    """Message of a chat. `reasoning`, of earlier answers: for templates that show it to the model again.

    An assistant's content may be null or absent: that is an answer of tool calls, or one cut in its
    reasoning.
    """

    neutral: ClassVar[Neutral] = NEUTRAL_IN_MESSAGES

    role: Annotated[Literal["system", "user", "assistant", "tool"], BeforeValidator(_role)]
    content: Annotated[str | Items[TextPart], BeforeValidator(_content)] = ""
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    cache_control: Unread = None

    @model_validator(mode="before")
    @classmethod
    def _reasoning_has_both_names(cls, payload: Any) -> Any:
        """Fill both: one sampling engine reads the one, another the other where it counts tokens."""
        names, fields = ("reasoning", "reasoning_content"), payload if isinstance(payload, Mapping) else {}
        given = [fields[name] for name in names if fields.get(name) is not None]
        return {**payload, **dict.fromkeys(names, given[0])} if given else payload

    @model_validator(mode="after")
    def _fields_fit_the_role(self) -> "ChatMessage":
        if self.role != "assistant" and "content" not in self.model_fields_set:
            raise ValueError("content is missing or null, expected text")
        if self.role != "assistant" and self.tool_calls:
            raise ValueError(f"tool_calls of role {self.role}, expected role assistant")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError(f"found role {self.role}, expected tool_call_id with role tool, and only there")
        return self


class ChatCompletionRequest(OpenAIRequest):
    """Body of /oai/api/v1/chat/completions."""

    neutral: ClassVar[Neutral] = {**NEUTRAL, **NEUTRAL_IN_CHATS}

    messages: Annotated[Items[ChatMessage], Field(min_length=1)]
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: StrictBool = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    chat_template_kwargs: Annotated[JsonObject, BeforeValidator(_template_arguments)] | None = Field(
        None, description="Variables of the model's chat template"
    )
    tools: Annotated[Items[Tool], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="Functions that the model may call; needs the server's setting tool_parser"
    )
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: StrictBool = True
    response_format: ResponseFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    separate_reasoning: StrictBool | None = Field(
        None, description="Reasoning in a field of its own; needs the server's setting reasoning_parser"
    )

    @model_validator(mode="after")
    def _fields_agree(self) -> "ChatCompletionRequest":
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) == 2:
            raise ValueError("max_tokens and max_completion_tokens: expected one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        effort = (self.chat_template_kwargs or {}).get("reasoning_effort", self.reasoning_effort)
        if self.reasoning_effort not in (None, effort):
            raise ValueError("reasoning_effort: another one is in chat_template_kwargs, expected one of them")
        return self

    @property
    def called(self) -> list[Tool]:
        """Return the tools that an answer may call."""
        return self.tools or [] if self.tool_choice == "auto" else []

    @property
    def calls_once(self) -> bool:
        """Return whether an answer that may call tools has one call at most."""
        return bool(self.called) and not self.parallel_tool_calls

    @property
    def calls_strictly(self) -> bool:
        """Return whether arguments of a call must fit the tool's schema."""
        return any(tool.function.strict for tool in self.called)

    @property
    def restricted_by(self) -> str | None:
        if self.response_format is not None:
            return "response_format"
        if self.calls_strictly:
            return "tools"
        return "parallel_tool_calls" if self.calls_once else None

    @model_validator(mode="after")
    def _arguments_can_be_restricted(self) -> "ChatCompletionRequest":
        if self.restricted_by != "response_format":
            schemas = [tool.function.parameters or {} for tool in self.called] if self.restricted_by else []
            try:
                check_schemas(*schemas)
                for tool in self.called:
                    if tool.function.strict:  # grammars take any arguments of the others
                        require_read(tool.function.parameters or {})
            except ValueError as error:
                raise ValueError(f"tools: parameters: {error}") from error
        return self

    @model_validator(mode="after")
    def _logprobs_are_of_the_model_alone(self) -> "ChatCompletionRequest":
        """Refuse logprobs of sequences that a grammar restricts: they are of another distribution."""
        if self.logprobs and self.restricted_by:
            words = {"tools": "a strict tool", "parallel_tool_calls": "parallel_tool_calls: false"}
            grammar = words.get(self.restricted_by, self.restricted_by)
            raise ValueError(f"logprobs: not with {grammar}, whose grammar changes the distribution")
        if self.called and self.response_format is not None:
            raise ValueError("response_format: not with tools, whose calls are of another form")
        return self
