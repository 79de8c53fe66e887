"""Requests of the OpenAI-compatible routes, and the errors that OpenAI's clients read.

An allow-list: fields that are not declared here are refused by name. A null counts as not given, and so does
a field of NEUTRAL with a value that asks for nothing: clients send those of OpenAI and of sampling engines.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from skyrl_tinker.errors import NotFoundError, SkyrlTinkerError, UserError
from skyrl_tinker.protocol.schemas.answer_schemas import check_schemas, require_read
from skyrl_tinker.protocol.schemas.base import MOST_PROBLEMS, Items, Message, StrictInt, describe
from skyrl_tinker.protocol.schemas.sampling_rules import (
    MaxTokens,
    Seed,
    Temperature,
    TopK,
    TopP,
    check_stops,
)

MAX_CHOICES = 128
MAX_TEXTS = 1024
"""Most completions of one request: prompts x n."""
MAX_TOP_LOGPROBS = 20
MAX_TOOLS = 128
OWNER_HEADER = "X-Skyrl-Tinker-Owner"
"""Set by the API for the engine: the owner whose checkpoints the request may name. Clients cannot set it."""
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for completions; a chat's is the rest of the context

StrictBool = Annotated[bool, Strict()]
StrictText = Annotated[str, Strict()]
Tokens = Items[StrictInt]
Stops = tuple[StrictText | StrictInt, ...]
Unread = Annotated[Any, Field(exclude=True)]
"""Field that changes no answer."""
Neutral = Mapping[str, tuple[Any, ...]]
"""By field: the values that ask for nothing."""

NEUTRAL: Neutral = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "min_p": (0,),
    "min_tokens": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "priority": (0,),
}
NEUTRAL_IN_COMPLETIONS: Neutral = {"suffix": ("",), "logprobs": (False,)}
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
NEUTRAL_IN_STREAM_OPTIONS: Neutral = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}

SET_HERE = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
"""Arguments of a chat template that are no client's: given by the request's own fields, or fixed."""


class FieldError(UserError):
    """Error that names the field, and perhaps one of OpenAI's codes."""

    def __init__(self, message: str, field: str, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.code = code


def _prompt(value: Any) -> Any:
    """Refuse a wrong prompt with one message, not one for each possible form."""
    kinds = {type(item) for item in value} if isinstance(value, list) and value else set()
    if isinstance(value, str) or kinds in ({str}, {int}, {list}):
        return value
    raise ValueError("expected text, a list of texts, a list of token ids, or a list of such lists")


def _role(value: Any) -> Any:
    """Read OpenAI's newer name of the system."""
    return "system" if value == "developer" else value


def _content(value: Any) -> Any:
    parts = value if isinstance(value, list) else []
    kinds = [part.get("type") if isinstance(part, dict) else part for part in parts]
    if other := [kind for kind in kinds if kind != "text"]:
        raise ValueError(f"only text is supported, not {other[0]}")
    return value


def _stop(value: Any) -> Any:
    """Refuse wrong stops with one message, not one for each possible form."""
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, bool) or not isinstance(item, str | int) for item in items):
        raise ValueError("expected text, a token id, or a list of those")
    check_stops(items)
    return items


def _count(value: Any) -> Any:
    """Read a boolean as chats mean it: the logprobs of the sampled tokens alone."""
    return 0 if value is True else value


def _template_arguments(value: Any) -> Any:
    if isinstance(value, Mapping) and (taken := [name for name in SET_HERE if name in value]):
        raise ValueError(f"{taken[0]} is set by the server, expected other arguments of the chat template")
    return value


