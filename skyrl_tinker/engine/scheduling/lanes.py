"""Lanes: the requests of one model run strictly by seq_id, in whatever order they arrive. No I/O."""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from skyrl_tinker.domain.ids import FutureStatus, ModelKey, OwnerId, RequestKind, SessionId
from skyrl_tinker.domain.values import Failure
from skyrl_tinker.engine.scheduling.row_work import PASSES, Work, cost, model_of, work_of
from skyrl_tinker.protocol.queue_views import LaneView
from skyrl_tinker.store.futures.queue import IN_WINDOW, QueuedRow, window_failure

CHECKPOINTS = frozenset({RequestKind.SAVE_WEIGHTS, RequestKind.SAVE_WEIGHTS_EXTERNAL})
_LOAD, _PENDING = RequestKind.LOAD_WEIGHTS, FutureStatus.PENDING  # Python 3.11 takes 0.1 us for a member


@dataclass(frozen=True, slots=True)
class Gap:
    """Missing seq_ids of a lane, before its first waiting row.

    `last_id`: of the newest row that may belong to the same client call as a missing one, and so shows that
    the call is still in progress: of the passes after the gap, up to a row of another kind.
    """

    session_id: SessionId
    owner_id: OwnerId | None
    seq_ids: range
    last_id: int


@dataclass(slots=True)
class _Lane:
    next_seq: int = 0  # creation is 0: everything waits for it
    parked: dict[int, QueuedRow] = field(default_factory=dict)
    works: dict[int, Work] = field(default_factory=dict)  # of the parked rows
    refusals: dict[int, str] = field(default_factory=dict)  # seq_id -> error found by the API
    saving: dict[int, RequestKind] = field(default_factory=dict)  # seq_id -> kind of saves not answered yet
    writing: set[int] = field(default_factory=set)  # ids of saves whose weights the ranks hold
    loads: dict[int, bool] = field(default_factory=dict)  # id of a load next in turn -> its files are here
    held: int = 0  # number of holders: while there are any, nothing begins
    window_error: str | None = None  # why the gradients of the current accumulation window are invalid
    last: int | None = None  # the last seq_id to run before the model is unloaded
    over: set[int] = field(default_factory=set)  # seq_ids started already, after rows that were put back
    apart: dict[int, frozenset[int]] = field(default_factory=dict)  # seq_id -> ids of rows to run together


