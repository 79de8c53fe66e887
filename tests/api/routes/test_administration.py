"""What an administrator does with keys from the dashboard, and nobody else."""

from datetime import datetime

import pytest

from skyrl_tinker.domain.ids import CheckpointKind
from skyrl_tinker.store import api_keys
from tests.api.support.users import get, new_user, speak_as
from tests.api.support.world import Json, World

ROUTES = (
    ("GET", "console/admin", None),
    ("POST", "console/admin/keys", {"name": "mallory", "admin": True}),
    ("POST", "console/admin/keys/1/rotate", {"overlap_s": 0}),
    ("PUT", "console/admin/keys/1/limits", {"limits": {"models": 1}}),
    ("DELETE", "console/admin/keys/1", None),
    ("POST", "console/admin/keys/1/adopt", {"former": "none"}),
)


@pytest.fixture
async def alice(world: World) -> str:
    """The key with the id 1; from here on the administrator speaks, whose id is 2."""
    key = await new_user(world, "alice")
    root = await new_user(world, "root", admin=True)
    speak_as(world, root)
    return key


async def ask(world: World, method: str, path: str, body: Json | None = None, status: int = 200) -> Json:
    answer = await world.http.request(method, path, json=body)
    assert answer.status_code == status, answer.text
    value: Json = answer.json()
    return value


async def keys(world: World) -> dict[str, Json]:
    return {key["name"]: key for key in (await get(world, "console/admin"))["keys"]}


async def events(world: World) -> list[str]:
    return [entry["event"] for entry in (await get(world, "audit"))["entries"]]


async def status_of(world: World, key: str) -> int:
    return (await world.http.get("console/now", headers={"X-API-Key": key})).status_code


@pytest.mark.parametrize(("method", "path", "body"), ROUTES)
async def test_only_an_admin_key_administers(world: World, method: str, path: str, body: Json | None) -> None:
    for _ in ("a server without keys", "a key without rights"):
        refusal = await ask(world, method, path, body, status=403)
        assert "expected an admin key" in refusal["detail"]
        speak_as(world, await new_user(world, f"user-{_[-4:].strip()}"))
    found = await world.store.read(api_keys.list_keys)
    assert not [key for key in found if key.name == "mallory" or key.limits or key.revoked_at]


async def test_an_admin_sees_what_every_owner_has(world: World, alice: str) -> None:
    root = world.http.headers["X-API-Key"]
    speak_as(world, alice)
    await world.checkpoint(await world.model(), CheckpointKind.WEIGHTS, "a")
    speak_as(world, root)
    found = await keys(world)
    assert found["alice"]["owned"]["models"] == found["alice"]["owned"]["sessions"] == 1
    assert (found["alice"]["owned"]["checkpoints"], found["alice"]["owned"]["stored_bytes"]) == (1, 10)
    assert found["root"]["owned"]["models"] == 0
    assert (found["root"]["admin"], found["alice"]["admin"], found["alice"]["live"]) == (True, False, True)
    assert (await get(world, "console/admin"))["limits"]["metadata_kb"] == 16
    assert alice not in str(found)


async def test_tokens_of_the_last_day_are_added_up_by_owner(world: World, alice: str) -> None:
    from skyrl_tinker.domain.ids import OwnerId
    from skyrl_tinker.domain.values import Usage
    from skyrl_tinker.store import usage_records

    for _ in range(2):
        await world.store.write(
            lambda conn: usage_records.add_openai(conn, OwnerId(1), "org/tiny", Usage(5, 0, 7))
        )
    owned = (await keys(world))["alice"]["owned"]
    assert (owned["prompt_tokens"], owned["sampled_tokens"], owned["trained_tokens"]) == (10, 14, 0)


async def test_a_created_key_works_at_once_and_is_on_record(world: World, alice: str) -> None:
    made = await world.http.post("console/admin/keys", json={"name": "bob", "expires_in_s": 60})
    assert made.headers["cache-control"] == "no-store"
    assert await status_of(world, made.json()["key"]) == 200
    assert (await keys(world))["bob"]["expires_at"] is not None
    assert (await events(world)).count("key_create") == 3
    refusal = await ask(world, "POST", "console/admin/keys", {"name": "bob"}, status=400)
    assert "which a live key has" in refusal["detail"]


