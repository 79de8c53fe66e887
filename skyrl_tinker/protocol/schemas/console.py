"""Runs for the dashboard: their curves, reports and tokens. Seconds are durations, times are UTC."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, Strict, StringConstraints

from skyrl_tinker.protocol.schemas.base import (
    MAX_INT64,
    Message,
    StrictFloat,
    StrictMessage,
    StrictRequest,
    Strings,
    Text,
)
from skyrl_tinker.protocol.schemas.runs import Paging

MOST_SEARCHED = 200
MOST_REPORTED, MOST_NAME = 64, 128
"""Numbers in one report, and characters of their names."""
Reported = Annotated[StrictFloat, Field(allow_inf_nan=False)]
ReportedName = Annotated[Text, StringConstraints(min_length=1, max_length=MOST_NAME)]


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
    `loss`, `loss_fn`, `reward`: the last ones known; `loss_fn_config` has what was sent, no defaults. The
    reward is what its script reported, and `reward_report` the `next` of its metrics with that report.
    `parent`: the run whose checkpoint it goes on from, after `steps_before` steps of that and of its own
    parents. `continued_by`: the newest runs that go on from it.
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
    reward_report: int | None
    last: StepMeasures | None


RunColumn = Literal[
    "name", "project", "base_model", "owner", "rank", "state", "steps", "reward", "loss", "last_request"
]


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
    reward_only: bool = Field(False, description="only reports with a reward, and of these no `values`")


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
    stored. Texts have an ellipsis where there is more.
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

    `prompt`: the end of the text before its first trained or sampled token, which `text` begins with (both
    with an ellipsis where there is more); `prompt_id`: equal for equal ones. `tokens`: from there to the last
    one. `advantage`, `logprob`: means over those that are trained or sampled.
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