class Lanes:
    """One lane per model of this engine; requests of a closed model get its failure."""

    def __init__(self) -> None:
        self._open: dict[ModelKey, _Lane] = {}
        self._closed: dict[ModelKey, Failure] = {}
        self._changed: dict[ModelKey, None] = {}  # since `take_changed`, in order
        self._with_loads: dict[ModelKey, None] = {}
        self._with_refused: dict[ModelKey, None] = {}

    def open(self, model: ModelKey, next_seq: int = 0, window_error: str | None = None) -> None:
        """Open a lane whose requests before `next_seq` have run."""
        self._open[model] = _Lane(next_seq, window_error=window_error)
        self._changed[model] = None

    def close(self, model: ModelKey, failure: Failure) -> list[QueuedRow]:
        """End a model; returns its waiting pending rows. Call `forget` once the end is in the store."""
        self._closed[model] = failure
        self._changed[model] = None
        lane = self._open.pop(model, _Lane())
        return [row for row in lane.parked.values() if row.status is FutureStatus.PENDING]

    def forget(self, model: ModelKey) -> None:
        """Forget a closed model: later requests get their failure from the store."""
        self._closed.pop(model, None)

    def knows(self, model: ModelKey) -> bool:
        return model in self._open or model in self._closed

    def is_open(self, model: ModelKey) -> bool:
        return model in self._open

    def closed_by(self, model: ModelKey) -> Failure | None:
        return self._closed.get(model)

    def add(self, row: QueuedRow, refusal: str | None = None) -> None:
        """Park a row, which may arrive twice. `refusal`: error with which the API has failed it already."""
        model, seq_id = _position(row)
        if seq_id < self._open[model].next_seq or seq_id in self._open[model].over:
            return
        self._park(row)
        if refusal is not None:
            self._open[model].refusals[seq_id] = refusal

    def end(self, model: ModelKey) -> None:
        """Refuse requests that arrive from now on, except those that fill a gap."""
        lane = self._lane(model)
        lane.last = max(lane.parked, default=lane.next_seq - 1)

    def ended(self, row: QueuedRow) -> bool:
        """Return True for a row that arrived after the end of its model."""
        model, seq_id = _position(row)
        last = self._lane(model).last
        return last is not None and seq_id > last

    def drained(self, model: ModelKey) -> bool:
        """Return True once an ending model has run all rows before its end."""
        lane = self._open.get(model)
        return lane is None or (lane.last is not None and lane.next_seq > lane.last)

    def expire(self, row: QueuedRow, why: str) -> None:
        """Skip a row that was failed, if it has not started, and invalidate its window."""
        model, seq_id = _position(row)
        lane = self._changing(model)
        if seq_id in lane.parked:
            lane.parked[seq_id] = replace(row, status=FutureStatus.FAILED)
            lane.refusals[seq_id] = why
            self._with_refused[model] = None
        elif row.kind is RequestKind.FORWARD_BACKWARD:
            self.invalidate_window(model, why)

    def waits(self, row: QueuedRow) -> bool:
        """Return True for a row that has not started."""
        model, seq_id = _position(row)
        return seq_id in self._lane(model).parked

    def statuses(self) -> dict[ModelKey, LaneView]:
        """Return the state of every lane with waiting rows."""
        return {model: _view(lane) for model, lane in self._open.items() if lane.parked}

    def gaps(self) -> dict[ModelKey, Gap]:
        """Return the current gap of each lane that has one."""
        gaps = {model: _gap(lane) for model, lane in self._open.items() if lane.parked}
        return {model: gap for model, gap in gaps.items() if gap is not None}

    def backlog(self) -> int:
        """Estimate the tokens of all waiting passes, parked ones included."""
        parked = (row for lane in self._open.values() for row in lane.parked.values())
        return sum(cost(row) for row in parked if row.kind in PASSES and _pending(row))

    def waiting(self, model: ModelKey) -> Collection[QueuedRow]:
        """Return a model's waiting rows, in any order."""
        return self._lane(model).parked.values()

    def works(self, model: ModelKey) -> Collection[Work]:
        """Return the work of each row of `waiting`."""
        return self._lane(model).works.values()

    def take_changed(self) -> list[ModelKey]:
        """Return the models whose runnable rows may have changed since the last call."""
        changed, self._changed = self._changed, {}
        return list(changed)

    def runnable(self, model: ModelKey, budget: int) -> Sequence[QueuedRow]:
        """Return a model's next rows: one barrier, or consecutive passes of about `budget` tokens.

        A load is among them once `fetch_ended`.
        """
        return _head(self._lane(model), budget)

    def skip_refused(self) -> None:
        """Drop requests that the API refused and whose turn has come, except steps.

        A refused forward_backward invalidates its window. Must not be called while a step runs, which ends
        the window before.
        """
        for model in list(self._with_refused):
            lane = self._changing(model)
            _skip_refused(lane)
            if all(map(_pending, lane.parked.values())):
                del self._with_refused[model]

    def start_fetches(self) -> list[QueuedRow]:
        """Return the loads that have become next in turn: their lanes wait until `fetch_ended`."""
        self.skip_refused()
        rows = []
        for model in list(self._with_loads):
            lane = self._lane(model)
            first = lane.parked.get(lane.next_seq)
            if all(row.kind is not RequestKind.LOAD_WEIGHTS for row in lane.parked.values()):
                del self._with_loads[model]
            elif first is None or first.id in lane.loads or first.kind is not RequestKind.LOAD_WEIGHTS:
                continue
            elif not lane.held and not _waits_for_saves(lane, first):
                lane.loads[first.id] = False
                rows.append(first)
        return rows

    def fetch_ended(self, row: QueuedRow) -> None:
        """Let a load begin: its files are here, or it is known to fail."""
        lane = self._changing(model_of(row))
        if row.id in lane.loads:
            lane.loads[row.id] = True

    def start(self, rows: Sequence[QueuedRow]) -> None:
        """Remove rows that run now. Rows of one model must be in order."""
        for row in rows:
            model, seq_id = _position(row)
            self._changed[model] = None
            _pop(self._open[model], seq_id)

    def put_back(self, row: QueuedRow) -> None:
        """Take back a started row, before those that have not started. No effect on a closed model."""
        _, seq_id = _position(row)
        lane = self._park(row)
        if row.kind is RequestKind.LOAD_WEIGHTS:
            lane.loads[row.id] = True
        lane.over.discard(seq_id)
        lane.over.update(range(seq_id + 1, lane.next_seq))
        lane.next_seq = min(lane.next_seq, seq_id)

    def put_back_apart(self, rows: Sequence[QueuedRow]) -> None:
        """Take back started rows, to run together and with no others."""
        ids = frozenset(row.id for row in rows)
        for row in rows:
            self.put_back(row)
            model, seq_id = _position(row)
            self._changing(model).apart[seq_id] = ids

    def apart(self, row: QueuedRow) -> frozenset[int]:
        """Return the ids of the rows that run together with this one and with no others; {}: it may share."""
        lane = self._lane(model_of(row))
        return lane.apart.get(_position(row)[1], frozenset()) if lane.apart else frozenset()

    def hold(self, model: ModelKey) -> None:
        """Begin nothing of this model until each holder calls `resume`."""
        self._changing(model).held += 1

    def resume(self, model: ModelKey) -> None:
        lane = self._changing(model)
        lane.held = max(0, lane.held - 1)  # it may be a new lane by now, without holders

    def save_began(self, row: QueuedRow) -> None:
        """Make loads of this model wait until `save_ended`: after a load the save could not be repeated.

        So do other saves of a checkpoint while one is written; the rest goes on.
        """
        model, seq_id = _position(row)
        self._changing(model).saving[seq_id] = row.kind

    def save_ended(self, row: QueuedRow) -> None:
        model, seq_id = _position(row)
        self._changing(model).saving.pop(seq_id, None)

    def saves_until(self, model: ModelKey, seq_id: int) -> bool:
        """Return whether a checkpoint's save up to this seq_id is not answered: no snapshot may replace it.

        Saves for samplers are most of the time written sooner than a snapshot, and bar none.
        """
        saving = self._lane(model).saving.items()
        return any(each <= seq_id and kind in CHECKPOINTS for each, kind in saving)

    def write_began(self, row: QueuedRow) -> None:
        """Make saves for samplers wait until `write_ended`: the ranks hold one copy of this model at most."""
        self._changing(model_of(row)).writing.add(row.id)

    def write_ended(self, row: QueuedRow) -> None:
        self._changing(model_of(row)).writing.discard(row.id)

    def under_way(self, model: ModelKey) -> bool:
        """Return True while files of this model are written or fetched, or a retry of it waits."""
        lane = self._lane(model)
        fetching = not all(lane.loads.values())
        return bool(lane.saving) or lane.held > 0 or fetching

    def invalidate_window(self, model: ModelKey, why: str) -> None:
        """Make the next optim_step of this model fail with this reason; the first reason stays."""
        lane = self._lane(model)
        if lane.window_error is None:
            lane.window_error = why

    def window_error(self, model: ModelKey) -> str | None:
        return self._lane(model).window_error

    def reset_window(self, model: ModelKey) -> None:
        """Begin a new accumulation window."""
        self._lane(model).window_error = None

    def _park(self, row: QueuedRow) -> _Lane:
        model, seq_id = _position(row)
        lane = self._changing(model)
        lane.parked[seq_id], lane.works[seq_id] = row, work_of(row)
        if row.kind is RequestKind.LOAD_WEIGHTS:
            self._with_loads[model] = None
        if row.status is FutureStatus.FAILED:
            self._with_refused[model] = None
        return lane

    def _changing(self, model: ModelKey) -> _Lane:
        self._changed[model] = None
        return self._lane(model)

    def _lane(self, model: ModelKey) -> _Lane:
        """Return a model's lane; a throw-away one if it was closed while some of its work runs."""
        return self._open.get(model) or _Lane()


