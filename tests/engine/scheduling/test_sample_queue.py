"""Owners and sessions that wait for samples have the same tokens."""

import random
from collections import Counter
from dataclasses import dataclass
from unittest.mock import Mock

import pytest

from skyrl_tinker.domain.ids import (
    FutureStatus,
    ModelKey,
    OwnerId,
    RequestId,
    RequestKind,
    SamplingSessionId,
    SessionId,
)
from skyrl_tinker.engine.scheduling.sample_queue import SampleQueue
from skyrl_tinker.engine.scheduling.slots import ALONE_S, Concurrency, SampleTurn, Slots
from skyrl_tinker.inference.constants import RESERVED_SEQUENCES
from skyrl_tinker.protocol.queue_views import QueueView
from skyrl_tinker.store.futures.queue import QueuedRow


def row(
    number: int, session: str, owner: OwnerId | None = None, tokens: int = 1, sequences: int = 1
) -> QueuedRow:
    return QueuedRow(
        id=number,
        request_id=RequestId(str(number)),
        kind=RequestKind.SAMPLE,
        session_id=SessionId(session),
        owner_id=owner,
        model_key=None,
        sampling_session_id=SamplingSessionId(session),
        seq_id=number,
        status=FutureStatus.PENDING,
        body_bytes=1,
        created_at=0.0,
        tokens=tokens,
        sequences=sequences,
    )


def queue_of(slots: int = 10_000) -> SampleQueue:
    return SampleQueue(Slots(Concurrency(slots, slots), lambda: 1))


def take_one(queue: SampleQueue) -> SampleTurn:
    (each,) = queue.take(1)
    return each


def test_who_is_alone_may_have_more_in_flight() -> None:
    now = [0.0]
    queue = SampleQueue(Slots(Concurrency(3, 9), lambda: 1, lambda: now[0]))
    queue.add([row(n, "one") for n in range(30)])
    assert len(queue.take(99)) == 9
    queue.add([row(50, "two")])
    assert [turn.id for turn in queue.take(99)] == [50], "in the reserve"
    queue.release(range(9))
    assert len(queue.take(99)) == 3
    now[0] += 2 * ALONE_S
    queue.release([9])
    assert len(queue.take(99)) == 1, "the other one is still in flight"
    queue.release([50])
    assert queue.take(99) == []
    now[0] += 2 * ALONE_S
    assert len(queue.take(99)) == 6


def test_turns_that_were_given_to_others_are_not_shown() -> None:
    """Those with ids between are in flight, and wait for nobody."""
    queue = queue_of()
    queue.add([row(9, "one"), row(3, "one"), row(4, "two")])
    assert queue.view({3: None, 4: None}).queued == {"one": QueueView((9,), 1)}


def test_a_flood_keeps_nobody_waiting() -> None:
    queue = queue_of()
    queue.add([row(number, "flood") for number in range(1000)])
    queue.add([row(1000 + number, "small") for number in range(3)])
    assert [each.id for each in queue.take(10)] == [0, 1000, 1, 1001, 2, 1002, 3, 4, 5, 6]
    assert len(queue) == 993


def test_a_session_may_change_its_owner_while_its_samples_wait() -> None:
    queue = queue_of()
    queue.add([row(0, "adopted"), *(row(number, "adopted", OwnerId(7)) for number in (1, 2, 3))])
    queue.add([row(10 + number, "other", OwnerId(8)) for number in range(3)])
    assert [each.id for each in queue.take(3)] == [0, 1, 10], "each owner has a turn"
    assert [each.id for each in queue.take(3)] == [2, 11, 3], "the heir has had what its session took"


def test_who_comes_later_is_next() -> None:
    queue = queue_of()
    queue.add([row(number, f"flood {number % 8}") for number in range(800)])
    queue.take(100)
    queue.add([row(1000, "small")])
    assert 1000 in [each.id for each in queue.take(2)]


