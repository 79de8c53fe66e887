"""Checkpoints: lists, publishing, expiry."""

import time
from datetime import datetime

import pytest

from skyrl_tinker.config import Settings
from skyrl_tinker.domain.ids import CheckpointKind
from tests.api.support.users import get, new_user, speak_as
from tests.api.support.whole import whole
from tests.api.support.world import BASE, Json, World

WEIGHTS, SAMPLER, EXTERNAL = CheckpointKind
YEAR = 365 * 86400


def names(page: dict[str, list[dict[str, str]]]) -> list[str]:
    return [checkpoint["checkpoint_id"] for checkpoint in page["checkpoints"]]


async def test_a_user_s_checkpoints_are_listed_newest_first_and_in_pages(world: World) -> None:
    runs = [await world.model(), await world.model()]
    for number in range(5):
        await world.checkpoint(runs[number % 2], WEIGHTS, f"{number}")
    await world.http.delete(f"training_runs/{runs[1]}/checkpoints/weights/3")
    assert names(await get(world, "checkpoints")) == [f"weights/{number}" for number in (4, 2, 1, 0)]
    page = await get(world, "checkpoints", limit=2, offset=1)
    assert names(page) == ["weights/2", "weights/1"]
    assert page["cursor"] == {"offset": 1, "limit": 2, "total_count": 4}


@pytest.mark.parametrize(
    "route", ["checkpoints", "sessions", "console/runs", "console/requests", "console/requests/1/items"]
)
async def test_every_page_has_a_bound(world: World, route: str) -> None:
    """Each of its items may have metadata."""
    answer = await world.http.get(route, params={"limit": 1001})
    assert (answer.status_code, "query.limit" in answer.json()["detail"]) == (400, True)


@pytest.mark.parametrize("route", ["training_runs", "models"])
async def test_a_run_s_checkpoints_are_listed_in_the_order_of_their_saves(world: World, route: str) -> None:
    run = await world.model()
    await world.checkpoint(await world.model(), WEIGHTS, "other")
    await world.checkpoint(run, WEIGHTS, "a", user_metadata={"step": 3}, expires_at=4e9)
    await world.checkpoint(run, SAMPLER, "b")
    page = await get(world, f"{route}/{run}/checkpoints")
    assert names(page) == ["weights/a", "sampler_weights/b"]
    assert page["cursor"] is None
    first, second = page["checkpoints"]
    assert first["tinker_path"] == f"tinker://{run}/weights/a"
    assert (first["size_bytes"], first["public"], first["user_metadata"]) == (10, False, {"step": "3"})
    assert datetime.fromisoformat(first["expires_at"]).timestamp() == 4e9
    assert (second["checkpoint_type"], second["expires_at"]) == ("sampler", None)
    assert [each["base_model"] for each in page["checkpoints"]] == [BASE] * 2


async def test_a_run_without_checkpoints_is_not_an_unknown_run(world: World) -> None:
    assert names(await get(world, f"training_runs/{await world.model()}/checkpoints")) == []
    assert (await world.http.get("training_runs/no/checkpoints")).status_code == 404


async def test_exports_are_hidden_from_sdks_that_would_crash(world: World) -> None:
    run = await world.model()
    await world.checkpoint(run, WEIGHTS, "a")
    await world.checkpoint(run, EXTERNAL, "e")
    for version, shown in (
        ("0.27.1", False),
        ("0.9.0", False),
        ("0.28.0", True),
        ("1.0.0", True),
        ("", True),
    ):
        for path in (f"training_runs/{run}/checkpoints", "checkpoints"):
            headers = {"X-Stainless-Package-Version": version} if version else {}
            page = (await world.http.get(path, headers=headers)).json()
            assert sorted(names(page)) == (["external_weights/e"] if shown else []) + ["weights/a"], version
            assert (page["cursor"] or {"total_count": 1 + shown})["total_count"] == 1 + shown


async def test_publishing_and_taking_back_can_be_repeated(world: World) -> None:
    run = await world.model()
    await world.checkpoint(run, WEIGHTS, "a")
    url = f"training_runs/{run}/checkpoints/weights/a/publish"
    for change, public in ((world.http.post, True), (world.http.delete, False)):
        for _ in range(2):
            assert (await change(url)).status_code == 200
            page = await get(world, f"training_runs/{run}/checkpoints")
            assert page["checkpoints"][0]["public"] is public


