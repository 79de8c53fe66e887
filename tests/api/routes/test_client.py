"""Calls of the SDK before anything else, and calls of monitors."""

import pytest

from skyrl_tinker.config import Settings
from tests.api.support.world import BASE, CONTEXT, World, running


@pytest.mark.parametrize("body", [b'{"sdk_version": "0.38.0"}', b"{}", b""])
async def test_client_config_answers_every_client_with_safe_flags(world: World, body: bytes) -> None:
    answer = await world.http.post("client/config", content=body)
    assert answer.status_code == 200
    assert answer.json()["parallel_fwdbwd_chunks"] is True
    assert answer.json()["proto_compress_fwdbwd"] is False
    assert not {"proto_write_fwdbwd", "grpc_target", "enable_grpc_retrieve_future"} & set(answer.json())


async def test_clones_join_and_waiting_together_is_a_setting(settings: Settings) -> None:
    for together in (False, True):
        changed = settings.model_copy(update={"sample_use_retrieve_futures": together})
        async with running(changed) as world:
            answer = await world.ok("client/config", {"sdk_version": "0.38.0"})
            assert answer["sample_use_retrieve_futures"] is together
            assert answer["sample_join_sampling_session"] is True


async def test_dynamic_config_offers_cancelling(world: World) -> None:
    answer = await world.ok("client/dynamic_config", {"sdk_version": "0.38.0"})
    assert answer["sample_cancel_enabled"] is True
    assert answer["refresh_interval_sec"] >= 10


@pytest.mark.parametrize("body", [b'{"events": []}', b"not json at all", b"", b"\xff\x00"])
async def test_telemetry_is_always_accepted(world: World, body: bytes) -> None:
    answer = await world.http.post("telemetry", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()) == (200, {"status": "accepted"})


async def test_capabilities_name_the_base_model_and_its_context(world: World) -> None:
    models = (await world.http.get("get_server_capabilities")).json()["supported_models"]
    assert [model["model_name"] for model in models] == [BASE, "/models/tiny"]
    assert models[0]["max_context_length"] == CONTEXT


@pytest.mark.parametrize("path", ["/healthz", "/api/v1/healthz"])
async def test_healthz_says_that_the_process_lives(world: World, path: str) -> None:
    answer = await world.http.get(f"http://api{path}")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


async def test_readyz_is_200_only_while_the_engine_is_ready(world: World) -> None:
    assert (await world.http.get("http://api/readyz")).status_code == 200
    await world.set_engine("starting", "loading the sampler")
    answer = await world.http.get("http://api/readyz")
    assert answer.status_code == 503
    assert answer.json() == {"state": "starting", "detail": "loading the sampler"}


async def test_every_route_has_a_summary(world: World) -> None:
    paths = (await world.http.get("openapi.json")).json()["paths"]
    missing = [path for path, verbs in paths.items() for verb in verbs.values() if not verb.get("summary")]
    assert len(paths) >= 22
    assert missing == []