def test_turns_are_as_long_as_samples_are_large() -> None:
    """Of samples with ten times the tokens a session gets a tenth as many, taken at once or one by one."""
    rows = [
        row(number, *("large", None, 1000) if number % 2 else ("small", None, 100)) for number in range(2000)
    ]
    one_by_one, at_once = queue_of(), queue_of()
    one_by_one.add(rows)
    at_once.add(rows)
    taken = [take_one(one_by_one) for _ in range(440)]
    assert Counter(each.session_id for each in taken)[SessionId("large")] == pytest.approx(40, abs=3)
    assert Counter(each.session_id for each in at_once.take(440)) == Counter(
        each.session_id for each in taken
    )


def test_what_does_not_fit_waits_and_nobody_overtakes_it() -> None:
    queue = queue_of(10)
    queue.add([row(1, "a", sequences=8), row(2, "a", sequences=4), row(3, "a", sequences=1)])
    assert [each.id for each in queue.take(9)] == [1]
    queue.release([1])
    assert [each.id for each in queue.take(9)] == [2, 3]


def test_one_that_is_larger_than_all_there_is_runs_alone() -> None:
    queue = queue_of(10)
    queue.add([row(1, "a", sequences=100), row(2, "a")])
    assert [each.id for each in queue.take(9)] == [1]
    queue.release([1])
    assert [each.id for each in queue.take(9)] == [2]


def test_a_large_one_gets_its_turn_however_many_newcomers_come() -> None:
    queue = queue_of(10)
    queue.add([row(0, "large", sequences=9), row(1, "other", sequences=5)])
    assert {each.id for each in queue.take(9)} == {0, 1}, "one is in the reserve"
    queue.add([row(2, "large", sequences=10)])
    for number in range(3, 50):
        queue.add([row(number, f"new {number}", sequences=5)])
    assert 2 not in {each.id for each in queue.take(100)}
    queue.release([0, 1])
    assert 2 in {each.id for each in queue.take(100)}


def test_a_newcomer_begins_where_a_flood_has_all_and_no_more_of_them_than_the_reserve() -> None:
    queue = queue_of(10)
    queue.add([row(number, "flood") for number in range(100)])
    assert len(queue.take(50)) == 10
    queue.add([row(1000 + number, f"new {number // 2}") for number in range(4 * RESERVED_SEQUENCES)])
    begun = queue.take(1000)
    assert [each.session_id for each in begun] == [f"new {number}" for number in range(RESERVED_SEQUENCES)]
    assert queue.take(1000) == []


@pytest.mark.parametrize("sequences", [5, 6, 24])
def test_newcomers_for_whom_the_reserve_has_no_room_are_not_looked_at(sequences: int) -> None:
    slots = Slots(Concurrency(10, 10), lambda: 1)
    slots.take_reserved = looks = Mock(wraps=slots.take_reserved)  # type: ignore[method-assign]
    queue = SampleQueue(slots)
    queue.add([row(number, "flood") for number in range(100)])
    assert len(queue.take(50)) == 10
    queue.add([row(1000 + number, f"new {number}", sequences=sequences) for number in range(500)])
    begun = queue.take(1000)
    assert len(begun) == RESERVED_SEQUENCES // sequences
    queue.add([row(2000, "narrow")])
    assert [each.id for each in queue.take(1000)] == [2000]
    looks.reset_mock()
    queue.release([begun[0].id])
    assert len(queue.take(1000)) == 1
    assert looks.call_count < 5


def indebted() -> SampleQueue:
    """A queue of which a flood has all places, ahead of a session that had more and has nothing left."""
    queue = queue_of(10)
    queue.add([row(0, "quiet", tokens=10_000), *(row(number, "flood") for number in range(1, 100))])
    assert len(queue.take(50)) == 10
    queue.release([0])
    assert [each.session_id for each in queue.take(50)] == ["flood"]
    return queue


def test_who_had_more_than_a_flood_is_a_newcomer_too() -> None:
    queue = indebted()
    queue.add([row(1000, "quiet")])
    assert [each.id for each in queue.take(50)] == [1000]


