"""Token counts by hour, session, base model and kind of request.

A result is written with its tokens, at no extra statement. `roll_up` adds each result once, before results
are purged; until then a query counts them. OpenAI's requests have no result here and are added at once.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Select,
    case,
    cast,
    func,
    literal,
    literal_column,
    select,
    true,
)

from skyrl_tinker.domain.ids import OwnerId, Reach, RequestKind, openai_session
from skyrl_tinker.domain.values import Usage
from skyrl_tinker.store import server_state
from skyrl_tinker.store.database.rows import database_time, total, upsert
from skyrl_tinker.store.database.tables import Future, Model, Result, SamplingSession, Session, UsageRecord
from skyrl_tinker.store.owners import within

HOUR_S = 3600
KINDS = (RequestKind.FORWARD, RequestKind.FORWARD_BACKWARD, RequestKind.SAMPLE)
_COUNTED = "usage_counted"  # results up to this id are in usage_records
_KEY = ("hour", "session_id", "base_model", "kind")
_TOKENS = ("input_tokens", "cached_tokens", "output_tokens")


@dataclass(frozen=True, slots=True)
class Hourly:
    """Tokens of one hour, counted from the epoch."""

    hour: int
    session_id: str
    base_model: str
    kind: RequestKind
    usage: Usage


def roll_up(conn: Connection, most: int | None = None) -> bool:
    """Count at most `most` of the results that are not counted yet. Returns True if there may be more."""
    done = counted(conn)
    last = conn.scalar(select(func.max(Result.id))) or 0
    end = last if most is None else min(last, done + most)
    if end > done:
        conn.execute(_adding(conn, _of_results(Result.id > done, Result.id <= end)))
        server_state.put(conn, _COUNTED, end)
    return end < last


def add_openai(conn: Connection, owner: OwnerId | None, base_model: str, usage: Usage) -> None:
    """Count an answered request of an OpenAI client: all of one owner are a session, which ended with it."""
    session, now = openai_session(owner), database_time(conn)
    row = upsert(conn, Session).values(
        session_id=session,
        owner_id=owner,
        created_at=now,
        last_heartbeat_at=now,
        finished_at=now,
        finish_reason="success",
        tags=[],
        user_metadata={},
        display_name="OpenAI clients",
        sdk_version="openai",
    )
    seen = {"last_heartbeat_at": now, "finished_at": now}
    conn.execute(row.on_conflict_do_update(index_elements=["session_id"], set_=seen))
    key = literal(int(now // HOUR_S)), literal(session), literal(base_model), literal(RequestKind.SAMPLE)
    tokens = (literal(getattr(usage, name)) for name in _TOKENS)
    conn.execute(_adding(conn, select(*key, *tokens).where(true())))


def hourly_between(conn: Connection, reach: Reach, first: int, end: int) -> list[Hourly]:
    """Return the tokens that the caller sees of the hours [first, end).

    Reads all results since the last roll-up.
    """
    in_time = Future.finished_at >= first * HOUR_S, Future.finished_at < end * HOUR_S
    fresh = _of_results(Result.id > counted(conn), within(reach), *in_time)
    added_up = (
        select(
            UsageRecord.hour,
            UsageRecord.session_id,
            UsageRecord.base_model,
            UsageRecord.kind,
            *(total(getattr(UsageRecord, name)) for name in _TOKENS),
        )
        .join(Session, Session.session_id == UsageRecord.session_id)
        .where(within(reach), UsageRecord.hour >= first, UsageRecord.hour < end)
        .group_by(UsageRecord.hour, UsageRecord.session_id, UsageRecord.base_model, UsageRecord.kind)
    )
    return _merged([*_grouped(conn, added_up), *_grouped(conn, fresh)])


def counted(conn: Connection) -> int:
    """Return the id up to which results are counted."""
    return int(server_state.get(conn, _COUNTED) or 0)


def _of_results(*where: ColumnElement[bool]) -> Select[Any]:
    """Return a query of results with the columns of Hourly."""
    hours = Future.finished_at / literal_column(str(HOUR_S))
    nearest = cast(hours, BigInteger)  # by PostgreSQL; by SQLite the one below
    hour = nearest - case((nearest > hours, literal_column("1")), else_=literal_column("0"))
    base_model = func.coalesce(Model.base_model, SamplingSession.base_model)
    return (
        select(
            hour,
            Future.session_id,
            base_model,
            Future.kind,
            *(total(getattr(Result, name)) for name in _TOKENS),
        )
        .join(Future, Future.id == Result.future_id)
        .join(Session, Session.session_id == Future.session_id)
        .outerjoin(Model, Model.key == Future.model_key)
        .outerjoin(SamplingSession, SamplingSession.sampling_session_id == Future.sampling_session_id)
        .where(Future.kind.in_(KINDS), Result.input_tokens > 0, *where)
        .group_by(hour, Future.session_id, base_model, Future.kind)
    )


def _grouped(conn: Connection, query: Select[Any]) -> list[Hourly]:
    rows = conn.execute(query)
    return [
        Hourly(hour, session, model, kind, Usage(*tokens)) for hour, session, model, kind, *tokens in rows
    ]


def _merged(parts: Iterable[Hourly]) -> list[Hourly]:
    sums: dict[tuple[int, str, str, RequestKind], Usage] = {}
    for part in parts:
        key = part.hour, part.session_id, part.base_model, part.kind
        sums[key] = part.usage + sums.get(key, Usage())
    return [Hourly(*key, usage) for key, usage in sums.items()]


def _adding(conn: Connection, counted: Select[Any]) -> Any:
    """Return one statement for all sessions: other writers wait meanwhile."""
    row = upsert(conn, UsageRecord).from_select([*_KEY, *_TOKENS], counted)
    more = {name: getattr(UsageRecord, name) + row.excluded[name] for name in _TOKENS}
    return row.on_conflict_do_update(index_elements=_KEY, set_=more)
