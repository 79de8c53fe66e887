"""What the workers do next. Pure: heads of all lanes in, one unit of work out.

The oldest head decides between passes and barriers, so neither starves. Passes of all models share a unit by
deficit round robin, so that a small tenant never waits behind a flood.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skyrl_tinker.engine.lanes import PASSES, cost
from skyrl_tinker.store.futures import QueuedRow
from skyrl_tinker.wire.ids import ModelKey, RequestKind


@dataclass(frozen=True, slots=True)
class Pass:
    """Forwards and backwards of any tenants; rows of one model in order. `full`: no more would have fit."""

    rows: tuple[QueuedRow, ...]
    full: bool


@dataclass(frozen=True, slots=True)
class Steps:
    """optim_steps, one per model."""

    rows: tuple[QueuedRow, ...]


@dataclass(frozen=True, slots=True)
class Single:
    """One create, load or save."""

    row: QueuedRow


Unit = Pass | Steps | Single


def next_unit(
    runnable: Mapping[ModelKey, Sequence[QueuedRow]], credit: dict[ModelKey, int], budget: int
) -> Unit | None:
    """The next unit, or None when nothing may run.

    `runnable` is what `Lanes.runnable` gives; `credit` carries each lane's unused share from unit to unit and
    is updated; `budget` is the number of tokens in a pass (a larger single request still runs, alone).
    """
    heads = [rows[0] for rows in runnable.values()]
    if not heads:
        return None
    oldest = min(heads, key=lambda row: row.id)
    if oldest.kind in PASSES:
        passes = {model: rows for model, rows in runnable.items() if rows[0].kind in PASSES}
        return _share(passes, credit, budget)
    if oldest.kind is RequestKind.OPTIM_STEP:
        return Steps(tuple(row for row in heads if row.kind is RequestKind.OPTIM_STEP))
    return Single(oldest)


def _share(passes: Mapping[ModelKey, Sequence[QueuedRow]], credit: dict[ModelKey, int], budget: int) -> Pass:
    queues = {model: deque(rows) for model, rows in passes.items()}
    share = max(1, budget // len(queues))
    taken: list[QueuedRow] = []
    left = budget
    while queues and left > 0:
        for model in _order(queues, credit):
            queue = queues[model]
            credit[model] = credit.get(model, 0) + share
            while queue and cost(queue[0]) <= credit[model]:
                if taken and cost(queue[0]) > left:
                    credit[model] = cost(queue[0])  # enough to be served first next time, no more
                    return Pass(tuple(taken), full=True)
                credit[model] -= cost(queue[0])
                left -= cost(queue[0])
                taken.append(queue.popleft())
            if not queue:
                del queues[model]
                credit.pop(model)  # who has nothing waiting saves nothing up
    return Pass(tuple(taken), full=left <= 0)


def _order(queues: Mapping[ModelKey, deque[QueuedRow]], credit: Mapping[ModelKey, int]) -> list[ModelKey]:
    """Who had to wait last time comes first, then the oldest request."""
    return sorted(queues, key=lambda model: (-credit.get(model, 0), queues[model][0].id))
