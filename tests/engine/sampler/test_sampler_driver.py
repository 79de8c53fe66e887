"""Samples are drawn from what their client was made for, or not at all."""

import asyncio
import threading
from dataclasses import replace
from typing import Any, cast

import pytest

from skyrl_tinker.domain.ids import ALL_OWNERS, FutureStatus, SessionId
from skyrl_tinker.domain.sampler_abilities import SamplerAbilities
from skyrl_tinker.domain.samples import SampledSequence, SampleOutput, SampleRequest, SamplingParams
from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.engine import intake
from skyrl_tinker.engine.bases.sample_dispatch import SampleDispatch
from skyrl_tinker.engine.outbox import Outbox
from skyrl_tinker.engine.sampler.adapter_cache import AdapterLimits
from skyrl_tinker.engine.sampler.sampler_driver import SamplerDriver
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.engine.scheduling.slots import Concurrency
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.errors import NotSupportedError
from skyrl_tinker.protocol.protobuf import sample_results
from skyrl_tinker.protocol.stored_requests import sample_body
from skyrl_tinker.store import sampling_sessions, usage_records
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.futures import queue, sample_submission
from skyrl_tinker.store.futures.outcomes import Outcome
from skyrl_tinker.store.futures.record import Accepted
from skyrl_tinker.store.futures.sample_submission import NewSample
from skyrl_tinker.store.store import Store
from tests.engine.support import journal
from tests.support.sampler_clients import opened_fleet, vllm_client
from tests.support.scripted_samplers import ScriptedSamplers
from tests.support.waiting import end, until

FACTS = BaseModelFacts("/nowhere", ("new",), "Qwen3ForCausalLM", 512, 128, 2, 1, 64, 64, True, (0,))


async def submit_sample(
    store: Store,
    session: SessionId,
    base_model: str,
    seq_id: int,
    prompt: tuple[int, ...] = (1, 2),
    topk: int = 0,
    num_samples: int = 1,
    temperature: float = 1.0,
) -> Accepted:
    sampler = await store.write(
        lambda conn: sampling_sessions.create(
            conn, session, 0, base_model=base_model, model_path=None, version_id=None
        )
    )
    params = SamplingParams(max_tokens=1, temperature=temperature)
    body = sample_body(SampleRequest(prompt, num_samples, params, topk_sample_logprobs=topk))
    return await store.write(
        lambda conn: sample_submission.submit_sample(
            conn, NewSample(sampler, seq_id, b"", body, 1, 1, 1), None
        )
    )


def make_driver(store: Store, bell: Doorbell, cores: tuple[int, ...] = ()) -> tuple[SamplerDriver, Metrics]:
    nothing = cast(Any, None)
    urls = tuple(f"http://{index}" for index in range(len(cores)))
    fleet = opened_fleet(vllm_client("", urls), cores=cores)
    metrics = Metrics()
    samplers = Samplers(fleet, nothing, FACTS, AdapterLimits(8, 8), Metrics())
    return SamplerDriver(store, samplers, Outbox(store, bell, metrics), Concurrency(8, 8), metrics), metrics


async def test_what_a_server_of_another_engine_accepted_is_refused_by_name() -> None:
    nothing = cast(Any, None)
    facts = replace(FACTS, sampler=SamplerAbilities("Plain", seed=False))
    samplers = Samplers(opened_fleet(vllm_client("", ())), nothing, facts, AdapterLimits(8, 8), Metrics())
    with pytest.raises(NotSupportedError, match=r"^seed is not supported by .* engine, Plain"):
        await samplers.sample(None, SampleRequest((1, 2), 1, SamplingParams(max_tokens=1, seed=3)))


async def test_requests_that_the_store_does_not_know_take_their_turns_among_samples(
    store: Store, bell: Doorbell
) -> None:
    driver, _ = make_driver(store, bell)
    running = asyncio.create_task(driver.run())
    async with driver.turn(None, tokens=10, sequences=8):
        assert driver.in_flight() == 1
        waiting = asyncio.create_task(taken(driver))
        leaving = asyncio.create_task(taken(driver))
        await asyncio.sleep(0)
        assert driver.queued() == 2
        await end(leaving)
        assert driver.queued() == 1
    await waiting
    assert driver.in_flight() == driver.queued() == 0
    assert len(driver._ends._times) == 2, "of those that had a turn"
    await end(running)


