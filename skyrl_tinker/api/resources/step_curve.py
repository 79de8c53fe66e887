"""Training curves of one run: points as columns, and as CSV."""

from collections.abc import AsyncIterator, Sequence
from functools import partial

from skyrl_tinker.domain.ids import ModelKey, Reach
from skyrl_tinker.protocol.schemas.console import PointsResponse
from skyrl_tinker.store.console import step_points
from skyrl_tinker.store.console.step_points import NAMES, Point
from skyrl_tinker.store.database.rows import PAGE
from skyrl_tinker.store.store import Store

HEADER = ("step", "at", *NAMES)


def columns(points: Sequence[Point], after: int, limit: int) -> PointsResponse:
    """Return points that were read behind `after`, at most `limit`."""
    rows = [_values(point) for point in points]
    by_name = {name: [row[place] for row in rows] for place, name in enumerate(HEADER)}
    last = points[-1].step if points else after
    return PointsResponse(columns=by_name, next=last, more=len(points) == limit)


async def csv_lines(store: Store, reach: Reach, model: ModelKey) -> AsyncIterator[bytes]:
    """Yield the CSV in pieces, a page of points in memory at a time."""
    yield f"{','.join(HEADER)}\r\n".encode()
    after, more = 0, True
    while more:
        read = partial(step_points.points_after, model=model, step=after, limit=PAGE)
        points = await store.report(read, reach)
        more = len(points) == PAGE
        if points:
            after = points[-1].step
            yield "".join(map(_line, points)).encode()


def _values(point: Point) -> list[float | None]:
    return [point.step, point.at, *(getattr(point.measured, name) for name in NAMES)]


def _line(point: Point) -> str:
    """Return a line of numbers, which need no quotes; an unknown one is empty."""
    return ",".join("" if value is None else str(value) for value in _values(point)) + "\r\n"
