"""The server now, as the dashboard and `top` show it. Seconds are durations, times are UTC."""

from datetime import datetime
from typing import Literal

from skyrl_tinker.domain.values import Way
from skyrl_tinker.protocol.queue_views import TokenRates
from skyrl_tinker.protocol.schemas.base import Message


class ServedModel(Message):
    """Base model that is served, where it runs, and its state there, as /readyz has it.

    `trainable` false: it is sampled only, by no rank. `sampleable` false: it is trained only, by no replica.
    `sampler`: its sampling engine, and the abilities that it lacks. `start`: always or on_demand. `since`: of
    the state. `idle_s`: time without requests; null where it always runs, or does not run. `rss_bytes`,
    `gpu_bytes`: memory of its ranks and samplers together, resident and of GPUs; null where
    `processes` is, or they have none, or may be on other hosts.
    """

    base_model: str
    context_length: int
    trainable: bool
    sampleable: bool
    placement: str
    trainer_ranks: int
    sampler: str
    replicas: int
    state: str
    detail: str
    start: str
    since: datetime | None
    idle_s: float | None
    rss_bytes: int | None
    gpu_bytes: int | None


class ServerNow(Message):
    """Server and its base models. `started_at` null: not by `serve`."""

    version: str
    device: str
    started_at: datetime | None
    base_models: list[ServedModel]


class WhoAsks(Message):
    """Caller. `sees_all`: it has an admin key, or the server has no keys. `keys`: whether there are any."""

    name: str
    admin: bool
    keys: bool
    sees_all: bool


class Problem(Message):
    """Problem, or a request that waits longest and why."""

    level: Literal["error", "warning", "info"]
    subject: str
    text: str


class ProcessUse(Message):
    """Process with its resident memory; `cpu_percent` of one core, since the last look.

    `gpu_bytes` null: it has none, or its GPU does not tell. `base_model` null: it is no rank or sampler.
    """

    name: str
    pid: int
    base_model: str | None
    rss_bytes: int
    gpu_bytes: int | None
    cpu_percent: float
    age_s: float


class GpuNow(Message):
    """Memory of a GPU of the host that answers."""

    used_bytes: int
    total_bytes: int


class MemoryNow(Message):
    """Memory of the host that answers, or of its cgroups; `available_bytes`: without swapping.

    `gpus`: none on a CPU.
    """

    total_bytes: int
    available_bytes: int
    gpus: list[GpuNow]


class ReplicaNow(Message):
    """Sampling server. `in_flight` null: the router chose, and only it knows.

    `weights_by`, `adapters_by`: ways of full parameters and of adapters to it. Null: it is replaced.
    `address`, `host`: also null for those who do not see the server itself.
    """

    base_model: str
    address: str | None
    host: str | None
    state: Literal["serving", "replaced"]
    weights_by: Way | None
    adapters_by: Way | None
    in_flight: int | None
    weights: list[str]


class QueueOfTenant(Message):
    """Requests of one session that are accepted and not finished. `reason`: why the oldest is not.

    `name`: the session's, if it has one.
    """

    owner: str
    name: str | None
    session_id: str
    kind: Literal["training", "sampling"]
    waiting: int
    oldest_age_s: float | None
    reason: str | None


class RatesNow(Message):
    """Rates of all owners together."""

    trained: TokenRates
    sampled: TokenRates


class RecentRates(Message):
    """Tokens per second of all owners in each `every_s` of the last hour, the newest last.

    Empty: the engine does not answer, or has just begun.
    """

    every_s: float
    trained: list[float]
    sampled: list[float]


class UnitNow(Message):
    """Unit of work of the trainer. `model_ids`: those that the caller sees; `others`: how many more.

    `names`: of their sessions, in the same order.
    """

    kind: str
    model_ids: list[str]
    names: list[str | None]
    others: int
    tokens: int | None = None
    running_s: float | None = None


class TrainerNow(Message):
    """Trainer of one base model. `running` null: it waits for work. `unit_s`: recent duration of a unit."""

    base_model: str
    running: UnitNow | None
    following: UnitNow | None
    unit_s: float | None


class SamplersNow(Message):
    """Samples of one base model, of all owners. `paused`: why none makes progress."""

    base_model: str
    in_flight: int
    waiting: int
    per_second: float | None
    paused: str | None


class NowResponse(Message):
    """The server at `at`. Null or empty: the engine does not answer, or the caller may not see it.

    `state`, `detail`, `ready`: as /readyz says.
    """

    at: datetime
    server: ServerNow
    caller: WhoAsks
    state: str
    detail: str
    ready: bool
    problems: list[Problem]
    processes: list[ProcessUse] | None
    memory: MemoryNow | None
    replicas: list[ReplicaNow]
    queue: list[QueueOfTenant]
    rates: RatesNow | None
    trainers: list[TrainerNow] | None
    samplers: list[SamplersNow] | None
