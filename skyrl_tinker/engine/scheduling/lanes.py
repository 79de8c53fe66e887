"""Order: the requests of one model run strictly by seq_id, in whatever order they arrive. No I/O."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from skyrl_tinker.domain.ids import FutureStatus, ModelKey, RequestKind, SessionId
from skyrl_tinker.domain.values import Failure
from skyrl_tinker.store.futures.queue import QueuedRow

PASSES = frozenset({RequestKind.FORWARD, RequestKind.FORWARD_BACKWARD})
STORAGE = frozenset({RequestKind.SAVE_WEIGHTS, RequestKind.SAVE_WEIGHTS_EXTERNAL, RequestKind.LOAD_WEIGHTS})
_BYTES_PER_TOKEN = 16  # a stored token: id 4, target 8, one float 4 (RL losses have two)


def cost(row: QueuedRow) -> int:
    """About how many tokens a pass has, known without reading its body."""
    return max(1, row.body_bytes // _BYTES_PER_TOKEN)


def model_of(row: QueuedRow) -> ModelKey:
    assert row.model_key is not None, "training requests have a model"
    return row.model_key


@dataclass(frozen=True, slots=True)
class LaneStatus:
    """Of a lane in which something waits. `lowest`: the first that is here, `since`: when the last one came.

    `held`: what comes next waits for a save.
    """

    session_id: SessionId
    next_seq: int
    lowest: int
    since: float
    held: bool

    @property
    def gap(self) -> bool:
        """What comes next is not here."""
        return self.lowest > self.next_seq


@dataclass(slots=True)
class _Lane:
    next_seq: int = 0  # creation is 0: everything waits for it
    parked: dict[int, QueuedRow] = field(default_factory=dict)
    refusals: dict[int, str] = field(default_factory=dict)  # seq_id -> what the API found wrong
    held: bool = False  # a save is being written: no other one, and no load, begins
    poison: str | None = None  # why the gradients of the current accumulation window are worth nothing
    last: int | None = None  # behind this one nothing runs any more: the model is to be unloaded


class Lanes:
    """One lane per model of this engine; a closed model answers everything with its failure."""

    def __init__(self) -> None:
        self._open: dict[ModelKey, _Lane] = {}
        self._closed: dict[ModelKey, Failure] = {}

    def open(self, model: ModelKey) -> None:
        self._open[model] = _Lane()

    def close(self, model: ModelKey, failure: Failure) -> list[QueuedRow]:
        """Nothing of this model runs any more. Returns the pending rows that were waiting."""
        self._closed[model] = failure
        lane = self._open.pop(model, _Lane())
        return [row for row in lane.parked.values() if row.status is FutureStatus.PENDING]

    def knows(self, model: ModelKey) -> bool:
        return model in self._open or model in self._closed

    def closed_by(self, model: ModelKey) -> Failure | None:
        return self._closed.get(model)

    def add(self, row: QueuedRow, refusal: str | None = None) -> None:
        """`refusal`: the error with which the API has failed this row already. A row may come twice."""
        model, seq_id = _place(row)
        if seq_id < self._open[model].next_seq:
            return
        self._open[model].parked[seq_id] = row
        if refusal is not None:
            self._open[model].refusals[seq_id] = refusal

    def end(self, model: ModelKey) -> None:
        """Nothing that comes from now on runs, unless it fills a gap."""
        lane = self._lane(model)
        lane.last = max(lane.parked, default=lane.next_seq - 1)

    def ended(self, row: QueuedRow) -> bool:
        """Whether it came behind the end of its model."""
        model, seq_id = _place(row)
        last = self._lane(model).last
        return last is not None and seq_id > last

    def drained(self, model: ModelKey) -> bool:
        """Whether a model that is to end has run all that came before its end."""
        lane = self._open.get(model)
        return lane is None or (lane.last is not None and lane.next_seq > lane.last)

    def expire(self, row: QueuedRow, why: str) -> None:
        """Its client was told that it failed. It is skipped if it has not begun, and its window fails."""
        model, seq_id = _place(row)
        lane = self._lane(model)
        if seq_id in lane.parked:
            lane.parked[seq_id] = replace(row, status=FutureStatus.FAILED)
            lane.refusals[seq_id] = why
        elif row.kind is RequestKind.FORWARD_BACKWARD:
            self.poison(model, why)

    def stands(self) -> dict[ModelKey, LaneStatus]:
        """Of all lanes in which something waits."""
        return {model: _stand(lane) for model, lane in self._open.items() if lane.parked}

    def backlog(self) -> int:
        """About how many tokens of passes wait, parked ones included."""
        parked = (row for lane in self._open.values() for row in lane.parked.values())
        return sum(cost(row) for row in parked if row.kind in PASSES and _pending(row))

    def runnable(self, budget: int) -> dict[ModelKey, Sequence[QueuedRow]]:
        """Per model what may run next, in order: one barrier, or consecutive passes of about `budget` tokens.

        Passes that the API refused are skipped over here; a refused forward_backward poisons its window.
        """
        for lane in self._open.values():
            _skip_refused(lane)
        heads = {model: _head(lane, budget) for model, lane in self._open.items()}
        return {model: rows for model, rows in heads.items() if rows}

    def take(self, rows: Sequence[QueuedRow]) -> None:
        """These run now; their lanes go on behind them. Rows of one model come in order."""
        for row in rows:
            model, seq_id = _place(row)
            _pop(self._open[model], seq_id)

    def hold(self, model: ModelKey) -> None:
        """Until `resume` neither saves nor loads of this model's state are runnable; the rest goes on."""
        self._lane(model).held = True

    def resume(self, model: ModelKey) -> None:
        self._lane(model).held = False

    def held(self, model: ModelKey) -> bool:
        return self._lane(model).held

    def poison(self, model: ModelKey, why: str) -> None:
        """The next optim_step of this model must fail with this reason; the first reason stays."""
        lane = self._lane(model)
        if lane.poison is None:
            lane.poison = why

    def poison_of(self, model: ModelKey) -> str | None:
        return self._lane(model).poison

    def cleanse(self, model: ModelKey) -> None:
        """A new accumulation window begins."""
        self._lane(model).poison = None

    def _lane(self, model: ModelKey) -> _Lane:
        """One that nobody keeps for a closed model: it may be closed while something of it runs."""
        return self._open.get(model) or _Lane()


