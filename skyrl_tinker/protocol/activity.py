"""Activity of the engine in the last minutes, as the API gets it for a trace. Times are UTC seconds.

They are by the database's clock, as those of the requests beside them.
"""

from dataclasses import dataclass

import orjson
from pydantic import TypeAdapter


@dataclass(frozen=True, slots=True)
class RankSpan:
    """Work of one rank: a call of one of its methods."""

    rank: int
    method: str
    began_at: float
    ended_at: float


@dataclass(frozen=True, slots=True)
class UnitSpan:
    """Unit of work of the trainer of `base_model`; `future_ids`: of the requests that ran in it."""

    kind: str
    began_at: float
    ended_at: float
    tokens: int
    future_ids: tuple[int, ...]
    ranks: tuple[RankSpan, ...] = ()
    base_model: str = ""


@dataclass(frozen=True, slots=True)
class SampleSpan:
    """Sample, from its turn to its result; `replicas`: addresses of those that answered."""

    future_id: int
    began_at: float
    ended_at: float
    replicas: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PublishSpan:
    """Weights on their way to the samplers, from their capture to the answer of the save, `future_id`."""

    weights: str
    future_id: int
    began_at: float
    ended_at: float


@dataclass(frozen=True, slots=True)
class SyncSpan:
    """Sync of full parameters to all replicas; `paused_at`: from then on samples waited for its end."""

    version: str
    began_at: float
    paused_at: float
    ended_at: float
    base_model: str = ""


@dataclass(frozen=True, slots=True)
class Activity:
    """Spans, each kind in the order of their ends."""

    units: tuple[UnitSpan, ...] = ()
    samples: tuple[SampleSpan, ...] = ()
    publishes: tuple[PublishSpan, ...] = ()
    syncs: tuple[SyncSpan, ...] = ()

    def to_bytes(self) -> bytes:
        return orjson.dumps(self)


_ADAPTER = TypeAdapter(Activity)


def activity_from_bytes(data: bytes) -> Activity:
    return _ADAPTER.validate_json(data)