def _position(row: QueuedRow) -> tuple[ModelKey, int]:
    assert row.seq_id is not None, "training requests are numbered"
    return model_of(row), row.seq_id


def _view(lane: _Lane) -> LaneView:
    lowest = lane.next_seq if lane.next_seq in lane.parked else min(lane.parked)
    first = lane.parked[lowest]
    held = _waits_for_saves(lane, first) or lane.loads.get(first.id) is False
    return LaneView(lane.next_seq, lowest, held, first.session_id)


def _gap(lane: _Lane) -> Gap | None:
    if lane.next_seq in lane.parked or lane.next_seq == 0:  # a creation arrives before its dependents
        return None
    first, *others = (lane.parked[seq_id] for seq_id in sorted(lane.parked))
    call = itertools.takewhile(lambda row: row.kind in PASSES, others) if first.kind in PASSES else ()
    newest = max((row.id for row in call), default=first.id)
    _, lowest = _position(first)
    seq_ids = range(lane.next_seq, lowest)
    return Gap(first.session_id, first.owner_id, seq_ids, max(first.id, newest))


def _pop(lane: _Lane, seq_id: int) -> None:
    assert seq_id == lane.next_seq, "started out of order"
    lane.loads.pop(lane.parked.pop(seq_id).id, None)
    lane.apart.pop(seq_id, None)
    del lane.works[seq_id]
    lane.next_seq += 1
    while lane.next_seq in lane.over:  # refused rows, skipped while earlier ones ran
        lane.over.remove(lane.next_seq)
        lane.next_seq += 1


