"""Refused credentials, counted by address between two entries of the audit log."""

import logging
from collections import Counter
from dataclasses import dataclass
from functools import partial

from sqlalchemy import Connection

from skyrl_tinker.domain.ids import OwnerId
from skyrl_tinker.store import audit_log
from skyrl_tinker.store.database.abstract_database import after_commit

MOST_ADDRESSES = 32
OTHERS = "other addresses"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refused credential: of `key` if that is known, then `why` says how it ended."""

    address: str
    why: str
    key: OwnerId | None = None


class Refusals:
    """Counts of refused credentials: at most MOST_ADDRESSES entries, the rest under OTHERS."""

    def __init__(self) -> None:
        self._counts: Counter[Refusal] = Counter()

    def note(self, refusal: Refusal, count: int = 1) -> None:
        if refusal not in self._counts and len(self._counts) >= MOST_ADDRESSES:
            refusal = Refusal(OTHERS, "any")
        self._counts[refusal] += count

    def put_back(self, counts: Counter[Refusal]) -> None:
        """Count the taken refusals again that could not be recorded."""
        for refusal, count in counts.items():
            self.note(refusal, count)

    def take(self) -> Counter[Refusal]:
        """Return the counts and begin anew."""
        taken, self._counts = self._counts, Counter()
        return taken


def record(conn: Connection, counts: Counter[Refusal]) -> None:
    """Write one event per entry: `key_ended_use` for a key that has ended, else `login_fail`."""
    for refusal, count in counts.items():
        event = "login_fail" if refusal.key is None else "key_ended_use"
        audit_log.record_key(conn, event, refusal.key, address=refusal.address, why=refusal.why, count=count)
        told = "refused %d credentials from %s: %s", count, refusal.address, refusal.why
        after_commit(conn, partial(_log.warning, *told))
