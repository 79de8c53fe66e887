"""Calls of the SDK before anything else, and calls of monitors."""

from dataclasses import asdict, replace

import pytest
from tinker.types import ClientConfigResponse

from skyrl_tinker.config import Settings
from skyrl_tinker.domain.sampler_abilities import SamplerAbilities
from skyrl_tinker.protocol.schemas.session import SdkFlags
from skyrl_tinker.protocol.validation.limits import MAX_DATUMS
from tests.api.support.base_facts import CONTEXT
from tests.api.support.world import BASE, FACTS, World, running


@pytest.mark.parametrize("body", [b'{"sdk_version": "0.38.0"}', b"{}", b""])
async def test_client_config_answers_every_client_with_safe_flags(world: World, body: bytes) -> None:
    answer = await world.http.post("client/config", content=body)
    assert answer.status_code == 200
    assert answer.json()["parallel_fwdbwd_chunks"] is True
    assert answer.json()["proto_compress_fwdbwd"] is False
    assert not {"proto_write_fwdbwd", "grpc_target", "enable_grpc_retrieve_future"} & set(answer.json())


async def test_clones_join_and_waiting_together_is_a_setting(settings: Settings) -> None:
    for together in (False, True):
        changed = settings.model_copy(update={"sdk": SdkFlags(sample_use_retrieve_futures=together)})
        async with running(changed) as world:
            answer = await world.ok("client/config", {"sdk_version": "0.38.0"})
            assert answer["sample_use_retrieve_futures"] is together
            assert answer["sample_join_sampling_session"] is True


LIMITS = {"proto_compress_fwdbwd": True, "fwdbwd_max_chunk_bytes_count": 1_000_000}
FIXED = (
    "fwdbwd_max_chunk_len",
    "fwdbwd_dispatch_bytes_semaphore_size",
    "sample_max_concurrent_requests",
    "sample_dispatch_bytes_semaphore_size",
    "inflight_response_bytes_semaphore_size",
)


async def test_limits_of_clients_are_settings(settings: Settings) -> None:
    async with running(settings.model_copy(update={"sdk": SdkFlags(**LIMITS)})) as world:
        answer = await world.ok("client/config", {})
    assert {name: answer[name] for name in LIMITS} == LIMITS


async def test_limits_of_clients_are_the_sdk_s_own_by_default(world: World) -> None:
    answer = await world.ok("client/config", {})
    theirs = ClientConfigResponse().model_dump()
    names = (*LIMITS, *FIXED)
    assert {name: answer[name] for name in names} == {name: theirs[name] for name in names}
    assert answer["fwdbwd_max_chunk_len"] <= MAX_DATUMS


async def test_dynamic_config_offers_cancelling(world: World) -> None:
    answer = await world.ok("client/dynamic_config", {"sdk_version": "0.38.0"})
    assert answer["sample_cancel_enabled"] is True
    assert answer["refresh_interval_sec"] >= 10


@pytest.mark.parametrize("body", [b'{"events": []}', b"not json at all", b"", b"\xff\x00"])
async def test_telemetry_is_always_accepted(world: World, body: bytes) -> None:
    answer = await world.http.post("telemetry", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()) == (200, {"status": "accepted"})


async def test_capabilities_tell_what_the_samplers_lack(settings: Settings) -> None:
    lacking = SamplerAbilities("Plain", 0.01, seed=False)
    async with running(settings, replace(FACTS, sampler=lacking)) as world:
        (model,) = (await world.http.get("get_server_capabilities")).json()["supported_models"]
        assert model["sampler"] == asdict(lacking)


async def test_capabilities_name_the_base_model_and_its_context(world: World) -> None:
    models = (await world.http.get("get_server_capabilities")).json()["supported_models"]
    assert [(model["model_name"], model["max_context_length"]) for model in models] == [(BASE, CONTEXT)]


@pytest.mark.parametrize("path", ["/healthz", "/api/v1/healthz"])
async def test_healthz_says_that_the_process_lives(world: World, path: str) -> None:
    answer = await world.http.get(f"http://api{path}")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


async def test_readyz_is_200_only_while_the_engine_is_ready(world: World) -> None:
    assert (await world.http.get("http://api/readyz")).status_code == 200
    await world.set_engine("starting", "loading the sampler", tiny=("starting", "waiting for sampler"))
    answer = await world.http.get("http://api/readyz")
    assert answer.status_code == 503
    base_model = {"base_model": "tiny", "state": "starting", "detail": "waiting for sampler"}
    assert answer.json() == {
        "state": "starting",
        "detail": "loading the sampler",
        "base_models": [base_model],
    }


async def test_every_route_has_a_summary(world: World) -> None:
    paths = (await world.http.get("openapi.json")).json()["paths"]
    missing = [path for path, verbs in paths.items() for verb in verbs.values() if not verb.get("summary")]
    assert len(paths) >= 22
    assert missing == []


@pytest.mark.parametrize("path", ["sessions/x", "samplers/x", "training_runs/x", "no/such/route"])
async def test_a_404_says_not_found(world: World, path: str) -> None:
    answer = await world.http.get(path)
    assert answer.status_code == 404
    assert answer.json()["detail"].startswith("not found: no ")
