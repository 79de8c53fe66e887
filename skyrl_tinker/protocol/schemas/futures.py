"""Promises: what a submit call answers and what retrieve_future asks and answers."""

from typing import Annotated, Literal

from pydantic import Field

from skyrl_tinker.errors import Category
from skyrl_tinker.protocol.schemas.base import MAX_INT64, Message

QueueState = Literal["active", "paused_capacity", "paused_rate_limit"]


class AcceptedFuture(Message):
    """The answer to every submit call. For asample there is one sample_sequence_id per sample."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


class RetrieveFutureRequest(Message):
    """`allow_metadata_only` is absent before SDK 0.14; this server never answers metadata-only."""

    request_id: str
    allow_metadata_only: bool = False


class TryAgainResponse(Message):
    """Not ready yet. `queue_state` and its reason also make up the body of a 408."""

    request_id: str
    queue_state: QueueState = "active"
    queue_state_reason: str | None = None
    type: Literal["try_again"] = "try_again"


class FailedResponse(Message):
    """An accepted request that failed; answered with 200."""

    error: str
    category: Category


class CancelFutureRequest(Message):
    request_id: str


class FuturesTarget(Message):
    """One sampling client: `cloned_sampler_id` is its seq_id // 10^9, 0 for the original."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    cloned_sampler_id: Annotated[int, Field(ge=0, le=MAX_INT64 // 1_000_000_000)] = 0


class RetrieveFuturesRequest(Message):
    """`prev_cursor`: of the answer before, 0 at first. `timeout` 0: answer at once, else a long poll.

    Results that were read (`retrieved_request_ids`) stay as long as others do.
    """

    target: FuturesTarget
    prev_cursor: Annotated[int, Field(ge=0, le=MAX_INT64)] = 0
    timeout: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    retrieved_request_ids: list[str] = Field(default_factory=list)


class CompletedFuture(Message):
    """Its result is there to be fetched with retrieve_future. A size only where it has `finished`."""

    state: Literal["finished", "failed"]
    request_id: str
    response_payload_uncompressed_size: int | None = None


class RetrieveFuturesResponse(Message):
    completions: list[CompletedFuture]
    cursor: int
