"""Order in which a replay repeats the models' requests: many models at a time, as in normal work. Pure code.

A batch has the requests that a model ran in one unit, for several models. So a model's sums are, on one CPU
rank, the same to the last bit, also with full parameters; they do not depend on the unit's other models.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter

from skyrl_tinker.domain.ids import SAVES, Effect, ModelKey
from skyrl_tinker.engine.scheduling.row_work import cost, model_of
from skyrl_tinker.store.replay.unit_records import RanRow


def as_they_ran(rows: Iterable[RanRow]) -> Iterator[list[RanRow]]:
    """Yield the rows of unit after unit."""
    number = attrgetter("unit")
    for _, unit in groupby(sorted(rows, key=number), number):
        yield list(unit)


def merged(rows: Iterable[RanRow], tokens: int, models: int) -> Iterator[list[RanRow]]:
    """Yield batches of one kind: passes with one row budget, steps, or saves; each model's units in order.

    `rows`: of one model after another, each in order. `tokens`: bound of a batch; one model's part of a unit
    may exceed it. `models`: bound on the models of a batch, 0 = none.
    """
    waiting: dict[ModelKey, deque[list[RanRow]]] = {}
    for (model, _), ran in groupby(rows, key=lambda row: (model_of(row.row), row.unit)):
        waiting.setdefault(model, deque()).append(list(ran))
    while waiting:
        first = min(_kind(parts[0]) for parts in waiting.values())
        batch: list[RanRow] = []
        left, places = tokens, models
        for model in [model for model, parts in waiting.items() if _kind(parts[0]) == first]:
            part = waiting[model].popleft()
            size = sum(cost(row.row) for row in part)
            if batch and (size > left or places == 0 < models):
                yield batch
                batch, left, places = [], tokens, models
            batch += part
            left, places = left - size, places - 1
            if not waiting[model]:
                del waiting[model]
        yield batch


def _kind(part: list[RanRow]) -> tuple[int, int]:
    """Return a key of the parts that can run together: passes, which come first, by their row budget."""
    if part[0].effect is Effect.GRADIENTS:
        return 0, part[0].row_budget or 0
    return (2 if part[0].row.kind in SAVES else 1), 0
