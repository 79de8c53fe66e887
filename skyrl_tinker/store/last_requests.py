"""Time of a model's last request: of its newest one in training, which nobody needs to note as it comes."""

from sqlalchemy import Connection, case, select, update

from skyrl_tinker.domain.ids import SessionId
from skyrl_tinker.store.database.tables import Future, Model

_NEWEST = (
    select(Future.created_at)
    .where(Future.model_key == Model.key, Future.seq_id.is_not(None))
    .order_by(Future.seq_id.desc())
    .limit(1)
    .scalar_subquery()
)
LAST_REQUEST_AT = case((Model.last_request_at < _NEWEST, _NEWEST), else_=Model.last_request_at)
"""In a query of models: UTC seconds. The column itself has what `note` found."""


def note(conn: Connection, session: SessionId) -> None:
    """Note it for the models of a session, whose requests will be deleted."""
    of_session = update(Model).where(Model.session_id == session)
    conn.execute(of_session.values(last_request_at=LAST_REQUEST_AT))
