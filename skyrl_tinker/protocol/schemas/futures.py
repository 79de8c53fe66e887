"""Futures: responses of submit calls, requests and responses of retrieve_future."""

from typing import Annotated, Literal

from pydantic import Field

from skyrl_tinker.errors import Category
from skyrl_tinker.protocol.schemas.base import MAX_INT64, Items, Message, StrictFloat, Text

QueueState = Literal["active", "paused_capacity", "paused_rate_limit"]


class AcceptedFuture(Message):
    """Response to every submit call. For asample there is one sample_sequence_id per sample."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


class RetrieveFutureRequest(Message):
    """`allow_metadata_only` is absent before SDK 0.14; this server never answers metadata-only."""

    request_id: Text
    allow_metadata_only: bool = False


class TryAgainResponse(Message):
    """A result that is not ready. `queue_state` and its reason are also the body of a 408."""

    request_id: str
    queue_state: QueueState = "active"
    queue_state_reason: str | None = None
    type: Literal["try_again"] = "try_again"


class FailedResponse(Message):
    """An accepted request that failed; sent with status 200."""

    error: str
    category: Category


class CancelFutureRequest(Message):
    request_id: Text


class FuturesTarget(Message):
    """One sampling client: `cloned_sampler_id` is its seq_id // 10^9, 0 for the original."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: Text
    cloned_sampler_id: Annotated[int, Field(ge=0, le=MAX_INT64 // 1_000_000_000)] = 0


class RetrieveFuturesRequest(Message):
    """Query of finished futures. `prev_cursor`: of the last response, at first 0. `timeout` 0: no long poll.

    Results that were read (`retrieved_request_ids`) are kept as long as others.
    """

    target: FuturesTarget
    prev_cursor: Annotated[int, Field(ge=0, le=MAX_INT64)] = 0
    timeout: Annotated[StrictFloat, Field(ge=0, allow_inf_nan=False)] | None = None
    retrieved_request_ids: Items[Text] = Field(default_factory=list)


class CompletedFuture(Message):
    """A future whose result can be fetched with retrieve_future. Only `finished` ones have a size."""

    state: Literal["finished", "failed"]
    request_id: str
    response_payload_uncompressed_size: int | None = None


class RetrieveFuturesResponse(Message):
    completions: list[CompletedFuture]
    cursor: int
