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

from skyrl_tinker.domain.samples import generated
from skyrl_tinker.errors import NotFoundError, SkyrlTinkerError, UserError
from skyrl_tinker.protocol.schemas.base import MOST_PROBLEMS, Items, Message, StrictFloat, StrictInt, describe
from skyrl_tinker.protocol.schemas.sampling import Seed, Temperature, TopK, TopP, check_stops

MAX_CHOICES = 128
MAX_TEXTS = 1024
"""Most completions of one request: prompts x n."""
MAX_TOP_LOGPROBS = 20
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
NEUTRAL_IN_STREAM_OPTIONS: Neutral = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}


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


class OpenAIRequest(OpenAIMessage):
    """Fields of both routes. Those at the end are accepted unread: they change no answer."""

    neutral: ClassVar[Neutral] = NEUTRAL

    model: str = Field(description="A base model's name, or tinker://<run>/sampler_weights/<name>")
    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] = 1
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    presence_penalty: StrictFloat = Field(0.0, ge=-2, le=2)
    frequency_penalty: StrictFloat = Field(0.0, ge=-2, le=2)
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
    def sequences(self) -> int:
        """Number of sequences that are generated for each prompt."""
        return generated(self.n, self.temperature)

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
