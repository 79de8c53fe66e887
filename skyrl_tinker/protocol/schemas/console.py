"""Answers for the dashboard. Seconds are durations, times are UTC."""

from datetime import datetime
from typing import Literal

from skyrl_tinker.protocol.schemas.base import Message


class ServedModel(Message):
    """Model that is served, and where it runs. `started_at` null: not by `serve`."""

    version: str
    base_model: str
    context_length: int
    device: str
    placement: str
    trainer_ranks: int
    replicas: int
    started_at: datetime | None


class WhoAsks(Message):
    """Caller. `sees_all`: it has an admin key, or the server has no keys. `keys`: whether there are any."""

    name: str
    admin: bool
    keys: bool
    sees_all: bool


class Problem(Message):
    """Problem, or what waits longest and why."""

    level: Literal["error", "warning", "info"]
    subject: str
    text: str


class ProcessUse(Message):
    """Process with its resident memory; `cpu_percent` of one core, since the last look."""

    name: str
    pid: int
    rss_bytes: int
    cpu_percent: float
    age_s: float


class ReplicaNow(Message):
    """vLLM server. `in_flight` null: the router chose, and only it knows."""

    address: str | None
    state: Literal["serving", "replaced"]
    in_flight: int | None
    weights: list[str]


class QueueOfTenant(Message):
    """Requests of one session that are accepted and not finished. `reason`: why the oldest is not."""

    owner: str
    session_id: str
    kind: Literal["training", "sampling"]
    waiting: int
    oldest_age_s: float | None
    reason: str | None


class TokensPerSecond(Message):
    over_10_s: float
    over_60_s: float


class RatesNow(Message):
    """Rates of all owners together."""

    trained: TokensPerSecond
    sampled: TokensPerSecond


class UnitNow(Message):
    """Unit of work of the trainer. `model_ids`: those that the caller sees; `others`: how many more."""

    kind: str
    model_ids: list[str]
    others: int
    tokens: int | None = None
    running_s: float | None = None


class TrainerNow(Message):
    """`running` null: it waits for work. `unit_s`: recent duration of a unit."""

    running: UnitNow | None
    following: UnitNow | None
    unit_s: float | None


class SamplersNow(Message):
    """Samples of all owners. `paused`: why none makes progress."""

    in_flight: int
    waiting: int
    per_second: float | None
    paused: str | None


class NowResponse(Message):
    """The server at `at`. Null or empty: the engine does not answer, or the caller may not see it.

    `state`, `detail`, `ready`: as /readyz says.
    """

    at: datetime
    server: ServedModel
    caller: WhoAsks
    state: str
    detail: str
    ready: bool
    problems: list[Problem]
    processes: list[ProcessUse] | None
    replicas: list[ReplicaNow]
    queue: list[QueueOfTenant]
    rates: RatesNow | None
    trainer: TrainerNow | None
    samplers: SamplersNow | None