async def test_a_published_checkpoint_is_everybody_s_until_it_is_taken_back(world: World) -> None:
    alice, bob = await new_user(world, "alice"), await new_user(world, "bob")
    speak_as(world, alice)
    run = await world.model()
    trained = await world.checkpoint(run, WEIGHTS, "w", has_optimizer=True)
    sampled = await world.checkpoint(run, SAMPLER, "s")
    speak_as(world, bob)
    session = await world.session()

    async def statuses(number: int) -> list[int]:
        sampler = {"session_id": session, "sampling_session_seq_id": number, "model_path": sampled}
        answers = [
            await world.post("weights_info", {"tinker_path": trained}),
            await world.post("create_sampling_session", sampler),
            await world.http.get(f"training_runs/{run}/checkpoints"),
        ]
        return [answer.status_code for answer in answers]

    async def load(number: int) -> str:
        wanted = {"session_id": session, "model_seq_id": number, "path": trained, "optimizer": True}
        return str((await world.ok("load_weights", wanted))["request_id"])

    assert await statuses(0) == [404, 404, 404]
    assert "it was never saved" in await world.failure(await load(0))
    speak_as(world, alice)
    for kind, name in (("weights", "w"), ("sampler_weights", "s")):
        await world.http.post(f"training_runs/{run}/checkpoints/{kind}/{name}/publish")
    speak_as(world, bob)
    assert await statuses(1) == [200, 200, 200]
    assert (await world.retrieve(await load(1))).status_code == 408  # the engine has it
    assert names(await get(world, "checkpoints")) == []
    for method, path, body in (
        ("DELETE", "", None),
        ("POST", "/publish", None),
        ("DELETE", "/publish", None),
        ("PUT", "/ttl", {"ttl_seconds": None}),
    ):
        url = f"training_runs/{run}/checkpoints/weights/w{path}"
        assert (await world.http.request(method, url, json=body)).status_code == 404
    speak_as(world, alice)
    await world.http.delete(f"training_runs/{run}/checkpoints/sampler_weights/s/publish")
    speak_as(world, bob)
    assert await statuses(2) == [200, 404, 200]
    assert names(await get(world, f"training_runs/{run}/checkpoints")) == ["weights/w"]


async def test_the_time_to_live_counts_from_now_and_can_be_taken_away(world: World) -> None:
    run = await world.model()
    await world.checkpoint(run, WEIGHTS, "a")
    url = f"training_runs/{run}/checkpoints/weights/a/ttl"

    async def expires_at() -> str | None:
        found: str | None = (await get(world, "checkpoints"))["checkpoints"][0]["expires_at"]
        return found

    before = time.time()
    assert (await world.http.put(url, json={"ttl_seconds": 7200})).status_code == 200
    text = await expires_at()
    assert text is not None
    assert before + 7200 <= datetime.fromisoformat(text).timestamp() + 1e-3 <= time.time() + 7201
    assert (await world.http.put(url, json={"ttl_seconds": None})).status_code == 200
    assert await expires_at() is None


async def test_a_time_to_live_out_of_range_is_refused(world: World) -> None:
    run = await world.model()
    await world.checkpoint(run, WEIGHTS, "a")
    for ttl in (0, -1, 3599, 10 * YEAR + 3 * 86400, 3600.5, "3600", True):
        body = {"ttl_seconds": ttl}
        answer = await world.http.put(f"training_runs/{run}/checkpoints/weights/a/ttl", json=body)
        assert answer.status_code == 400, ttl
        assert "ttl_seconds" in answer.json()["detail"]


async def test_changes_of_what_is_not_there_are_404_and_of_what_cannot_be_400(world: World) -> None:
    run = await world.model()
    for checkpoint, status in (("weights/no", 404), ("nonsense/a", 400), ("weights/a%20b", 400)):
        url = f"training_runs/{run}/checkpoints/{checkpoint}"
        answers = [
            await world.http.post(f"{url}/publish"),
            await world.http.delete(f"{url}/publish"),
            await world.http.put(f"{url}/ttl", json={"ttl_seconds": 3600}),
            await world.http.delete(url),
        ]
        assert [answer.status_code for answer in answers] == [status] * 4


async def test_a_checkpoint_named_publish_is_a_checkpoint(world: World) -> None:
    run = await world.model()
    await world.checkpoint(run, WEIGHTS, "publish")
    assert (await world.http.delete(f"training_runs/{run}/checkpoints/weights/publish")).status_code == 200
    assert names(await get(world, "checkpoints")) == []


async def test_access_tokens_are_refused_with_what_to_do_instead(world: World) -> None:
    path = await world.checkpoint(await world.model(), WEIGHTS, "a")
    copy = {"source_path": path, "destination_project_id": "p"}
    for answer in (
        await world.post("copy_weights", copy, **{"X-Tinker-Weights-Access-Token": "t"}),
        await world.post("copy_weights", copy | {"weights_access_token": "t"}),
    ):
        assert answer.status_code == 400
        assert "publish" in answer.json()["detail"]
    load = {"session_id": await world.session(), "model_seq_id": 0, "path": path, "weights_access_token": "t"}
    assert "publish" in await world.failure((await world.ok("load_weights", load))["request_id"])
    assert (await get(world, f"training_runs/{path.split('/')[2]}"))["base_model"] == BASE


async def test_what_is_loaded_in_place_is_ones_own_or_published(settings: Settings) -> None:
    async with whole(settings, 1) as server:
        world = server.apis[0]
        (kept := settings.root / "kept").mkdir()
        alice, bob = await new_user(world, "alice"), await new_user(world, "bob")
        speak_as(world, alice)
        run = await world.model()
        path = await world.checkpoint(run, WEIGHTS, "a", directory=str(kept))
        speak_as(world, bob)
        model = await world.model()

        async def loaded(seq_id: int, path: str = path) -> Json:
            body = {"model_id": model, "seq_id": seq_id, "path": path, "optimizer": False}
            request = (await world.ok("load_weights", body))["request_id"]
            while (answer := await world.retrieve(request)).status_code == 408:
                pass  # it was held for a while
            found: Json = answer.json()
            return found

        unknown = path.replace("weights/a", "weights/b")
        refused, missing = await loaded(1), await loaded(2, unknown)
        assert refused == {**missing, "error": missing["error"].replace(unknown, path)}
        assert "was never saved" in refused["error"]
        speak_as(world, alice)
        await world.http.post(f"training_runs/{run}/checkpoints/weights/a/publish")
        speak_as(world, bob)
        assert (await loaded(3))["path"] == path