def test_who_has_nothing_in_flight_any_more_is_a_newcomer_again() -> None:
    queue = indebted()
    queue.add([row(1000 + number, "quiet") for number in range(2)])
    assert [each.id for each in queue.take(50)] == [1000]
    assert queue.take(50) == []
    queue.release([1000])
    assert [each.id for each in queue.take(50)] == [1001]


def test_a_newcomer_begins_once_the_one_before_it_that_is_too_large_is_dropped() -> None:
    queue = indebted()
    queue.add([row(1000, "quiet", sequences=RESERVED_SEQUENCES + 1), row(1001, "quiet")])
    assert queue.take(50) == []
    queue.discard({1000})
    assert [each.id for each in queue.take(50)] == [1001]


def test_ten_sessions_of_one_owner_get_as_much_as_one_of_another() -> None:
    queue, taken = queue_of(), Counter[OwnerId | None]()
    queue.add([row(number, f"of one {number % 10}", OwnerId(1)) for number in range(1000)])
    queue.add([row(1000 + number, "other", OwnerId(2)) for number in range(1000)])
    for _ in range(200):
        taken[take_one(queue).owner_id] += 1
    assert taken[OwnerId(1)] == pytest.approx(100, abs=1)


def test_what_is_dropped_is_gone_and_the_others_keep_their_turns() -> None:
    queue = queue_of()
    queue.add([row(number, "abc"[number % 3]) for number in range(9)])
    queue.discard({1, 4, 7, 3, 99})
    assert [each.id for each in queue.take(9)] == [0, 2, 5, 6, 8]


@dataclass
class _Turn:
    """Turn that counts in `looked` how often its session is looked at."""

    id: int
    session: SessionId
    looked: Counter[int]
    owner_id: OwnerId | None = None
    model_key: ModelKey | None = None
    tokens: int = 1
    sequences: int = 1

    @property
    def session_id(self) -> SessionId:
        self.looked[self.id] += 1
        return self.session


def test_a_crowd_that_gives_up_is_dropped_without_a_look_at_the_others() -> None:
    queue, looked = queue_of(1), Counter[int]()
    turns = [_Turn(number, SessionId(f"{number % 200}"), looked) for number in range(1000)]
    queue.add(turns)
    looked.clear()
    for number in range(500):
        queue.discard([number])
        queue.discard([number])
    assert len(queue) == 500
    assert looked.total() < 5 * 500
    assert [each.id for each in queue.take(1)] == [500]


@pytest.mark.parametrize("seed", range(5))
def test_it_is_told_about_how_many_come_first(seed: int) -> None:
    draw = random.Random(seed)
    queue = queue_of()
    queue.add([row(number, draw.choice("aaabbc")) for number in range(40)])
    queue.take(draw.randrange(20))
    seen = queue.view()
    told = [seen.ahead(each.session_id, each.id) for each in queue.take(len(queue))]
    assert all(abs((ahead or 0) - place) <= 2 for place, ahead in enumerate(told))
    assert seen.ahead("nobody", 1) is None


def test_of_very_many_few_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl_tinker.engine.scheduling.sample_queue.SHOWN", 10)
    queue = queue_of()
    queue.add([row(number, "a") for number in range(100)])
    assert [len(each.ids) for each in queue.view().queued.values()] == [10]
    assert queue.view().ahead("a", 45) == 50


def test_of_very_many_sessions_the_first_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the others nobody knows how many are ahead, but who runs is not said to wait."""
    monkeypatch.setattr("skyrl_tinker.engine.scheduling.sample_queue.LISTED", 3)
    queue = queue_of()
    queue.add([row(number, f"session {number % 5}") for number in range(10)])
    (running,) = queue.take(1)
    seen = queue.view()
    assert list(seen.queued) == ["session 1", "session 2", "session 3"]
    assert (seen.waiting, seen.running, running.id) == (9, (0,), 0)
    assert [seen.ahead("session 4", 4), seen.ahead("session 0", 0), seen.ahead("session 0", 5)] == [
        3,
        None,
        3,
    ]
    queue.take(4)
    assert queue.view().running is not None
    queue.discard({5, 6})
    assert queue.view().running is None
