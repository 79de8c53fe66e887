"""Numbers that scripts report of their runs, such as the reward: kept as long as points of curves."""

from collections.abc import Mapping

from sqlalchemy import Connection, insert, select

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.protocol.schemas.console import ReportedPoint, ReportsResponse
from skyrl_tinker.store.database.rows import database_time
from skyrl_tinker.store.database.tables import Model, RunReport

REWARDS = "reward", "env/all/reward/total"
"""Names of the reward, the best known first; the second is the cookbook's."""
_REWARDED = RunReport.model_key == Model.key, RunReport.reward.is_not(None)
LAST_REWARD, LAST_REWARDED = (
    select(column).where(*_REWARDED).order_by(RunReport.id.desc()).limit(1).scalar_subquery()
    for column in (RunReport.reward, RunReport.id)
)
"""In a query of models: the reward reported last, and the number of its report; null without one."""


def add(conn: Connection, model: ModelKey, step: int, values: Mapping[str, float]) -> None:
    """Add a report. Several of one step complete each other; of one name the last counts."""
    row = {"model_key": model, "step": step, "at": database_time(conn), "reward": _reward(values)}
    conn.execute(insert(RunReport).values(**row, numbers=dict(values)))


def reports_after(
    conn: Connection, model: ModelKey, after: int, limit: int, *, reward_only: bool = False
) -> ReportsResponse:
    """Return the reports that came behind one, in the order in which they came."""
    query = select(RunReport.id, RunReport.step, RunReport.at, RunReport.reward)
    query = query.where(RunReport.model_key == model, RunReport.id > after)
    if reward_only:
        query = query.where(RunReport.reward.is_not(None))
    else:
        query = query.add_columns(RunReport.numbers.label("values"))
    rows = conn.execute(query.order_by(RunReport.id).limit(limit)).all()
    reports = [ReportedPoint(**{"values": {}, **row._mapping}) for row in rows]
    return ReportsResponse(reports=reports, next=rows[-1].id if rows else after, more=len(rows) == limit)


def of_step(conn: Connection, model: ModelKey, step: int) -> dict[str, float]:
    """Return the numbers that were reported of one step."""
    query = select(RunReport.numbers).where(RunReport.model_key == model, RunReport.step == step)
    reports = conn.scalars(query.order_by(RunReport.id))
    return {name: value for numbers in reports for name, value in numbers.items()}


def _reward(values: Mapping[str, float]) -> float | None:
    """Return the reward: by one of the known names, else the first with `reward` as a part of its path."""
    parts = (name for name in values if "reward" in name.split("/"))
    name = next((known for known in REWARDS if known in values), next(parts, None))
    return None if name is None else values[name]