async def test_what_is_done_with_an_admin_key_names_it(world: World, alice: str) -> None:
    *_, revoke, adopt = ROUTES
    for method, path, body in (*ROUTES[1:-2], adopt, revoke):
        await ask(world, method, path, body)
    entries = (await get(world, "audit"))["entries"]
    by = [(each["event"], each["event_details"]["by"]) for each in entries]
    done = [(f"key_{event}", "root") for event in ("create", "rotate", "limit", "adopt", "revoke")]
    assert by == [("key_create", None), ("key_create", None), *done]


async def test_two_secrets_of_a_key_last_a_week_at_most(world: World, alice: str) -> None:
    path = "console/admin/keys/1/rotate"
    refusal = await ask(world, "POST", path, {"overlap_s": 7 * 86400 + 1}, status=400)
    assert refusal["detail"] == "overlap: found 604801 s, expected at most 604800 s (7 days)"
    await ask(world, "POST", path, {"overlap_s": 7 * 86400})


async def test_a_rotated_key_keeps_its_old_secret_for_the_overlap(world: World, alice: str) -> None:
    second = (await ask(world, "POST", "console/admin/keys/1/rotate", {}))["key"]
    assert [await status_of(world, key) for key in (alice, second)] == [200, 200]
    third = (await ask(world, "POST", "console/admin/keys/1/rotate", {"overlap_s": 0}))["key"]
    assert [await status_of(world, key) for key in (alice, second, third)] == [401, 401, 200]
    assert (await keys(world))["alice"]["expires_at"] is None
    await ask(world, "POST", "console/admin/keys/1/rotate", {"expires_in_s": 86400})
    await ask(world, "POST", "console/admin/keys/1/rotate", {})
    expires_at = datetime.fromisoformat((await keys(world))["alice"]["expires_at"]).timestamp()
    assert expires_at == pytest.approx(world.store.now() + 86400, abs=3600)


async def test_a_revoked_key_is_refused_at_once(world: World, alice: str) -> None:
    await ask(world, "DELETE", "console/admin/keys/1")
    assert await status_of(world, alice) == 401
    assert not (await keys(world))["alice"]["live"]
    await ask(world, "DELETE", "console/admin/keys/1", status=404)


async def test_a_key_adopts_the_work_of_one_that_has_ended(world: World, alice: str) -> None:
    root = world.http.headers["X-API-Key"]
    bob = (await ask(world, "POST", "console/admin/keys", {"name": "bob"}))["key"]
    speak_as(world, alice)
    run = await world.model()
    speak_as(world, root)
    path = "console/admin/keys/3/adopt"
    refusal = await ask(world, "POST", path, {"former": "alice"}, status=400)
    assert refusal["detail"] == "key 1 (alice) is live: revoke it first"
    await ask(world, "DELETE", "console/admin/keys/1")
    assert await ask(world, "POST", path, {"former": "1"}) == {"sessions": 1}
    assert {name: key["owned"]["models"] for name, key in (await keys(world)).items()} == {
        "alice": 0,
        "root": 0,
        "bob": 1,
    }
    last = (await get(world, "audit"))["entries"][-1]
    details = {"by": "root", "former_key": 1, "sessions": 1}
    assert (last["event"], {name: last["event_details"][name] for name in details}) == ("key_adopt", details)
    speak_as(world, bob)
    assert [each["run_id"] for each in (await get(world, "console/runs"))["runs"]] == [run]


async def test_limits_are_those_of_the_command_line(world: World, alice: str) -> None:
    path = "console/admin/keys/1/limits"
    answer = await ask(world, "PUT", path, {"limits": {"models": 2, "stored_gb": 0.5, "stop_kb": "none"}})
    assert answer["limits"] == {"models": 2, "stored_gb": 0.5, "stop_kb": None}
    answer = await ask(world, "PUT", path, {"limits": {"models": "default"}})
    assert answer["limits"] == (await keys(world))["alice"]["limits"] == {"stored_gb": 0.5, "stop_kb": None}
    for wrong, said in (
        ({"models": -1}, "models: Input should be greater than or equal to 0, found -1"),
        ({"models": True}, "limits.models.float: Input should be a valid number, found True"),
        ({"speed": 1}, "found 'speed'"),
    ):
        assert said in (await ask(world, "PUT", path, {"limits": wrong}, status=400))["detail"]


@pytest.mark.parametrize(("method", "path", "body"), ROUTES[2:])
async def test_a_key_does_not_change_itself(
    world: World, alice: str, method: str, path: str, body: Json | None
) -> None:
    refusal = await ask(world, method, path.replace("/1", "/2"), body, status=400)
    assert "expected another" in refusal["detail"]
    assert (await keys(world))["root"]["live"]
