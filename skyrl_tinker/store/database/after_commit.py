"""Calls that wait for the commit of the transaction in which they are made, such as lines of logs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy import Connection

Call = Callable[[], object]
_CALLS = "after_commit"


def after_commit(conn: Connection, call: Call) -> None:
    """Have it called once the write that runs is on disk, by the thread that wrote; never if it is undone."""
    conn.info[_CALLS].append(call)


@contextmanager
def calling_afterwards(conn: Connection) -> Iterator[None]:
    """Context of a whole transaction, around its commit."""
    calls: list[Call] = []
    conn.info[_CALLS] = calls
    yield
    for call in calls:
        call()


@contextmanager
def dropping_undone(conn: Connection) -> Iterator[None]:
    """Context of a part that is undone if it raises: then its calls are dropped."""
    calls: list[Call] = conn.info[_CALLS]
    before = len(calls)
    try:
        yield
    except BaseException:
        del calls[before:]
        raise
