"""Fair shares that are kept are those that their definition gives, whatever comes, goes and is charged."""

import itertools
from dataclasses import replace
from itertools import islice

from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_tinker.domain.ids import ModelKey, OwnerId
from skyrl_tinker.engine.scheduling.fair_share import FairShare, path_of
from skyrl_tinker.store.futures.queue import QueuedRow
from tests.engine.support.rebuilt_shares import RebuiltShares
from tests.engine.support.rows import queued

QUEUES, ROWS = 12, 4


def tokens(row: QueuedRow) -> float:
    return row.body_bytes / 16


come = st.tuples(st.integers(0, QUEUES - 1), st.integers(1, 3), st.integers(1, ROWS))
go = st.integers(0, QUEUES - 1)
take = st.tuples(st.integers(0, 6), st.sampled_from([0.5, 1.0, 3.0]))
"""Rows of the order that a choice takes, and by how much more than estimated they take."""
events = st.lists(st.one_of(come, go, take), max_size=80)


def test_a_debt_lasts_until_the_others_have_had_as_much() -> None:
    a, b = (queued(number, ModelKey(number), 0, session=f"session-{number}") for number in (1, 2))
    shares: FairShare[QueuedRow] = FairShare()
    shares.put(path_of(a), [a])
    shares.put(path_of(b), [b])
    shares.choose()
    shares.charge([(a, 4.0), (b, 5.0)])
    shares.put(path_of(b), [])
    shares.choose()
    shares.charge([])
    shares.put(path_of(b), [b])
    assert shares.ahead(path_of(b)) == 1.0
    shares.put(path_of(b), [])
    shares.charge([(a, 2.0)])
    shares.choose()
    shares.put(path_of(b), [b])
    assert shares.ahead(path_of(a)) == 0.0, "nobody saves up"
    assert shares.first() is a, "the older one where both have had the same"


def test_an_owner_that_comes_back_without_a_debt_has_forgotten_those_of_its_sessions() -> None:
    other = queued(1, ModelKey(1), 0, owner=OwnerId(1), session="other")
    older, newer = (
        queued(number, ModelKey(number), 0, owner=OwnerId(2), session=f"{number}") for number in (2, 3)
    )
    shares: FairShare[QueuedRow] = FairShare()
    for row in (other, older, newer):
        shares.put(path_of(row), [row])
    shares.choose()
    shares.charge([(older, 5.0)])
    for row in (older, newer):
        shares.put(path_of(row), ())
    for _ in range(3):
        shares.choose()
        shares.charge([(other, 6.0)])
    for row in (older, newer):
        shares.put(path_of(row), [row])
    assert [row.id for row in shares.order(tokens)] == [2, 1, 3]


def test_what_is_charged_instead_replaces_what_was_charged_last() -> None:
    a, b = (queued(number, ModelKey(number), 0, session=f"session-{number}") for number in (1, 2))
    shares: FairShare[QueuedRow] = FairShare()
    for row in (a, b):
        shares.put(path_of(row), [row])
    shares.choose()
    shares.charge([(a, 4.0)])
    assert shares.first() is b
    shares.charge([(b, 1.0)], instead=True)
    assert shares.first() is a
    assert (shares.ahead(path_of(a)), shares.ahead(path_of(b))) == (0.0, 1.0)


def test_who_moves_behind_others_has_left_its_place() -> None:
    a, b, c, newer = (queued(number, ModelKey(number), 0, session=f"session-{number}") for number in range(4))
    shares: FairShare[QueuedRow] = FairShare()
    for row in (a, b, c):
        shares.put(path_of(row), [row])
    assert [*shares.order(tokens)] == [a, b, c]
    shares.put(path_of(b), [newer])
    assert [*shares.order(tokens)] == [a, c, newer]


@given(events, st.booleans())
@settings(max_examples=200)
def test_any_history(history: list[tuple[int, int, int] | int | tuple[int, float]], samples: bool) -> None:
    numbers = itertools.count()
    waiting: dict[int, list[QueuedRow]] = {}
    kept: FairShare[QueuedRow] = FairShare()
    rebuilt = RebuiltShares()
    for event in history:
        if isinstance(event, tuple) and len(event) == 3:
            queue, size, rows = event
            place = ModelKey(queue), 0, OwnerId(queue % 2), f"session-{queue % 6}"
            new = [_row(next(numbers), *place, tokens=10 * size, sample=samples) for _ in range(rows)]
            path = path_of(new[0])
            key = queue % 6 if samples else queue
            waiting[key] = [*waiting.get(key, ()), *new]
            kept.put(path, waiting[key])
        elif isinstance(event, tuple):
            most, factor = event
            rebuilt = rebuilt.joined_by(waiting.values())
            order = rebuilt.order(waiting.values(), tokens)
            taken = list(islice(order, most))
            assert [row.id for row in taken] == [row.id for row in islice(kept.order(tokens), most)]
            assert kept.first() == next(rebuilt.order(waiting.values(), tokens), None)
            for rows in waiting.values():
                assert kept.ahead(path_of(rows[0])) == rebuilt.ahead(rows[0])
            kept.choose()
            kept.charge([(row, tokens(row)) for row in taken])
            costs = [(row, factor * tokens(row)) for row in taken]
            kept.charge(costs, instead=True)
            rebuilt = rebuilt.charged(costs)
            for row in taken:
                (key,) = (each for each, rows in waiting.items() if row in rows)
                waiting[key] = [each for each in waiting[key] if each is not row]
                kept.put(path_of(row), waiting[key])
                if not waiting[key]:
                    del waiting[key]
            if not waiting:
                kept.clear()
                rebuilt = RebuiltShares()
        elif event in waiting:
            kept.put(path_of(waiting[event][0]), ())
            del waiting[event]


def _row(
    number: int, model: ModelKey, place: int, owner: OwnerId, session: str, *, tokens: int, sample: bool
) -> QueuedRow:
    row = queued(number, model, place, tokens=tokens, session=session, owner=owner)
    return replace(row, model_key=None) if sample else row