def _skip_refused(lane: _Lane) -> None:
    """Drop refused rows, except steps: clearing their window is still work."""
    while (row := lane.parked.get(lane.next_seq)) and row.status is FutureStatus.FAILED:
        if row.kind is RequestKind.OPTIM_STEP:
            return
        refusal = lane.refusals.pop(lane.next_seq, "its input is wrong")
        if row.kind in IN_WINDOW and lane.window_error is None:
            lane.window_error = window_failure(row.kind, row.seq_id, "was refused", refusal)
        _pop(lane, lane.next_seq)


def _head(lane: _Lane, budget: int) -> list[QueuedRow]:
    first = lane.parked.get(lane.next_seq)
    if first is None or lane.held:
        return []
    if first.kind in PASSES:
        return _passes(lane, budget)
    without_files = first.kind is _LOAD and not lane.loads.get(first.id, False)
    return [] if without_files or _waits_for_saves(lane, first) else [first]


def _waits_for_saves(lane: _Lane, first: QueuedRow) -> bool:
    if first.kind is RequestKind.SAVE_WEIGHTS_FOR_SAMPLER:
        return bool(lane.writing)
    if first.kind is RequestKind.LOAD_WEIGHTS:
        return bool(lane.saving)
    return first.kind in CHECKPOINTS and not CHECKPOINTS.isdisjoint(lane.saving.values())


def _passes(lane: _Lane, budget: int) -> list[QueuedRow]:
    seq_id, rows = lane.next_seq, list[QueuedRow]()
    apart = lane.apart.get(seq_id)
    while budget > 0 and (row := lane.parked.get(seq_id)) and row.kind in PASSES and _pending(row):
        if lane.apart.get(seq_id) != apart:
            break
        rows.append(row)
        budget -= cost(row)
        seq_id += 1
    return rows


def _pending(row: QueuedRow) -> bool:
    return row.status is _PENDING
