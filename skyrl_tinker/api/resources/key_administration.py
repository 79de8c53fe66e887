"""Keys and their owners, for the holder of an admin key."""

from sqlalchemy import Connection

from skyrl_tinker.api.security.tokens import Caller
from skyrl_tinker.errors import ForbiddenError, UserError
from skyrl_tinker.protocol.schemas.administration import AdminResponse, KeySummary, OwnedNow
from skyrl_tinker.protocol.validation.key_limits import NAMES, KeyLimits
from skyrl_tinker.store import api_keys
from skyrl_tinker.store.api_keys import KeyRow
from skyrl_tinker.store.database.rows import values_of
from skyrl_tinker.store.reports.holdings import NOTHING, totals_by_owner


def require_admin(caller: Caller, *, keyless: bool = False) -> None:
    """Raise ForbiddenError unless the caller has an admin key; `keyless`: or the server has no keys.

    Keys are not for whom a server without keys lets in: another user of the machine could make the first
    one, and lock out whom the home belongs to. All else such a server shows and ends for everybody.
    """
    if not caller.admin and not (keyless and caller.owner is None):
        raise ForbiddenError(
            f"X-API-Key: found {'no admin key' if caller.owner else 'none'}, expected an admin key, made by "
            "`skyrl-tinker keys create --name NAME --admin` on the server's machine"
        )


def require_other(caller: Caller, key: int) -> None:
    """Refuse that a key changes itself: one mistake would lock its holder out."""
    if caller.owner == key:
        raise UserError(
            f"key: found {key}, which is the one that asks, expected another: use another admin key, or "
            "`skyrl-tinker keys` on the server's machine"
        )


def overview(conn: Connection, limits: KeyLimits, now: float) -> AdminResponse:
    totals = totals_by_owner(conn, now)
    return AdminResponse(
        keys=[_summary(row, totals.get(row.id, NOTHING), now) for row in api_keys.list_keys(conn)],
        without_key=totals.get(None, NOTHING),
        limits={name: getattr(limits, name) for name in NAMES},
    )


def _summary(row: KeyRow, owned: OwnedNow, now: float) -> KeySummary:
    facts = values_of(row) | {"limits": row.limits or {}}
    return KeySummary(**facts, live=row.is_live(now), owned=owned)
