"""What the engine counts, read back as Prometheus reads it."""

import math
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from skyrl_tinker.config import Settings
from skyrl_tinker.domain.ids import FutureStatus, ModelKey, OwnerId, RequestId, RequestKind
from skyrl_tinker.domain.values import PassOutput
from skyrl_tinker.engine.bases.base_statuses import BaseStatuses
from skyrl_tinker.engine.colocation.placement import SEPARATE
from skyrl_tinker.engine.compose import _register_gauges, make_metrics
from skyrl_tinker.engine.status import EngineStatus
from skyrl_tinker.engine.telemetry.engine_metrics import MOST_OWNERS, OTHERS, Metrics
from skyrl_tinker.store import api_keys
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.store import Store
from tests.engine.support.rows import queued

MODEL = ModelKey(1)


def read(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    """Samples by their labels' values."""
    families = text_string_to_metric_families(metrics.text().decode())
    found = (each for family in families for each in family.samples)
    return {tuple(each.labels.values()): each.value for each in found if each.name == f"skyrl_tinker_{name}"}


def test_a_request_waits_until_its_work_first_begins() -> None:
    metrics = Metrics()
    row = queued(1, MODEL, 1)
    metrics.arrived([row])
    metrics.began([row], at=row.created_at + 3)
    metrics.began([row], at=row.created_at + 9)  # once more, as after an exhausted pass
    metrics.answered(row.id, "ok")
    metrics.began([row], at=row.created_at + 20)  # a replay
    assert read(metrics, "queue_wait_seconds_sum") == {("forward_backward",): 3}
    assert read(metrics, "queue_wait_seconds_count") == {("forward_backward",): 1}


def test_refused_requests_count_once_also_when_rows_come_again_or_an_engine_is_restarted() -> None:
    metrics = Metrics()
    old, new = (replace(queued(number, MODEL, number), status=FutureStatus.FAILED) for number in (1, 2))
    old, new = replace(old, created_at=time.time() - 60), replace(new, created_at=time.time())
    for rows in ([old, new], [new]):
        metrics.arrived(rows)
    assert read(metrics, "requests_total") == {("forward_backward", "user"): 1}


def test_units_are_timed_by_what_they_do() -> None:
    metrics = Metrics()
    forward = queued(1, MODEL, 1, RequestKind.FORWARD)
    metrics.unit("tiny", [forward, queued(2, MODEL, 2)], time.time(), 0.5)
    metrics.unit("tiny", [queued(3, MODEL, 3, RequestKind.OPTIM_STEP)], time.time(), 0.25)
    metrics.unit("small", [queued(4, MODEL, 4, RequestKind.OPTIM_STEP)], time.time(), 0.125)
    assert read(metrics, "unit_seconds_sum") == {
        ("tiny", "pass"): 0.5,
        ("tiny", "optim_step"): 0.25,
        ("small", "optim_step"): 0.125,
    }
    assert len(metrics.activity.since(0).units) == 3


def test_gaps_have_a_history_that_not_a_number_does_not_end() -> None:
    metrics = Metrics()
    for gap in (0.5, float("nan"), 0.125):
        metrics.compared("tiny", gap)
    metrics.compared("small", 0.25)
    assert read(metrics, "sampler_logprob_gap_nats_sum") == {("tiny",): 0.625, ("small",): 0.25}
    assert read(metrics, "sampler_logprob_gap_nats_count") == {("tiny",): 2, ("small",): 1}
    assert read(metrics, "sampler_logprob_gap") == {("tiny",): 0.125, ("small",): 0.25}
    largest = read(metrics, "sampler_logprob_gap_max")
    assert (math.isnan(largest["tiny",]), largest["small",]) == (True, 0.25)


async def worked_for(metrics: Metrics, owner: OwnerId | None) -> None:
    await metrics.owners.know([owner])
    row = queued(1, MODEL, 1, owner=owner)
    metrics.arrived([row])
    metrics.passed("tiny", [row], [PassOutput(RequestId("1"), (np.zeros(7, np.float32),), {})])
    metrics.answered(row.id, "ok")
    metrics.sampled("tiny", 4, owner)
    metrics.counted("completion", "ok", owner)


async def test_owners_are_counted_by_name_where_a_key_guards_the_metrics(store: Store) -> None:
    await store.write(lambda conn: api_keys.create(conn, "alice"))
    metrics = make_metrics(Settings(metrics_key=True), store)
    await worked_for(metrics, OwnerId(1))
    await worked_for(metrics, None)
    assert read(metrics, "owner_trained_tokens_total") == {("alice",): 7, ("local",): 7}
    assert read(metrics, "owner_sampled_tokens_total") == {("alice",): 4, ("local",): 4}
    assert read(metrics, "owner_requests_total") == {
        (kind, owner): 1 for owner in ("alice", "local") for kind in ("forward_backward", "completion")
    }


async def test_owners_are_nobody_s_business_where_the_metrics_are_open(store: Store) -> None:
    await store.write(lambda conn: api_keys.create(conn, "alice"))
    metrics = make_metrics(Settings(), store)
    await worked_for(metrics, OwnerId(1))
    assert b"alice" not in metrics.text()
    assert read(metrics, "owner_requests_total") == {}
    assert read(metrics, "sampled_tokens_total") == {("tiny",): 4}


async def test_only_so_many_owners_get_a_label() -> None:
    async def name(owner: OwnerId | None) -> str:
        return f"key{owner}"

    metrics = Metrics(name)
    for owner in range(MOST_OWNERS + 5):
        await worked_for(metrics, OwnerId(owner))
    counted = read(metrics, "owner_sampled_tokens_total")
    assert len(counted) == MOST_OWNERS + 1
    assert counted[OTHERS,] == 5 * 4


async def test_an_owner_without_a_name_yet_gets_it_later() -> None:
    metrics = Metrics(AsyncMock(side_effect=[None, "alice"]))
    for _ in range(3):
        await metrics.owners.know([OwnerId(1)])
        metrics.sampled("tiny", 4, OwnerId(1))
    assert read(metrics, "owner_sampled_tokens_total") == {(OTHERS,): 4, ("alice",): 8}


@pytest.mark.parametrize("early", [0.0, 5.0])
def test_clocks_that_differ_make_no_negative_waits(early: float) -> None:
    metrics = Metrics()
    row = replace(queued(1, MODEL, 1), created_at=10.0)
    metrics.arrived([row])
    metrics.began([row], at=10.0 - early)
    assert read(metrics, "queue_wait_seconds_sum") == {("forward_backward",): 0}


def test_pending_requests_are_counted_as_they_come_and_go() -> None:
    metrics = Metrics()
    passes = [queued(number, MODEL, number) for number in range(3)]
    step = queued(3, MODEL, 3, RequestKind.OPTIM_STEP)
    metrics.arrived([*passes, step])
    metrics.arrived(passes)  # again
    for _ in range(2):
        metrics.answered(passes[0].id, "ok")
    pending = read(metrics, "requests_pending")
    assert (pending["forward_backward",], pending["optim_step",], pending["sample",]) == (2, 1, 0)


async def test_replicas_are_expected_of_each_base_model_but_one_that_is_stopped_or_being_started(
    store: Store, bell: Doorbell
) -> None:
    fleets: dict[str, Any] = {name: SimpleNamespace(size=0, replicas=2) for name in ("always", "rare")}
    parts = {name: {f"sampler of {name}"} for name in fleets}
    statuses = BaseStatuses(EngineStatus(store, bell), fleets, [], parts, ["rare"])
    metrics, driver = Metrics(), cast(Any, SimpleNamespace(queued=lambda: 3, in_flight=lambda: 1))
    for name, fleet in fleets.items():
        runtime: Any = SimpleNamespace(
            settings=Settings(), facts=SimpleNamespace(name=name), placement=SEPARATE
        )
        _register_gauges(metrics, statuses, runtime, cast(Any, SimpleNamespace(fleet=fleet)), driver)

    def told() -> dict[str, tuple[float, float]]:
        """Replicas, and those expected, of each."""
        expected = read(metrics, "replicas_expected")
        return {name: (size, expected[name,]) for (name,), size in read(metrics, "replicas").items()}

    assert read(metrics, "samples_queued") == {("always",): 3, ("rare",): 3}
    assert told() == {"always": (0, 0), "rare": (0, 0)}
    await statuses.started("always")
    fleets["always"].size = 1
    assert told() == {"always": (1, 2), "rare": (0, 0)}
    await statuses.started("rare")
    assert told() == {"always": (1, 2), "rare": (0, 2)}, "the alert is of this one"
    await statuses.stopped("rare")
    assert told() == {"always": (1, 2), "rare": (0, 0)}
    await statuses.failed("rare", "rare does not start")
    await statuses.starting("rare", parts["rare"])
    assert told() == {"always": (1, 2), "rare": (0, 2)}, "it is tried again and again"
