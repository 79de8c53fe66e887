"""The status of the engine while replicas of one of several base models are lost."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_tinker.engine.bases.base_statuses import CLEAN_UP, BaseStatuses
from skyrl_tinker.engine.status import EngineStatus
from skyrl_tinker.protocol.queue_views import ASLEEP
from skyrl_tinker.store import server_state
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.store import Store
from tests.support.reads import reading

GONE = "no sampler is running: they are being restarted; models are unaffected"


def stored(store: Store) -> Any:
    with reading(store) as conn:
        value = server_state.get(conn, "engine")
    assert value is not None
    return value


@pytest.mark.parametrize(
    ("serving", "state", "detail"),
    [
        ({"a": (2, 2)}, "ready", ""),
        ({"a": (1, 2)}, "ready", "1 of 2 replicas serve"),
        ({"a": (0, 2)}, "restarting", GONE),
        ({"a": (1, 1), "b": (1, 1)}, "ready", ""),
        ({"a": (1, 1), "b": (0, 1)}, "ready", "0 of 1 replicas of b serve"),
        ({"a": (0, 1), "b": (2, 2)}, "ready", "0 of 1 replicas of a serve"),
        ({"a": (1, 2), "b": (0, 1)}, "ready", "1 of 2 replicas of a serve; 0 of 1 replicas of b serve"),
        ({"a": (0, 1), "b": (0, 1)}, "restarting", GONE),
    ],
)
async def test_the_engine_takes_work_while_any_base_model_has_a_replica(
    store: Store, bell: Doorbell, serving: dict[str, tuple[int, int]], state: str, detail: str
) -> None:
    fleets: dict[str, Any] = {
        name: SimpleNamespace(size=size, replicas=replicas) for name, (size, replicas) in serving.items()
    }
    await BaseStatuses(EngineStatus(store, bell), fleets).report()
    told = stored(store)
    assert (told["state"], told["detail"]) == (state, detail)


async def test_a_base_model_that_is_only_trained_needs_no_replica(store: Store, bell: Doorbell) -> None:
    statuses = BaseStatuses(EngineStatus(store, bell), {"a": None}, ["a"], {"a": {"trainer"}})
    told = partial(stored, store)
    await statuses.started(CLEAN_UP)
    await statuses.starting("a", ["trainer"])
    assert (told()["state"], told()["detail"]) == ("starting", "waiting for trainer")
    await statuses.started("a")
    await statuses.rebuild("a", "", done=True)
    assert (told()["state"], told()["detail"]) == ("ready", "")
    assert told()["base_models"] == {"a": ["ready", ""]}


async def test_the_engine_is_ready_once_all_trainers_are_and_takes_work_while_one_is(
    store: Store, bell: Doorbell
) -> None:
    serving = SimpleNamespace(size=1, replicas=1)
    fleets: dict[str, Any] = {"a": serving, "b": serving}
    statuses = BaseStatuses(EngineStatus(store, bell), fleets, ["a", "b"])

    def told() -> tuple[str, str]:
        value = stored(store)
        return value["state"], value["detail"]

    await statuses.rebuild("a", "", done=True)
    assert told() == ("starting", "b: models are brought back")
    await statuses.failed("b", "the ranks of b die")
    assert told() == ("ready", "the ranks of b die")
    await statuses.starting("b", ["trainer of b"])
    assert told() == ("ready", "the ranks of b die")
    await statuses.started("b")
    assert told() == ("ready", "b: models are brought back")
    await statuses.rebuild("b", ASLEEP, done=True)
    assert statuses.ready
    assert told() == ("ready", ASLEEP)
    await statuses.rebuild("b", "the trainer is restarted")
    assert told() == ("ready", "b: the trainer is restarted")
    await statuses.rebuild("a", "replaying 1 of 2 units")
    assert told() == ("restarting", "a: replaying 1 of 2 units; b: the trainer is restarted")
    await statuses.rebuild("a", "", done=True)
    await statuses.rebuild("b", "", done=True)
    assert told() == ("ready", "")


async def test_the_engine_is_ready_once_each_base_model_serves_or_does_not_start(
    store: Store, bell: Doorbell
) -> None:
    serving = SimpleNamespace(size=1, replicas=1)
    fleets: dict[str, Any] = {"a": serving, "b": serving, "c": serving}
    parts = {name: {f"trainer of {name}", f"sampler of {name}"} for name in fleets}
    statuses = BaseStatuses(EngineStatus(store, bell), fleets, ["a", "b"], parts)
    told = partial(stored, store)
    await statuses.started("a")
    await statuses.starting("c", ())
    assert told()["detail"] == (
        "waiting for clean-up, sampler of b, trainer of b; a: models are brought back"
    )
    await statuses.started(CLEAN_UP)
    await statuses.started("c")
    await statuses.rebuild("a", "", done=True)
    assert (told()["state"], statuses.ready) == ("starting", False)
    assert told()["base_models"]["b"] == ["starting", "waiting for sampler of b, trainer of b"]
    assert statuses.others_may_serve("b")
    await statuses.failed("b", "b does not start")
    assert (told()["state"], told()["detail"], statuses.ready) == ("ready", "b does not start", True)
    assert told()["base_models"] == {
        "a": ["ready", ""],
        "b": ["failed", "b does not start"],
        "c": ["ready", ""],
    }
    await statuses.failed("a", "a does not start")
    assert (told()["state"], told()["detail"]) == ("ready", "a does not start; b does not start"), "c serves"
    assert statuses.others_may_serve("a")
    assert statuses.others_may_serve("c") is False
    await statuses.started("b")
    assert told()["base_models"]["b"] == ["starting", "models are brought back"]
    await statuses.rebuild("b", "", done=True)
    assert (told()["state"], told()["base_models"]["b"]) == ("ready", ["ready", ""])


async def test_one_on_demand_is_stopped_and_nobody_waits_for_it(store: Store, bell: Doorbell) -> None:
    first, other = SimpleNamespace(size=1, replicas=1), SimpleNamespace(size=0, replicas=1)
    fleets: dict[str, Any] = {"a": first, "b": other}
    parts = {name: {f"trainer of {name}"} for name in fleets}
    statuses = BaseStatuses(EngineStatus(store, bell), fleets, ["a", "b"], parts, ["b"])

    def told() -> tuple[tuple[str, str], list[str]]:
        value = stored(store)
        return (value["state"], value["detail"]), value["base_models"]["b"]

    stopped = ["stopped", "it starts when it is asked for"]
    await statuses.started(CLEAN_UP)
    assert told() == (("starting", "waiting for trainer of a"), stopped)
    assert not statuses.others_may_serve("a"), "the engine has not been ready"
    await statuses.started("a")
    await statuses.rebuild("a", "", done=True)
    assert told() == (("ready", ""), stopped)
    for _ in range(2):
        assert statuses.others_may_serve("a"), "b starts on demand"
        await statuses.starting("b", ["trainer of b"])
        assert statuses.others_may_serve("a")
        assert told() == (("ready", ""), ["starting", "waiting for trainer of b"])
        other.size = 1
        await statuses.started("b")
        await statuses.rebuild("b", "replaying 1 of 2 units")
        assert told() == (("ready", ""), ["starting", "replaying 1 of 2 units"])
        await statuses.rebuild("b", "", done=True)
        assert told() == (("ready", ""), ["ready", ""])
        await statuses.rebuild("b", "the trainer is restarted")
        assert told() == (
            ("ready", "b: the trainer is restarted"),
            ["restarting", "the trainer is restarted"],
        )
        await statuses.rebuild("b", "", done=True)
        other.size = 0
        await statuses.stopped("b")
        assert told() == (("ready", ""), stopped)
    await statuses.failed("b", "b does not start")
    assert told() == (("ready", "b does not start"), ["failed", "b does not start"])
    assert not statuses.others_may_serve("a")
    await statuses.started("b")
    assert told()[0] == ("ready", "b: models are brought back; 0 of 1 replicas of b serve")


async def test_nobody_waits_for_samplers_of_one_on_demand_where_no_other_has_any(
    store: Store, bell: Doorbell
) -> None:
    fleets: dict[str, Any] = {"a": None, "b": SimpleNamespace(size=0, replicas=1)}
    parts = {"a": {"trainer of a"}, "b": {"sampler of b"}}
    statuses = BaseStatuses(EngineStatus(store, bell), fleets, ["a"], parts, ["b"])
    await statuses.started(CLEAN_UP)
    await statuses.started("a")
    await statuses.rebuild("a", "", done=True)
    assert stored(store)["state"] == "ready"
    await statuses.starting("b", ["sampler of b"])
    assert stored(store)["state"] == "ready"
