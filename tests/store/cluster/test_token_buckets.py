"""A bucket gives what its rate has put in, to whoever asks, and no more."""

from collections.abc import Callable

import pytest

from skyrl_tinker.store.cluster import token_buckets
from skyrl_tinker.store.store import Store


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    return lambda now: monkeypatch.setattr(token_buckets, "database_time", lambda conn: now)


async def take(store: Store, wanted: float, name: str = "b") -> tuple[int, float]:
    """From a bucket of 16 tokens that gets one a second."""
    return await store.write(lambda conn: token_buckets.take(conn, name, rate=1.0, most=16.0, wanted=wanted))


async def test_of_what_is_left_a_part_is_given(store: Store, at: Callable[[float], None]) -> None:
    at(100.0)
    assert [await take(store, 20.0) for _ in range(4)] == [(4, 12.0), (3, 9.0), (2, 7.0), (1, 6.0)]
    assert [await take(store, 20.0) for _ in range(7)] == [*((1, 5.0 - more) for more in range(6)), (0, 0.0)]
    assert await take(store, 1.0, "another") == (1, 15.0)


async def test_a_bucket_fills_at_its_rate_up_to_what_it_holds(
    store: Store, at: Callable[[float], None]
) -> None:
    at(100.0)
    assert await take(store, 20.0) == (4, 12.0)
    at(102.0)
    assert await take(store, 20.0) == (3, 11.0)
    at(103.5)
    assert await take(store, 20.0) == (3, 9.5)
    at(1000.0)
    assert await take(store, 20.0) == (4, 12.0)


async def test_time_in_which_nothing_was_given_is_not_lost(store: Store, at: Callable[[float], None]) -> None:
    at(100.0)
    while (await take(store, 20.0))[0]:
        pass
    for now, found in ((100.5, (0, 0.5)), (100.75, (0, 0.75)), (101.0, (1, 0.0)), (101.5, (0, 0.5))):
        at(now)
        assert await take(store, 20.0) == found


async def test_a_clock_that_goes_back_takes_nothing_away(store: Store, at: Callable[[float], None]) -> None:
    at(100.0)
    assert await take(store, 20.0) == (4, 12.0)
    at(50.0)
    assert await take(store, 20.0) == (3, 9.0)
    at(52.0)
    assert await take(store, 20.0) == (2, 9.0)
