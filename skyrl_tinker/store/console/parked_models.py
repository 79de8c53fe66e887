"""Parked models, of each owner and base model those that were made last."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from skyrl_tinker.domain.ids import ModelState, OwnerId
from skyrl_tinker.store.database.rows import as_row
from skyrl_tinker.store.database.tables import Model, Session

NAMED = 3
"""Most that are named, of each owner and base model."""


@dataclass(frozen=True, slots=True)
class ParkedModel:
    """One of `count` parked models of an owner and a base model. `name`: that of its session."""

    model_id: str
    name: str | None
    owner_id: OwnerId | None
    base_model: str
    count: int
    state_reason: str

    @property
    def cause(self) -> str:
        """Reason of the parking, without the id and the last checkpoint."""
        told = self.state_reason.removeprefix(f"model {self.model_id} is parked: ")
        return told.rpartition("; ")[0] or told


def parked_models(conn: Connection) -> Sequence[ParkedModel]:
    """Return parked models, the newest first."""
    group = Session.owner_id, Model.base_model
    newest = func.row_number().over(partition_by=group, order_by=Model.key.desc())
    ranked = (
        select(
            Model.key,
            Model.model_id,
            Session.display_name.label("name"),
            Session.owner_id,
            Model.base_model,
            func.count().over(partition_by=group).label("count"),
            func.coalesce(Model.state_reason, "").label("state_reason"),
            newest.label("place"),
        )
        .join(Session, Session.session_id == Model.session_id)
        .where(Model.state == ModelState.PARKED)
        .subquery()
    )
    query = select(ranked).where(ranked.c.place <= NAMED).order_by(ranked.c.key.desc())
    return [as_row(ParkedModel, row) for row in conn.execute(query)]