@pytest.mark.parametrize(("cores", "at_once"), [((1,), 1), ((2,), 2), ((1, 1, 0), 2), ((0,), 1)])
async def test_each_engine_core_that_decodes_has_places_of_its_own(
    store: Store, bell: Doorbell, cores: tuple[int, ...], at_once: int
) -> None:
    driver, _ = make_driver(store, bell, cores)
    running = asyncio.create_task(driver.run())
    leave = asyncio.Event()

    async def stay() -> None:
        async with driver.turn(None, tokens=10, sequences=8):
            await leave.wait()

    turns = [asyncio.create_task(stay()) for _ in range(4)]
    await until(driver.in_flight)
    for _ in range(100):  # in which more could come
        await asyncio.sleep(0)
    assert (driver.in_flight(), driver.queued()) == (at_once, len(turns) - at_once)
    leave.set()
    await asyncio.gather(*turns)
    await end(running)


async def taken(driver: SamplerDriver) -> None:
    async with driver.turn(None, tokens=10, sequences=8):
        pass


async def test_where_many_samples_wait_their_bodies_stay_in_the_store(
    store: Store, bell: Doorbell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "MOST_BODIES", 2)
    metrics = Metrics()
    outbox = Outbox(store, bell, metrics)
    samplers = cast(Samplers, ScriptedSamplers())
    driver = SamplerDriver(store, samplers, outbox, Concurrency(8, 8), metrics)
    session = await journal.new_session(store)
    samples = SampleDispatch([driver], outbox, metrics)
    reading = intake.Intake(store, bell, cast(Any, None), samples, metrics)
    accepted = []
    for seq_id, length in enumerate((2, 2, 2, 2, 20_000)):
        accepted.append(await submit_sample(store, session, "tiny", seq_id, tuple(range(length))))
        await reading._read_page()
    assert [row.body is None for row in metrics.pending()] == [False, False, False, True, True]
    running = asyncio.create_task(driver.run())
    for each in accepted:
        await until(lambda each=each: journal.outcome(store, each), _is_done)  # type: ignore[misc]
    await end(running)


def _is_done(outcome: Outcome) -> bool:
    return outcome.status is FutureStatus.DONE


@pytest.mark.parametrize(("topk", "on_loop"), [(20, True), (200, False)])
async def test_answers_that_list_many_logprobs_are_encoded_off_the_event_loop(
    store: Store, bell: Doorbell, monkeypatch: pytest.MonkeyPatch, topk: int, on_loop: bool
) -> None:
    metrics, samplers = Metrics(), ScriptedSamplers()
    row = tuple((token, -float(token)) for token in range(topk))
    samplers.sequences = (SampledSequence((1,) * 50, (-0.5,) * 50, "length", (row,) * 50),)
    outbox = Outbox(store, bell, metrics)
    driver = SamplerDriver(store, cast(Samplers, samplers), outbox, Concurrency(8, 8), metrics)
    threads: list[int] = []
    encode = sample_results.encode_sample_response

    def noted(output: SampleOutput) -> bytes:
        threads.append(threading.get_ident())
        return encode(output)

    monkeypatch.setattr(sample_results, "encode_sample_response", noted)
    session = await journal.new_session(store)
    accepted = await submit_sample(store, session, "tiny", 0, topk=topk)
    driver.submit(await store.read(lambda conn: queue.queued_after(conn, 0)))
    running = asyncio.create_task(driver.run())
    outcome = await until(lambda: journal.outcome(store, accepted), _is_done)
    await end(running)
    assert [thread == threading.get_ident() for thread in threads] == [on_loop]
    answer = sample_results.sample_response_json(outcome.body or b"")
    assert len(answer["sequences"][0]["topk_logprobs"][49]) == topk


@pytest.mark.parametrize(("temperature", "billed"), [(1.0, 3), (0.0, 1)])
async def test_copies_of_a_greedy_sample_are_not_billed(
    store: Store, bell: Doorbell, temperature: float, billed: int
) -> None:
    metrics, samplers = Metrics(), cast(Samplers, ScriptedSamplers())
    driver = SamplerDriver(store, samplers, Outbox(store, bell, metrics), Concurrency(8, 8), metrics)
    session = await journal.new_session(store)
    accepted = await submit_sample(store, session, "tiny", 0, num_samples=3, temperature=temperature)
    driver.submit(await store.read(lambda conn: queue.queued_after(conn, 0)))
    running = asyncio.create_task(driver.run())
    outcome = await until(lambda: journal.outcome(store, accepted), _is_done)
    await end(running)
    assert len(sample_results.sample_response_json(outcome.body or b"")["sequences"]) == 3
    (hour,) = await store.read(lambda conn: usage_records.hourly_between(conn, ALL_OWNERS, 0, 1 << 30))
    assert hour.usage.output_tokens == billed
