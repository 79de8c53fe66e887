"""Sampling sessions and asample; parameters of samples and their rules, which OpenAI's clients have, too."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy.typing as npt
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    Strict,
    ValidationInfo,
    field_validator,
    model_validator,
)

from skyrl_tinker.domain.samples import SEEDS
from skyrl_tinker.errors import NotSupportedError, UserError
from skyrl_tinker.protocol.schemas.base import (
    MAX_INT32,
    Integers,
    Items,
    Message,
    Numbers,
    SampleSeqId,
    SessionSeqId,
    StrictFloat,
    StrictInt,
    StrictMessage,
    StrictRequest,
    Text,
    WideInt,
    as_integers,
)

MAX_STOPS = 1024
"""Most stop strings or tokens: the sampler looks for each of them after every token."""
MaxTokens = Annotated[StrictInt, Field(ge=1)]
Temperature = Annotated[StrictFloat, Field(ge=0, le=2)]
TopP = Annotated[StrictFloat, Field(gt=0, le=1)]
TopK = Annotated[
    StrictInt,
    Field(ge=-1, le=MAX_INT32, description="-1 or 0: no limit"),
    AfterValidator(lambda top_k: top_k or -1),
]
Seed = Annotated[WideInt, AfterValidator(lambda seed: seed % SEEDS)]
"""Of up to 64 bits, signed ones too: taken modulo 2^63, so that -1 is 2^63 - 1."""
TEXT = "encoded_text"
"""The kind of chunk that holds tokens."""
NoneAsFalse = BeforeValidator(lambda value: False if value is None else value)
NoneAsZero = BeforeValidator(lambda value: 0 if value is None else value)


def check_stops(stops: Sequence[str | int]) -> None:
    """Raise ValueError for too many, or for an empty string."""
    if len(stops) > MAX_STOPS:
        raise ValueError(f"{len(stops)} entries, expected at most {MAX_STOPS}")
    if "" in stops:
        raise ValueError("an empty text, expected at least one character")


def overflow(prompt_tokens: int, max_tokens: int, context: int, base_model: str) -> str:
    """Word the refusal of a request that exceeds the context of a base model, each of which has its own."""
    return (
        f"{prompt_tokens} prompt tokens + {max_tokens} max_tokens > {context} "
        f"(the setting context_length of base model {base_model})"
    )


class CreateSamplingSessionRequest(StrictRequest):
    session_id: Text
    sampling_session_seq_id: SessionSeqId
    base_model: Text | None = None
    model_path: Text | None = None


class CreateSamplingSessionResponse(Message):
    sampling_session_id: str


class GetSamplerResponse(Message):
    sampler_id: str
    base_model: str
    model_path: str | None = None


class Chunk(StrictMessage):
    """Part of a prompt. Text has `tokens`; of other kinds only the name is kept, to be refused by name."""

    type: str = TEXT
    tokens: Items[StrictInt] | None = None

    @model_validator(mode="before")
    @classmethod
    def _name_the_kind(cls, chunk: Any) -> Any:
        """Infer the `type`, which SDKs up to 0.16 do not send, from the keys."""
        if not isinstance(chunk, dict):
            return chunk
        kind = _kind(chunk)
        return {**chunk, "type": kind} if kind == TEXT else {"type": kind}

    def text(self, where: str) -> list[int]:
        """Return the tokens. Raises NotSupportedError for another kind, UserError if there are none."""
        require_text(self.type, where)
        if self.tokens is None:
            raise UserError(f"{where} has no tokens")
        return self.tokens


def require_text(kind: str, where: str) -> None:
    """Raise NotSupportedError for another kind of chunk."""
    if kind != TEXT:
        raise NotSupportedError(
            f"{where} is of kind {kind}, expected {TEXT}: images and audio are not supported yet"
        )


def _kind(chunk: Mapping[str, Any]) -> str:
    """Return the kind of a JSON chunk, also of one without a `type`."""
    if chunk.get("type") is not None:
        return str(chunk["type"])
    for key, kind in (("location", "image_asset_pointer"), ("data", "image"), ("dmel", "dmel")):
        if key in chunk:
            return kind
    return TEXT


class ModelInput(StrictMessage):
    chunks: Items[Chunk]


def _checked_stop(stop: str | list[str] | list[int] | None) -> str | list[str] | list[int] | None:
    check_stops([stop] if isinstance(stop, str) else stop or [])
    return stop


class WireSamplingParams(StrictMessage):
    """Sampling parameters. `stop` absent means EOS, [] means never, a bare string is one stop string."""

    max_tokens: MaxTokens | None = None
    seed: Seed | None = None
    stop: Annotated[
        str | Items[Annotated[str, Strict()]] | Items[StrictInt] | None, AfterValidator(_checked_stop)
    ] = None
    temperature: Temperature = 1.0
    top_k: TopK = -1
    top_p: TopP = 1.0


class TensorJson(StrictMessage):
    """Tensor [N] or [N, K]. With sparse indices it is CSR: `data` are the listed cells."""

    dtype: Literal["float32", "int64"]
    data: Numbers
    shape: Integers | None = None
    sparse_crow_indices: Integers | None = None
    sparse_col_indices: Integers | None = None

    @field_validator("data")
    @classmethod
    def _fit_dtype(cls, data: npt.NDArray[Any], info: ValidationInfo) -> npt.NDArray[Any]:
        return as_integers(data) if info.data.get("dtype") == "int64" else data


class AsampleRequest(StrictRequest):
    sampling_session_id: Text | None = None
    seq_id: SampleSeqId | None = None
    base_model: Text | None = None
    model_path: Text | None = None
    num_samples: StrictInt = 1
    prompt: ModelInput
    sampling_params: WireSamplingParams = WireSamplingParams()
    prompt_logprobs: Annotated[bool, NoneAsFalse] = False
    topk_prompt_logprobs: Annotated[StrictInt, NoneAsZero] = 0
    topk_sample_logprobs: Annotated[StrictInt, NoneAsZero] = 0
    target_prompt_logprobs: TensorJson | None = None
    prompt_alt_tokens_k: Annotated[StrictInt, NoneAsZero] = 0
    prompt_logprobs_last_n: StrictInt | None = None
    record_stability_info: Annotated[bool, NoneAsFalse] = False


class JoinSamplingSessionRequest(StrictRequest):
    sampling_session_id: Text


class JoinSamplingSessionResponse(Message):
    """`client_counter` is unique in the sampling session; the original client is 0."""

    client_counter: int
