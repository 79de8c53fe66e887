"""The queues are listed once for all API processes that ask within a second: with thousands it takes time."""

import itertools
from typing import Any, cast

import pytest

from skyrl_tinker.api.waiting.engine_queues import EVERY_S
from skyrl_tinker.engine.outbox import Outbox
from skyrl_tinker.engine.sampler.sampler_driver import SamplerDriver
from skyrl_tinker.engine.scheduling.listing import LISTED_S, Listing
from skyrl_tinker.engine.scheduling.slots import Concurrency
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.protocol.queue_views import Incident
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.store import Store
from tests.engine.support.world import World
from tests.support.scripted_samplers import ScriptedSamplers


class Watched:
    """Calls of a method, by a clock that stands still."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, listing: Listing[Any], part: object, name: str
    ) -> None:
        self.calls, self.now = 0, 100.0
        method = getattr(part, name)

        def counted(*args: Any) -> Any:
            self.calls += 1
            return method(*args)

        monkeypatch.setattr(part, name, counted)
        monkeypatch.setattr(listing, "_clock", lambda: self.now)


def test_a_list_serves_all_who_ask_until_the_first_asks_again() -> None:
    now, made = 0.0, itertools.count()
    listing = Listing(lambda: next(made), lambda: now)
    assert (listing.get(), listing.get()) == (0, 0)
    now = LISTED_S
    assert listing.get() == 0
    now = EVERY_S
    assert (listing.get(), listing.get()) == (1, 1)


async def test_training_is_listed_once_for_all_who_ask(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = world.driver
    for part, name in ((driver._planner, "in_turn"), (driver._lanes, "statuses")):
        with monkeypatch.context() as patch:
            driver._listing._made = None
            seen = Watched(patch, driver._listing, part, name)
            for _ in range(3):
                driver.view()
            assert seen.calls == 1
            driver._incidents.append(Incident(1.0, name))
            assert driver.view().incidents[-1].text == name, "this is not listed"
            seen.now += EVERY_S
            driver.view()
            assert seen.calls == 2
            patch.setattr(driver.requests, "paused", "it is restarted")
            driver.view()
            assert seen.calls == 3, "what was put back would count as running"


async def test_samples_are_listed_once_for_all_who_ask(
    store: Store, bell: Doorbell, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = Metrics()
    samplers, outbox = cast(Any, ScriptedSamplers()), Outbox(store, bell, metrics)
    driver = SamplerDriver(store, samplers, outbox, Concurrency(8, 8), metrics)
    seen = Watched(monkeypatch, driver._listing, driver._queued, "view")
    for _ in range(3):
        driver.view()
    assert seen.calls == 1
    with driver.arriving():
        assert driver.view().waiting == 1, "it is counted, not listed"
    seen.now += EVERY_S
    driver.view()
    assert seen.calls == 2
