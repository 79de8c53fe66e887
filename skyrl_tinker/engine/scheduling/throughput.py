"""Recent speed of work: for shares of the trainer, and for the estimates shown to waiting clients."""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate

from skyrl_tinker.domain.ids import RequestKind
from skyrl_tinker.engine.scheduling.row_work import TOKEN_WORK, Work, work_of
from skyrl_tinker.protocol.queue_views import TokenRates
from skyrl_tinker.store.futures.queue import QueuedRow

UNITS = 16
ENDS, ENDS_S = 1024, 60.0
"""Most completions that are kept, and for how many seconds."""
METERED_S = 60
SLOT_S, SLOTS = 10, 360  # an hour
FIRST_GUESS = 3e-5, 4096.0
"""Seconds per token of a forward pass before any measurement, and the weight of this guess in tokens."""
LEAST_S = 1e-4
"""Least seconds counted for a row: a stream of rows without cost must not be served forever."""


class TrainerPace:
    """Trainer time of requests: estimated from recent units, and attributed to requests after a unit."""

    def __init__(self) -> None:
        self._passes: deque[tuple[float, float]] = deque(
            [FIRST_GUESS], maxlen=UNITS
        )  # seconds per work, work
        self._pass_s = FIRST_GUESS[0]
        self._barriers: dict[RequestKind, float] = {}  # seconds of a row, as last measured

    def seconds(self, works: Iterable[Work]) -> float:
        """Estimate the trainer time of rows in seconds."""
        pass_s, barriers, total_s = self._pass_s, self._barriers, 0.0
        for work in works:
            if isinstance(work, int):
                total_s += took_s if (took_s := work * pass_s) > LEAST_S else LEAST_S
            else:
                total_s += barriers.get(work, LEAST_S)
        return total_s

    def attribute(
        self, rows: Sequence[QueuedRow], seconds: float, own: Mapping[int, float]
    ) -> list[tuple[QueuedRow, float]]:
        """Divide the seconds of a unit among its rows. `own`: seconds by row id beyond the common work.

        Ranks work on `own` concurrently, so that its sum may exceed the unit's duration.
        """
        beyond = sum(own.values())
        part = min(1.0, seconds / beyond) if beyond else 0.0
        common = seconds - part * beyond
        works = [work if isinstance(work, int) else 1 for work in map(work_of, rows)]
        total = sum(works)
        if common > 0:
            self._learn(rows, total, common)
        return [
            (row, max(LEAST_S, common * work / total + part * own.get(row.id, 0.0)))
            for row, work in zip(rows, works, strict=True)
        ]

    def _learn(self, rows: Sequence[QueuedRow], work: float, seconds: float) -> None:
        if rows[0].kind in TOKEN_WORK:
            self._passes.append((seconds / work, work))
            self._pass_s = _weighted_median(self._passes)
        else:
            self._barriers[rows[0].kind] = seconds / len(rows)


def _weighted_median(pairs: Iterable[tuple[float, float]]) -> float:
    """Return the value that halves the weights: warm-ups and tiny units have little influence."""
    ordered = sorted(pairs)
    reached = list(accumulate(weight for _, weight in ordered))
    return ordered[bisect_left(reached, reached[-1] / 2)][0]


class UnitTimes:
    """Durations of the last units of work. `running`: the rows of the unit that runs."""

    def __init__(self) -> None:
        self.running: Sequence[QueuedRow] = ()
        self._began = 0.0
        self._durations: deque[float] = deque(maxlen=UNITS)

    @contextmanager
    def unit(self, rows: Sequence[QueuedRow]) -> Iterator[None]:
        self._began, self.running = time.monotonic(), rows
        try:
            yield
        finally:
            self.running = ()
            self._durations.append(time.monotonic() - self._began)

    def running_s(self) -> float | None:
        """Return the seconds since the running unit began; None if none runs."""
        return time.monotonic() - self._began if self.running else None

    def seconds(self) -> float | None:
        """Return the mean duration of the last units; None before the first."""
        return sum(self._durations) / len(self._durations) if self._durations else None


class TokenMeter:
    """Tokens of the last minute, by second, and of the last hour, by SLOT_S."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, int]] = deque(maxlen=METERED_S)  # second, tokens
        self._slots: deque[tuple[int, int]] = deque(maxlen=SLOTS)  # the same of each SLOT_S
        self._began = int(time.monotonic()) // SLOT_S

    def add(self, tokens: int) -> None:
        now = int(time.monotonic())
        _count(self._seconds, now, tokens)
        _count(self._slots, now // SLOT_S, tokens)

    def rates(self) -> TokenRates:
        now = time.monotonic()
        return TokenRates(*(self._since(now - seconds) / seconds for seconds in (10, METERED_S)))

    def hour(self) -> list[float]:
        """Return the tokens per second of each whole SLOT_S of the last hour, the newest last."""
        now, tokens = int(time.monotonic()) // SLOT_S, dict(self._slots)
        return [tokens.get(slot, 0) / SLOT_S for slot in range(max(self._began, now - SLOTS), now)]

    def _since(self, at: float) -> int:
        return sum(tokens for second, tokens in self._seconds if second >= at)


def _count(counts: deque[tuple[int, int]], now: int, tokens: int) -> None:
    earlier = counts.pop()[1] if counts and counts[-1][0] == now else 0
    counts.append((now, earlier + tokens))


class EndRate:
    """Completions per second of work that runs concurrently."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=ENDS)

    def record(self) -> None:
        self._times.append(time.monotonic())

    def per_second(self) -> float | None:
        """Return the recent rate; None if nothing ended."""
        now = time.monotonic()
        recent = [at for at in self._times if at > now - ENDS_S]
        return len(recent) / (now - recent[0]) if recent and now > recent[0] else None
