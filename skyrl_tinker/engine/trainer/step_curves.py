"""Points of training curves: sums over each accumulation window, stored in the commit of its step.

A diagnostic: an error here leaves a point without values, and nothing else changes. The sums are computed
during the encoding of answers, which the commit waits for anyway.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from operator import add

import numpy as np
from sqlalchemy import Connection

from skyrl_tinker.domain.ids import ModelKey, RequestKind
from skyrl_tinker.domain.values import Failure, Float32, ForwardBackward, Number, PassOutput
from skyrl_tinker.engine.scheduling.row_work import model_of
from skyrl_tinker.protocol.schemas.console import StepMeasures
from skyrl_tinker.store.console import step_points
from skyrl_tinker.store.console.step_points import LossFunction
from skyrl_tinker.store.database.group_commit import Op
from skyrl_tinker.store.database.rows import database_time
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.system.off_loop import off_loop

ENDED = 64
"""Windows beyond twice those of training models at which the windows of ended models are dropped."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PassSums:
    """Sums over trained positions; `rewarded` ones have an advantage, `sampled` ones a logprob."""

    loss: float = 0.0
    weight: float = 0.0
    positions: float = 0.0
    surprise: float = 0.0
    advantage_logprob: float = 0.0
    rewarded: float = 0.0
    shift: float = 0.0
    sampled: float = 0.0
    tokens: float = 0.0
    datums: float = 0.0

    def __add__(self, other: "PassSums") -> "PassSums":
        return PassSums(*map(add, *([getattr(each, name) for name in _NAMES] for each in (self, other))))


_NAMES = tuple(field.name for field in fields(PassSums))


@dataclass(frozen=True, slots=True)
class TakenStep:
    """Completed step: its metrics and its learning rate."""

    row: QueuedRow
    metrics: Mapping[str, float]
    learning_rate: float


@dataclass(slots=True)
class _Window:
    """Requests since the last step. `since`: arrival of the first. `compute_s`: of their units so far.

    `loss`: of the last pass.
    """

    since: float
    compute_s: float
    sums: "asyncio.Future[PassSums]"
    loss: LossFunction | None = None


class StepCurves:
    def __init__(self, trains: Callable[[ModelKey], bool], clock: Callable[[], float] = time.time) -> None:
        """`trains`: whether a model has not ended. `clock`: that of the times in rows."""
        self._trains = trains
        self._clock = clock
        self._windows: dict[ModelKey, _Window] = {}
        self._most = ENDED

    def passed(
        self,
        rows: Sequence[QueuedRow],
        requests: Mapping[int, ForwardBackward],
        outputs: Sequence[PassOutput | Failure],
        seconds: float,
    ) -> None:
        """Add a pass, which took `seconds`, to the windows of its models. `requests`: by row id."""
        mine: dict[ModelKey, list[tuple[QueuedRow, PassOutput]]] = {}
        for row, output in zip(rows, outputs, strict=True):
            if row.kind is RequestKind.FORWARD_BACKWARD and isinstance(output, PassOutput):
                mine.setdefault(model_of(row), []).append((row, output))
        for model, ran in mine.items():
            window = self._window(model, ran[0][0])
            window.compute_s += seconds
            pairs = [(requests[row.id], output) for row, output in ran]
            last, _ = pairs[-1]
            window.loss = LossFunction(last.loss_fn, last.loss_config)
            window.sums = asyncio.ensure_future(_added(window.sums, pairs))

    def drop(self, model: ModelKey) -> None:
        """Forget the window of a model whose gradients are dropped."""
        self._windows.pop(model, None)

    def stepped(
        self, rows: Sequence[QueuedRow], taken: Sequence[TakenStep], seconds: float
    ) -> "EndedWindows":
        """End the windows of all `rows`; the steps `taken` among them took `seconds`."""
        steps = [(step, self._windows.get(model_of(step.row)) or _fresh(step.row)) for step in taken]
        for row in rows:
            self.drop(model_of(row))
        return EndedWindows(steps, seconds, self._clock())

    def _window(self, model: ModelKey, row: QueuedRow) -> _Window:
        window = self._windows.get(model) or _fresh(row)
        self._windows[model] = window
        if len(self._windows) > self._most:
            self._windows = {each: of for each, of in self._windows.items() if self._trains(each)}
            self._most = 2 * len(self._windows) + ENDED
        return window


