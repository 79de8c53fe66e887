"""Sessions that wait for samples are served alike."""

import random

import pytest

from skyrl_tinker.domain.ids import FutureStatus, RequestId, RequestKind, SamplingSessionId, SessionId
from skyrl_tinker.engine.scheduling.sample_queue import SampleQueue
from skyrl_tinker.protocol.queue_views import SamplingView
from skyrl_tinker.store.futures.queue import QueuedRow


def row(number: int, session: str) -> QueuedRow:
    return QueuedRow(
        id=number,
        request_id=RequestId(str(number)),
        kind=RequestKind.SAMPLE,
        session_id=SessionId(session),
        owner_id=None,
        model_key=None,
        sampling_session_id=SamplingSessionId(session),
        seq_id=number,
        status=FutureStatus.PENDING,
        body_bytes=1,
        created_at=0.0,
    )


def view(queue: SampleQueue) -> SamplingView:
    shown, stride = queue.view()
    return SamplingView(shown, stride, len(queue))


def test_a_flood_keeps_nobody_waiting() -> None:
    queue = SampleQueue()
    queue.add([row(number, "flood") for number in range(1000)])
    queue.add([row(1000 + number, "small") for number in range(3)])
    taken = [queue.pop() for _ in range(10)]
    assert [each.id for each in taken] == [0, 1000, 1, 1001, 2, 1002, 3, 4, 5, 6]
    assert len(queue) == 993


def test_what_is_dropped_is_gone_and_the_others_keep_their_turns() -> None:
    queue = SampleQueue()
    queue.add([row(number, "abc"[number % 3]) for number in range(9)])
    queue.discard({1, 4, 7, 3, 99})
    assert [queue.pop().id for _ in range(len(queue))] == [0, 2, 6, 5, 8]


@pytest.mark.parametrize("seed", range(5))
def test_it_is_told_how_many_come_first(seed: int) -> None:
    draw = random.Random(seed)
    queue = SampleQueue()
    queue.add([row(number, draw.choice("aaabbc")) for number in range(40)])
    for _ in range(draw.randrange(20)):
        queue.pop()
    seen = view(queue)
    rows = [queue.pop() for _ in range(len(queue))]
    assert [seen.ahead(each.session_id, each.id) for each in rows] == list(range(len(rows)))
    assert seen.ahead("nobody", 1) is None


def test_of_very_many_few_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl_tinker.engine.scheduling.sample_queue.SHOWN", 10)
    queue = SampleQueue()
    queue.add([row(number, "a") for number in range(100)])
    assert [len(each.ids) for each in view(queue).queued.values()] == [10]
    assert view(queue).ahead("a", 45) == 50