class OpenAIMessage(Message):
    model_config = ConfigDict(extra="forbid")
    neutral: ClassVar[Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_what_asks_for_nothing(cls, payload: Any) -> Any:
        if not isinstance(payload, Mapping):
            return payload
        given = {
            key: value
            for key, value in payload.items()
            if value is not None and not _among(value, cls.neutral.get(key, ()))
        }
        unknown = [key for key in given if key not in cls.__pydantic_fields__]
        for key in unknown[MOST_PROBLEMS:]:  # each takes a kilobyte as a problem, though it is not reported
            del given[key]
        return given


def _among(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Return whether one of them is equal; 0 is not False."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)


class StreamOptions(OpenAIMessage):
    neutral: ClassVar[Neutral] = NEUTRAL_IN_STREAM_OPTIONS

    include_usage: StrictBool = False


class TextPart(OpenAIMessage):
    type: Literal["text"]
    text: str
    cache_control: Unread = None


class FunctionDefinition(OpenAIMessage):
    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments")
    strict: StrictBool | None = Field(None, description="Sample arguments that fit the schema only")


class Tool(OpenAIMessage):
    type: Literal["function"] = "function"
    function: FunctionDefinition


class JsonSchema(OpenAIMessage):
    """Schema of an answer. `strict` changes nothing: every answer fits it."""

    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    description: str | None = None
    of_answer: dict[str, Any] = Field(alias="schema")
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
    """`arguments`: JSON, as the model wrote it."""

    name: str
    arguments: str = ""


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

    @model_validator(mode="after")
    def _fields_fit_the_role(self) -> "ChatMessage":
        if self.role != "assistant" and "content" not in self.model_fields_set:
            raise ValueError("content is missing")
        if self.role != "assistant" and self.tool_calls:
            raise ValueError(f"tool_calls of role {self.role}, expected role assistant")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError(f"found role {self.role}, expected tool_call_id with role tool, and only there")
        return self


class OpenAIRequest(OpenAIMessage):
    """Fields of both routes. Those at the end are accepted unread: they change no answer."""

    neutral: ClassVar[Neutral] = NEUTRAL

    model: str = Field(description="A base model's name, or tinker://<run>/sampler_weights/<name>")
    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] = 1
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    seed: Seed | None = None
    top_k: TopK = -1
    stop: Annotated[Stops, BeforeValidator(_stop, json_schema_input_type=str | int | Stops)] = Field(
        (), description="Texts and token ids that end a sequence, as does the end of text"
    )
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def restricted_by(self) -> str | None:
        """Return the field that restricts answers by a grammar, if there is one."""
        return None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> "OpenAIRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self


class CompletionRequest(OpenAIRequest):
    """Body of /oai/api/v1/completions. `logprobs`: how many of the likeliest tokens; true is 0."""

    neutral: ClassVar[Neutral] = {**NEUTRAL, **NEUTRAL_IN_COMPLETIONS}

    prompt: Annotated[str | Items[str] | Tokens | Items[Tokens], BeforeValidator(_prompt)]
    add_special_tokens: StrictBool = Field(
        True, description="Have the tokenizer add its own, as of a beginning, to a prompt of text"
    )
    echo: StrictBool = False
    max_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    best_of: StrictInt | None = None
    logprobs: (
        Annotated[
            StrictInt,
            BeforeValidator(_count, json_schema_input_type=bool | int),
            Field(ge=0, le=MAX_TOP_LOGPROBS),
        ]
        | None
    ) = None

    @field_validator("best_of")
    @classmethod
    def _all_are_returned(cls, best_of: int, checked: ValidationInfo) -> int:
        if best_of != checked.data.get("n"):
            raise ValueError("choosing the best is not supported, expected the value of n")
        return best_of

    @model_validator(mode="after")
    def _something_to_answer(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0, expected at least 1 without echo")
        return self

    @model_validator(mode="after")
    def _not_too_much_to_answer(self) -> "CompletionRequest":
        prompts = 1 if isinstance(self.prompt, str) or isinstance(self.prompt[0], int) else len(self.prompt)
        if prompts * self.n > MAX_TEXTS:
            raise ValueError(f"prompt: {prompts} prompts x n {self.n}, expected at most {MAX_TEXTS} together")
        return self


class ChatCompletionRequest(OpenAIRequest):
    """Body of /oai/api/v1/chat/completions."""

    neutral: ClassVar[Neutral] = {**NEUTRAL, **NEUTRAL_IN_CHATS}

    messages: Annotated[Items[ChatMessage], Field(min_length=1)]
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: StrictBool = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(_template_arguments)] | None = Field(
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


class ListedModel(Message):
    id: str
    created: int = 0
    owned_by: str = "skyrl-tinker"
    object: Literal["model"] = "model"


class ModelList(Message):
    """The base model. Sampler weights are not listed, as they may be many, but every path can be used."""

    data: list[ListedModel]
    object: Literal["list"] = "list"


R = TypeVar("R", bound=OpenAIRequest)


def parse_openai(model: type[R], payload: Any) -> R:
    """Validate a decoded JSON body. Raises FieldError that names each wrong field with the value found."""
    try:
        return model.model_validate(payload)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        first = problems[0]
        # Validators of a whole body begin with the field that is wrong.
        named = first["msg"].removeprefix("Value error, ").partition(":")[0]
        field = str(first["loc"][0]) if first["loc"] else named if named in model.model_fields else ""
        raise FieldError(describe(problems), field) from error


def error_body(error: SkyrlTinkerError, text: str = "") -> dict[str, Any]:
    """Return an error in the form that OpenAI's clients read. `text`: default its own."""
    param: str | None = None
    code: str | None = None
    if isinstance(error, FieldError):
        param, code = error.field or None, error.code
    elif isinstance(error, NotFoundError):
        param, code = "model", "model_not_found"
    kind = "invalid_request_error" if error.category == "user" else "server_error"
    return {"error": {"message": text or str(error), "type": kind, "param": param, "code": code}}
