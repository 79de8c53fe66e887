"""Who has little in vLLM goes before who has much, and nobody falls behind for good."""

import random
from collections import Counter
from contextlib import AbstractContextManager, ExitStack

import pytest

from skyrl_tinker.domain.ids import OwnerId, SessionId
from skyrl_tinker.engine.scheduling.priorities import KEPT, Priorities, share_of

FLOOD, OTHER = SessionId("flood"), SessionId("other")


def test_a_small_one_is_ahead_of_all_but_the_first_of_a_flood() -> None:
    priorities = Priorities()
    with ExitStack() as under_way:
        flood = [under_way.enter_context(priorities.take(FLOOD, 30_000)) for _ in range(4)]
        assert flood == [0, 30_000, 60_000, 90_000]
        for number in range(3):
            with priorities.take(OTHER, 5) as small:
                assert small == 5 * number


def test_many_sequences_of_one_request_are_behind_small_ones_that_come_later() -> None:
    priorities = Priorities()
    with priorities.take(FLOOD, 1000, 10) as flood:
        for used in range(0, 900, 9):
            with priorities.take(OTHER, 9) as small:
                assert small == used < flood
        with priorities.take(OTHER, 9) as as_much:
            assert as_much == flood, "it is not delayed forever"


def test_a_flood_is_ahead_of_whatever_comes_once_its_first_part_has_ended() -> None:
    """Whose tag is the lowest stays the first: those that come later, of anyone, start there or behind."""
    priorities = Priorities()
    with ExitStack() as under_way:
        first = priorities.take(FLOOD, 30_000)
        first.__enter__()
        under_way.enter_context(priorities.take(FLOOD, 30_000))
        first.__exit__(None, None, None)
        newcomers = [under_way.enter_context(priorities.take(SessionId(f"{n}"), 5)) for n in range(100)]
        assert newcomers == [30_000] * 100


def test_who_had_what_is_forgotten_once_nothing_is_under_way() -> None:
    priorities = Priorities()
    for _ in range(2):
        with priorities.take(FLOOD, 30_000) as tag:
            assert tag == 0


def test_what_is_remembered_of_shares_is_bounded() -> None:
    priorities = Priorities()
    with priorities.take(FLOOD, 1), priorities.take(FLOOD, 1):
        with priorities.take(FLOOD, 1):
            pass
        for number in range(10 * KEPT):
            with priorities.take(SessionId(f"{number}"), 0):
                pass
    assert len(priorities._ends) <= KEPT + 5


@pytest.mark.parametrize("seed", range(10))
def test_nothing_begins_before_the_earliest_in_progress_nor_before_its_shares_last_end(seed: int) -> None:
    draw, priorities = random.Random(seed), Priorities()
    running: list[tuple[int, AbstractContextManager[int]]] = []
    ends = Counter[SessionId]()
    for _ in range(2000):
        if running and draw.random() < 0.5:
            running.pop(draw.randrange(len(running)))[1].__exit__(None, None, None)
            continue
        now = min((tag for tag, _ in running), default=0)
        if not running:
            ends.clear()
        share, tokens = SessionId(f"{draw.randrange(6)}"), draw.randrange(100)
        begun = priorities.take(share, tokens)
        tag = begun.__enter__()
        assert tag == max(now, ends[share])
        ends[share] = tag + tokens
        running.append((tag, begun))


class _Tokens(int):
    """Number whose sums count in `compared` how often they are compared."""

    compared = 0

    def __radd__(self, other: int) -> "_Tokens":
        return _Tokens(int(other) + int(self))

    def __lt__(self, other: int) -> bool:
        _Tokens.compared += 1
        return int(self) < int(other)

    def __gt__(self, other: int) -> bool:
        _Tokens.compared += 1
        return int(self) > int(other)


def test_whoever_begins_is_not_compared_with_all_in_progress() -> None:
    priorities = Priorities()
    with ExitStack() as under_way:
        for _ in range(2000):
            under_way.enter_context(priorities.take(FLOOD, _Tokens(5)))
        _Tokens.compared = 0
        with priorities.take(FLOOD, _Tokens(5)):
            assert _Tokens.compared < 100


def test_requests_that_ended_before_the_earliest_are_forgotten() -> None:
    priorities = Priorities()
    with priorities.take(FLOOD, 1):
        for _ in range(10 * KEPT):
            with priorities.take(OTHER, 1):
                pass
        assert len(priorities._tags) <= KEPT + 5


def test_sessions_of_one_owner_are_one_share() -> None:
    assert share_of(OwnerId(3), FLOOD) == share_of(OwnerId(3), OTHER)
    assert share_of(None, FLOOD) != share_of(None, OTHER)
