"""Beginnings of stored passes, by which lists name them."""

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from sqlalchemy import Connection

from skyrl_tinker.protocol.protobuf import pass_requests
from skyrl_tinker.store.console.readable_requests import body_of
from skyrl_tinker.store.database.rows import AnyRow

MOST, SHOWN = 4096, 40
"""Passes that are remembered, and tokens that are shown of a text."""


class PassHead(NamedTuple):
    """Loss function of a pass, its number of datums, and tokens of the first one.

    They are those shown, and one more, if there are more.
    """

    loss_fn: str
    datums: int
    tokens: Sequence[int]


class PassHeads:
    """Beginnings of the passes that were listed last: a body has up to 5 MB, and does not change."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, PassHead] = OrderedDict()

    def of(self, conn: Connection, row: AnyRow) -> PassHead:
        """Return that of a row of `readable_requests`, whose body is stored."""
        head = self._known.get(row.request_id)
        if head is None:
            loss_fn, datums, tokens = pass_requests.head_of(body_of(conn, row.id))
            head = self._known[row.request_id] = PassHead(loss_fn, datums, tokens[: SHOWN + 1].tolist())
            if len(self._known) > MOST:
                self._known.popitem(last=False)
        with suppress(KeyError):  # another thread's is the newest just now
            self._known.move_to_end(row.request_id)
        return head
