"""Requests of the OpenAI-compatible routes, and the errors that OpenAI's clients read.

An allow-list: fields that are not declared here are refused by name. A null counts as not given.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, Strict, ValidationError, model_validator

from skyrl_tinker.errors import NotFoundError, SkyrlTinkerError, UserError
from skyrl_tinker.protocol.schemas.base import MAX_INT64, Message, StrictInt, describe

MAX_CHOICES = 128
MAX_TEXTS = 1024
"""Most completions of one request: prompts x n."""
MAX_STOPS = 64
MAX_TOP_LOGPROBS = 20
OWNER_HEADER = "X-Skyrl-Tinker-Owner"
"""Set by the API for the engine: the owner whose checkpoints the request may name. Clients cannot set it."""
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for completions; a chat's is the rest of the context

StrictBool = Annotated[bool, Strict()]
Tokens = list[StrictInt]


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


def _content(value: Any) -> Any:
    parts = value if isinstance(value, list) else []
    kinds = [part.get("type") if isinstance(part, dict) else part for part in parts]
    if other := [kind for kind in kinds if kind != "text"]:
        raise ValueError(f"only text is supported, not {other[0]}")
    return value


class OpenAIMessage(Message):
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, payload: Any) -> Any:
        if not isinstance(payload, Mapping):
            return payload
        return {key: value for key, value in payload.items() if value is not None}


class StreamOptions(OpenAIMessage):
    include_usage: StrictBool = False


class TextPart(OpenAIMessage):
    type: Literal["text"]
    text: str


class ChatMessage(OpenAIMessage):
    role: Literal["system", "user", "assistant"]
    content: Annotated[str | list[TextPart], BeforeValidator(_content)]
    name: str | None = None


class OpenAIRequest(OpenAIMessage):
    """Fields of both routes. `user` is accepted unread: it names the requester and changes nothing."""

    model: str = Field(description="A base model's name, or tinker://<run>/sampler_weights/<name>")
    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] = 1
    max_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    seed: Annotated[StrictInt, Field(ge=0, le=MAX_INT64 - MAX_CHOICES)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> "OpenAIRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self


class CompletionRequest(OpenAIRequest):
    """Body of /oai/api/v1/completions."""

    prompt: Annotated[str | list[str] | Tokens | list[Tokens], BeforeValidator(_prompt)]
    echo: StrictBool = False
    logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

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

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    logprobs: StrictBool = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> "ChatCompletionRequest":
        if self.max_tokens == 0:
            raise ValueError("max_tokens is 0, expected at least 1")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens: expected one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self


class ListedModel(Message):
    id: str
    created: int = 0
    owned_by: str = "skyrl-tinker"
    object: Literal["model"] = "model"


class ModelList(Message):
    """Base models. Sampler weights are not listed, as they may be many, but every path can be used."""

    data: list[ListedModel]
    object: Literal["list"] = "list"


R = TypeVar("R", bound=OpenAIRequest)


def parse_openai(model: type[R], payload: Any) -> R:
    """Validate a decoded JSON body. Raises FieldError that names each wrong field with what was found."""
    try:
        return model.model_validate(payload)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        field = str(problems[0]["loc"][0]) if problems[0]["loc"] else ""
        raise FieldError("; ".join(describe(problem) for problem in problems), field) from error


def error_body(error: SkyrlTinkerError) -> dict[str, Any]:
    """Return an error in the form that OpenAI's clients read."""
    param: str | None = None
    code: str | None = None
    if isinstance(error, FieldError):
        param, code = error.field or None, error.code
    elif isinstance(error, NotFoundError):
        param, code = "model", "model_not_found"
    kind = "invalid_request_error" if error.category == "user" else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}