@dataclass(frozen=True, slots=True)
class EndedWindows:
    """Steps with their windows. `seconds`: duration of the steps, which ended at `at`."""

    steps: Sequence[tuple[TakenStep, _Window]]
    seconds: float
    at: float

    async def ops(self) -> tuple[Op[None], ...]:
        """Return the ops that store their points."""
        return tuple([self._op(step, window, await window.sums) for step, window in self.steps])

    def _op(self, step: TakenStep, window: _Window, sums: PassSums) -> Op[None]:
        def write(conn: Connection) -> None:
            at = database_time(conn)
            compute_s, answer_s = window.compute_s + self.seconds, max(0.0, at - self.at)
            wait_s = max(0.0, at - window.since - compute_s - answer_s)
            assert step.row.seq_id is not None, "training requests are numbered"
            measured = _measured(step, sums, (wait_s, compute_s, answer_s))
            step_points.add(conn, model_of(step.row), step.row.seq_id, at, measured, window.loss)

        return write


def _fresh(row: QueuedRow) -> _Window:
    sums: asyncio.Future[PassSums] = asyncio.get_running_loop().create_future()
    sums.set_result(PassSums())
    return _Window(row.created_at, 0.0, sums)


async def _added(
    earlier: "asyncio.Future[PassSums]", pairs: Sequence[tuple[ForwardBackward, PassOutput]]
) -> PassSums:
    size = sum(logprobs.nbytes for _, output in pairs for logprobs in output.logprobs)
    return await earlier + await off_loop(size, partial(_sums, pairs))


def _measured(step: TakenStep, sums: PassSums, seconds: tuple[float, float, float]) -> StepMeasures:
    wait_s, compute_s, answer_s = seconds
    return StepMeasures(
        loss=_mean(sums.loss, sums.weight),
        reward_proxy=_mean(sums.advantage_logprob, sums.rewarded),
        entropy_proxy=_mean(sums.surprise, sums.positions),
        policy_shift=_mean(sums.shift, sums.sampled),
        sampler_gap=_finite(step.metrics.get("sampler_logprob_gap")),
        grad_norm=_finite(step.metrics.get("grad_norm")),
        learning_rate=step.learning_rate,
        tokens=int(sums.tokens),
        datums=int(sums.datums),
        wait_s=wait_s,
        compute_s=compute_s,
        answer_s=answer_s,
    )


def _mean(total: float, count: float) -> float | None:
    return _finite(total / count) if count else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _sums(pairs: Sequence[tuple[ForwardBackward, PassOutput]]) -> PassSums:
    try:
        return sum((sums_of(request, output) for request, output in pairs), PassSums())
    except Exception:  # a diagnostic must not end the engine
        _log.exception("a point of a training curve has no values")
        return PassSums()


def sums_of(request: ForwardBackward, output: PassOutput) -> PassSums:
    """Sum over the trained positions of a request: those with an advantage, else with a weight, else all."""
    logprobs = _flat(output.logprobs)
    weights, advantages, sampled = (_joined(request, name) for name in ("weights", "advantages", "logprobs"))
    trained = advantages if advantages is not None else weights
    chosen = slice(None) if trained is None else trained != 0
    scored = logprobs[chosen]
    surprise = scored if sampled is None else sampled[chosen]
    return PassSums(
        output.metrics.get("loss:sum", math.nan),
        float(np.abs(weights).sum(dtype=np.float64))
        if advantages is None and weights is not None
        else len(scored),
        len(scored),
        -float(surprise.sum(dtype=np.float64)),
        0.0 if advantages is None else float(advantages[chosen] @ scored),
        0 if advantages is None else len(scored),
        0.0 if sampled is None else float((surprise - scored).sum(dtype=np.float64)),
        0 if sampled is None else len(scored),
        sum(len(datum.tokens) for datum in request.data),
        len(request.data),
    )


def _joined(request: ForwardBackward, name: str) -> Float32 | None:
    """Return one input of all datums, end to end; None unless each datum has it for all its targets."""
    if name not in request.data[0].inputs:
        return None
    parts = [datum.inputs.get(name) for datum in request.data]
    pairs = zip(parts, request.data, strict=True)
    fit = [part for part, datum in pairs if part is not None and part.shape == datum.target_tokens.shape]
    return _flat(fit) if len(fit) == len(parts) else None


def _flat(arrays: Sequence[Number]) -> Float32:
    joined = np.concatenate(arrays, axis=None)
    return joined.astype(np.float32, copy=False)
