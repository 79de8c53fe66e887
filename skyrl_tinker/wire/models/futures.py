"""Promises: what a submit call answers and what retrieve_future asks and answers."""

from typing import Literal

from skyrl_tinker.errors import Category
from skyrl_tinker.wire.models.base import Message

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
