"""Answers for the dashboard. Seconds are durations, times are UTC."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, Strict, StringConstraints

from skyrl_tinker.domain.values import Way
from skyrl_tinker.protocol.queue_views import TokenRates
from skyrl_tinker.protocol.schemas.base import MAX_INT64, Message, StrictMessage, StrictRequest, Strings, Text
from skyrl_tinker.protocol.schemas.runs import Paging

MOST_SEARCHED = 200
MOST_REPORTED, MOST_NAME = 64, 128
"""Numbers in one report, and characters of their names."""
Reported = Annotated[float, Strict(), Field(allow_inf_nan=False)]
ReportedName = Annotated[Text, StringConstraints(min_length=1, max_length=MOST_NAME)]


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


class StepMeasures(Message):
    """Measures of one step, over the positions that its accumulation window trains; null: not known.

    `loss`: sum of losses by sum of weights. `reward_proxy`: mean of advantage times logprob. `entropy_proxy`:
    mean of -logprob, as sampled or else as trained. `policy_shift`: mean of the logprob as sampled minus that
    of the trainer. `sampler_gap`: as the step reports it. The seconds are those from the arrival of the
    window's first request to the commit of the step: waiting, on the ranks, and from there to the commit.
    See docs/dashboard.md.
    """

    loss: float | None
    reward_proxy: float | None
    entropy_proxy: float | None
    policy_shift: float | None
    sampler_gap: float | None
    grad_norm: float | None
    learning_rate: float | None
    tokens: int
    datums: int
    wait_s: float
    compute_s: float
    answer_s: float


class Continuation(Message):
    """Run that goes on from a checkpoint of another one, after so many steps of it and its parents."""

    run_id: str
    name: str | None
    step: int


class RunSummary(Message):
    """Run with its last step; `steps` 0: none was taken. `name`: that of its session.

    `lora_rank` 0: full parameters, null: it was not created. `state_reason`: why it is not in training.
    `loss`, `loss_fn`, `reward`: the last ones known; the reward is what its script reported, and
    `loss_fn_config` has what was sent, no defaults. `parent`: the run whose checkpoint it goes on from, after
    `steps_before` steps of that and of its own parents. `continued_by`: the newest runs that go on from it.
    """

    run_id: str
    name: str | None
    session_id: str
    project_id: str | None
    owner: str
    base_model: str
    lora_rank: int | None
    state: str
    state_reason: str | None
    user_metadata: Strings
    created_at: datetime
    last_request_at: datetime
    last_heartbeat_at: datetime
    parent: str | None
    steps_before: int
    continued_by: list[Continuation]
    steps: int
    loss: float | None
    loss_fn: str | None
    loss_fn_config: dict[str, float]
    reward: float | None
    last: StepMeasures | None


RunColumn = Literal["name", "base_model", "owner", "rank", "state", "steps", "reward", "loss", "last_request"]


class RunsQuery(Paging):
    search: Text | None = Field(
        None, max_length=MOST_SEARCHED, description="words, each in a name, project, owner, state or metadata"
    )
    sort: RunColumn = Field(
        "last_request", description="what all runs are sorted by; unknown values are last"
    )
    order: Literal["ascending", "descending"] = "descending"


class RunsResponse(Message):
    """Page of runs; `total` counts all pages."""

    runs: list[RunSummary]
    total: int


class PointsQuery(StrictMessage):
    after: int = Field(0, ge=0, le=MAX_INT64, description="step after which to begin")
    limit: int = Field(5000, ge=1, le=20000)


class PointsResponse(Message):
    """Columns of equal length, by name: `step`, `at` (UTC seconds), and those of StepMeasures.

    `next`: the value of `after` for the points that follow. `more`: there are some already.
    """

    columns: dict[str, list[float | None]]
    next: int
    more: bool


class ReportRequest(StrictRequest):
    """Numbers of a step of a run that only its script knows, by name: the reward, lengths of episodes."""

    step: Annotated[int, Strict(), Field(ge=0, le=MAX_INT64)]
    values: Annotated[dict[ReportedName, Reported], Field(min_length=1, max_length=MOST_REPORTED)]


class ReportsQuery(StrictMessage):
    after: int = Field(0, ge=0, le=MAX_INT64, description="`next` of the answer before")
    limit: int = Field(1000, ge=1, le=5000)


class ReportedPoint(Message):
    """Numbers that a script reported at `at` (UTC seconds). `reward`: the one among them, if any."""

    step: int
    at: float
    reward: float | None
    values: dict[str, float]


class ReportsResponse(Message):
    """Reports in the order in which they came; `next` and `more` as of PointsResponse."""

    reports: list[ReportedPoint]
    next: int
    more: bool


class TraceQuery(StrictMessage):
    minutes: float = Field(5, gt=0, le=60, description="how far back")


class ReadableQuery(Paging):
    run: Text | None = Field(None, description="its passes, and samples from its weights")
    kind: Literal["forward", "forward_backward", "sample"] | None = None


class ReadableSummary(Message):
    """Finished request. `origin`: its run, or its sampler; `name`: that of its session; `step`: as of items.

    `readable`: its tokens are still stored. Of a sample, `prompt`: the end of its prompt; `prompt_id`: equal
    for equal prompts. Of a pass, the number of `datums`, and `begins`: the beginning of the first. Null: not
    stored.
    """

    request_id: str
    kind: str
    seq_id: int | None
    origin: str
    name: str | None
    step: int | None
    created_at: datetime
    readable: bool
    prompt_id: str | None
    prompt: str | None
    loss_fn: str | None
    datums: int | None
    begins: str | None


class ReadableResponse(Message):
    """Requests, the newest first."""

    requests: list[ReadableSummary]


class TokensQuery(StrictMessage):
    item: int = Field(0, ge=0, le=MAX_INT64, description="datum, or sampled sequence")


class ItemSummary(Message):
    """Datum of a pass, or sampled sequence.

    `prompt`: the end of the text before its first trained or sampled token, which `text` begins with;
    `prompt_id`: equal for equal ones. `tokens`: from there to the last one. `advantage`, `logprob`: means
    over those that are trained or sampled.
    """

    item: int
    prompt_id: str | None
    prompt: str | None
    text: str
    tokens: int
    advantage: float | None
    logprob: float | None


class ItemsResponse(Message):
    """Items of a request, of `total`. `earlier`, `later`: the requests of its kind before and behind.

    `run`: the caller's run whose weights it used; `name`: that of its session. `step`: how many steps they
    had taken, with those of the run's parents; `reported`: the numbers that the script reported of that step.
    Null: of base models, and of weights that change meanwhile.
    """

    kind: str
    items: list[ItemSummary]
    total: int
    earlier: str | None
    later: str | None
    run: str | None
    name: str | None
    step: int | None
    reported: dict[str, float]


class TokensResponse(Message):
    """Targets of a datum, or sampled tokens; `texts` and each of `values` go with `tokens`.

    `prompt`: that of a sample as text, as far as it is stored; of a datum its first token, no target.
    """

    kind: str
    item: int
    items: int
    prompt: str | None
    tokens: list[int]
    texts: list[str]
    values: dict[str, list[float | None]]
