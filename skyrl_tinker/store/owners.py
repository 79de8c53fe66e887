"""Whose a row is. Sessions have an owner; models, samplers, futures and checkpoints are their session's."""

from sqlalchemy import ColumnElement, bindparam

from skyrl_tinker.store.tables import Session
from skyrl_tinker.wire.ids import OwnerId


def owned_by(owner: OwnerId | None) -> ColumnElement[bool]:
    """SQL: the joined session is this owner's."""
    return Session.owner_id.is_not_distinct_from(owner)


OWNED = Session.owner_id.is_not_distinct_from(bindparam("owner"))
"""The same in statements that are built once."""
