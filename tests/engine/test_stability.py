"""What is recorded of a sample stands and falls with its result. The samplers are scripted."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from skyrl_tinker.config import Settings
from skyrl_tinker.domain.ids import FutureStatus, SessionId
from skyrl_tinker.domain.samples import SampledSequence, SampleRequest, SamplingParams
from skyrl_tinker.domain.values import Failure
from skyrl_tinker.engine.outbox import Outbox
from skyrl_tinker.engine.sampler.ephemeral_versions import EphemeralVersions
from skyrl_tinker.engine.sampler.sampler_driver import SamplerDriver
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.engine.sampler.tmpfs_spill import TmpfsSpill
from skyrl_tinker.engine.scheduling.slots import Concurrency
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.engine.upkeep.cleanup import Cleanup
from skyrl_tinker.errors import SamplerError
from skyrl_tinker.protocol.stored_requests import sample_body
from skyrl_tinker.store import sampling_sessions, stability_records
from skyrl_tinker.store.database import sqlite
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.futures import finish, queue, sample_submission
from skyrl_tinker.store.futures.record import Accepted
from skyrl_tinker.store.futures.sample_submission import NewSample
from skyrl_tinker.store.stability_records import SequenceRecord
from skyrl_tinker.store.store import Store
from tests.engine.support import journal
from tests.support.reads import reading
from tests.support.scripted_samplers import ScriptedSamplers
from tests.support.waiting import end, until

EXPERTS = np.arange(4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2)
SEQUENCES = (
    SampledSequence((5, 6, 7), (-0.5, -1.5, -0.25), "length", routed_experts=EXPERTS),
    SampledSequence((8,), (-2.0,), "stop", routed_experts=EXPERTS),
)


class Sampling:
    def __init__(self, store: Store, bell: Doorbell, *, router_replay: bool = False) -> None:
        self.store = store
        self.samplers = ScriptedSamplers()
        self.samplers.sequences = SEQUENCES
        samplers = cast(Samplers, self.samplers)
        metrics = Metrics()
        outbox = Outbox(store, bell, metrics)
        self.driver = SamplerDriver(
            store, samplers, outbox, Concurrency(8, 8), metrics, router_replay=router_replay
        )
        self.running = asyncio.create_task(self.driver.run())

    async def sample(self, session: SessionId, *, record: bool) -> Accepted:
        sampler = await self.store.write(
            lambda conn: sampling_sessions.create(
                conn, session, 0, base_model="tiny", model_path=None, version_id=None
            )
        )
        params = SamplingParams(max_tokens=3)
        body = sample_body(SampleRequest((1, 2), 2, params, record_stability_info=record))
        accepted = await self.store.write(
            lambda conn: sample_submission.submit_sample(
                conn, NewSample(sampler, 1, b"", body, 2, 1, 1), None
            )
        )
        with reading(self.store) as conn:
            self.driver.submit(queue.queued_after(conn, 0))
        return accepted

    async def done(self, accepted: Accepted) -> None:
        await until(
            lambda: journal.outcome(self.store, accepted),
            lambda found: found.status is not FutureStatus.PENDING,
        )


@pytest.fixture
async def drawn(store: Store, bell: Doorbell) -> AsyncIterator[Sampling]:
    made = Sampling(store, bell)
    yield made
    await end(made.running)


@pytest.fixture
async def statements(store: Store) -> list[str]:
    """All that is written from now on."""
    seen: list[str] = []
    await store.write(lambda conn: sqlite.raw(conn).set_trace_callback(seen.append))
    return seen


async def records_of(store: Store, accepted: Accepted) -> dict[stability_records.Key, SequenceRecord]:
    return await store.read(lambda conn: stability_records.find(conn, accepted.sequence_ids))


async def test_every_sequence_of_a_recorded_sample_has_its_record(store: Store, drawn: Sampling) -> None:
    session = await journal.new_session(store)
    accepted = await drawn.sample(session, record=True)
    await drawn.done(accepted)
    found = await records_of(store, accepted)
    assert set(found) == {(session, name) for name in accepted.sequence_ids}
    for name, sequence in zip(accepted.sequence_ids, SEQUENCES, strict=True):
        record = found[session, name]
        np.testing.assert_array_equal(record.tokens, np.array(sequence.tokens, np.int32), strict=True)
        np.testing.assert_array_equal(record.logprobs, np.array(sequence.logprobs, np.float32), strict=True)
        assert record.prompt_length == 2
        assert record.routing is None


async def test_router_replay_records_experts_of_recorded_samples_alone(store: Store, bell: Doorbell) -> None:
    replaying = Sampling(store, bell, router_replay=True)
    session, other = [await journal.new_session(store) for _ in range(2)]
    recorded, plain = (
        await replaying.sample(session, record=True),
        await replaying.sample(other, record=False),
    )
    for accepted in (recorded, plain):
        await replaying.done(accepted)
    await end(replaying.running)
    found = await records_of(store, recorded)
    assert len(found) == len(SEQUENCES)
    for record in found.values():
        assert record.routing is not None
        np.testing.assert_array_equal(record.routing.prompt, np.array([1, 2], np.int32), strict=True)
        np.testing.assert_array_equal(record.routing.experts, EXPERTS, strict=True)
    assert await records_of(store, plain) == {}


async def test_an_ordinary_sample_costs_no_statement_more(
    store: Store, drawn: Sampling, statements: list[str]
) -> None:
    accepted = await drawn.sample(await journal.new_session(store), record=False)
    await drawn.done(accepted)
    assert [statement for statement in statements if "stability_records" in statement] == []
    assert any("INSERT INTO results" in statement for statement in statements)
    assert await records_of(store, accepted) == {}


async def test_a_failed_sample_leaves_no_record(store: Store, drawn: Sampling) -> None:
    drawn.samplers.failure = SamplerError("it died")
    accepted = await drawn.sample(await journal.new_session(store), record=True)
    await drawn.done(accepted)
    assert await records_of(store, accepted) == {}


async def test_a_result_that_comes_too_late_leaves_no_record(store: Store, drawn: Sampling) -> None:
    drawn.samplers.go_on.clear()
    accepted = await drawn.sample(await journal.new_session(store), record=True)
    row = await journal.outcome(store, accepted)
    await store.write(lambda conn: finish.fail(conn, row.future_id, Failure("gone", "server")))
    drawn.samplers.go_on.set()
    await until(lambda: not (drawn.driver.in_flight() or drawn.driver.queued()))
    assert await records_of(store, accepted) == {}


@pytest.mark.parametrize(("ttl_s", "left"), [(3600.0, 2), (1e-9, 0)])
async def test_records_that_nobody_uses_are_purged(
    store: Store, drawn: Sampling, tmp_path: Path, ttl_s: float, left: int
) -> None:
    accepted = await drawn.sample(await journal.new_session(store), record=True)
    await drawn.done(accepted)
    nobody = cast(Any, None)
    (tmp_path / "memory").mkdir()
    overflow = TmpfsSpill(tmp_path / "memory", tmp_path / "disk")
    settings = Settings(home=tmp_path, retention={"results_s": ttl_s})
    versions = EphemeralVersions(store, [], nobody, overflow, settings)
    await Cleanup(store, nobody, nobody, lambda _: False, versions, settings).sweep()
    assert len(await records_of(store, accepted)) == left