def _place(row: QueuedRow) -> tuple[ModelKey, int]:
    assert row.seq_id is not None, "training requests have their place in a lane"
    return model_of(row), row.seq_id


def _stand(lane: _Lane) -> LaneStatus:
    first = lane.parked[min(lane.parked)]
    return LaneStatus(
        first.session_id,
        lane.next_seq,
        min(lane.parked),
        max(row.created_at for row in lane.parked.values()),
        lane.held and first.kind in STORAGE,
    )


def _pop(lane: _Lane, seq_id: int) -> None:
    assert seq_id == lane.next_seq, "taken out of order"
    del lane.parked[seq_id]
    lane.next_seq += 1


def _skip_refused(lane: _Lane) -> None:
    """A step that was refused stays: clearing its window is still work."""
    while (row := lane.parked.get(lane.next_seq)) and row.status is FutureStatus.FAILED:
        if row.kind is RequestKind.OPTIM_STEP:
            return
        refusal = lane.refusals.pop(lane.next_seq, "its input is wrong")
        if row.kind is RequestKind.FORWARD_BACKWARD and lane.poison is None:
            lane.poison = f"forward_backward with seq_id {row.seq_id} was refused: {refusal}"
        _pop(lane, lane.next_seq)


def _head(lane: _Lane, budget: int) -> list[QueuedRow]:
    first = lane.parked.get(lane.next_seq)
    if first is None or (lane.held and first.kind in STORAGE):
        return []
    return list(_passes(lane, budget)) if first.kind in PASSES else [first]


def _passes(lane: _Lane, budget: int) -> Iterator[QueuedRow]:
    seq_id = lane.next_seq
    while budget > 0 and (row := lane.parked.get(seq_id)) and row.kind in PASSES and _pending(row):
        yield row
        budget -= cost(row)
        seq_id += 1


def _pending(row: QueuedRow) -> bool:
    return row.status is FutureStatus.PENDING
