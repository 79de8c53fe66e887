"""Losses uploaded by clients. Each may be used only in its own session."""

from dataclasses import dataclass

from sqlalchemy import Connection, func, insert, select

from skyrl_tinker.domain.ids import SessionId
from skyrl_tinker.domain.values import CustomLoss, Failure
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol import custom_loss
from skyrl_tinker.store.database.rows import database_time
from skyrl_tinker.store.database.tables import UploadedLoss

MAX_PER_SESSION = 1000


@dataclass(frozen=True, slots=True)
class NewLoss:
    """Loss to record, or why it was refused. `digest`: of the request."""

    session_id: SessionId
    seq_id: int
    loss: CustomLoss | Failure
    digest: bytes

    @property
    def loss_id(self) -> str:
        return f"{self.session_id}:loss:{self.seq_id}"


def add(conn: Connection, new: NewLoss, future_id: int) -> None:
    """Insert a loss. The caller has looked for duplicates in the same transaction."""
    row = insert(UploadedLoss).values(
        loss_id=new.loss_id,
        session_id=new.session_id,
        seq_id=new.seq_id,
        future_id=future_id,
        definition=None if isinstance(new.loss, Failure) else custom_loss.to_bytes(new.loss),
        created_at=database_time(conn),
    )
    conn.execute(row)


def require_capacity(conn: Connection, session_id: SessionId) -> None:
    """Raise UserError if the session has uploaded as many losses as it may, refused ones counted."""
    query = select(func.count()).where(UploadedLoss.session_id == session_id)
    if (conn.scalar(query) or 0) >= MAX_PER_SESSION:
        raise UserError(
            f"session {session_id} has created {MAX_PER_SESSION} custom losses, the limit: "
            "use those, or a new session"
        )


def get(conn: Connection, session_id: SessionId, loss_id: str) -> CustomLoss | None:
    """Return a loss, None if it is unknown, was refused, or belongs to another session."""
    query = select(UploadedLoss.definition).where(
        UploadedLoss.loss_id == loss_id, UploadedLoss.session_id == session_id
    )
    stored = conn.scalar(query)
    return None if stored is None else custom_loss.from_bytes(stored)
