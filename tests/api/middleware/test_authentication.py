"""Keys: who is let in, how soon that changes, and what the SDK's JWTs are worth."""

import asyncio
import stat
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import jwt
import openai
import pytest
from starlette.routing import Route
from starlette.types import Message

from skyrl_tinker.api.middleware import authentication
from skyrl_tinker.api.middleware.authentication import AuthMiddleware
from skyrl_tinker.api.middleware.route_traits import TRAITS, Trait
from skyrl_tinker.api.security import keyring, tokens
from skyrl_tinker.api.security.keyring import KeyRing, Refusal, Refusals
from skyrl_tinker.config import Settings
from skyrl_tinker.domain.ids import ALL_OWNERS
from skyrl_tinker.errors import StartupError
from skyrl_tinker.store import api_keys, audit_log
from skyrl_tinker.store.cluster import signing_secrets
from skyrl_tinker.store.cluster.signing_secrets import SigningSecrets
from skyrl_tinker.store.database import sqlite
from tests.api.support.users import new_user
from tests.api.support.world import BASE, World, running
from tests.support.reads import reading
from tests.support.waiting import until

SESSION = {"sdk_version": "0.38.0"}
HOUR_S = 3600


@dataclass
class Clock:
    """UTC seconds, of which a test may skip some."""

    skipped_s: float = 0.0

    def __call__(self) -> float:
        return time.time() + self.skipped_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def world(settings: Settings, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    async with running(settings, clock=clock) as made:
        made.patch = monkeypatch
        yield made


async def revoke(world: World, which: str) -> None:
    await world.store.write(lambda conn: api_keys.revoke(conn, which))


async def ask(
    world: World, credential: str | None = None, path: str = "get_server_capabilities"
) -> httpx.Response:
    return await world.http.get(path, headers={} if credential is None else {"X-API-Key": credential})


async def until_status(world: World, status: int, credential: str | None = None) -> httpx.Response:
    return await until(lambda: ask(world, credential), lambda answer: answer.status_code == status)


async def token_for(world: World, credential: str) -> str:
    answer = await world.post("auth/token", {}, **{"X-API-Key": credential})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["jwt"])


@pytest.mark.parametrize("credential", [None, "tml-anything", "eyJ.not.one", "x"])
async def test_without_keys_everybody_is_welcome(world: World, credential: str | None) -> None:
    assert (await ask(world, credential)).status_code == 200


async def test_with_a_key_only_its_holder_is_let_in(world: World) -> None:
    key = await new_user(world, "alice")
    for wrong in (None, "", "tml-local", key[:-1], key + "x", "Bearer " + key):
        answer = await ask(world, wrong)
        assert answer.status_code == 401, wrong
        assert "expected a live API key of this server" in answer.json()["detail"]
        assert answer.headers["content-length"] == str(len(answer.content))
        assert answer.headers["www-authenticate"] == "Bearer"
        assert not wrong or wrong not in answer.text


async def test_a_bearer_is_as_good_as_the_header_which_goes_first(world: World) -> None:
    key = await new_user(world, "alice")
    bearer = {"Authorization": f"bearer {key}"}
    path = "get_server_capabilities"
    assert (await world.http.get(path, headers=bearer)).status_code == 200
    assert (await world.http.get(path, headers={**bearer, "X-API-Key": "tml-x"})).status_code == 401
    assert (await world.http.get(path, headers={"Authorization": f"Basic {key}"})).status_code == 401


async def test_openai_clients_read_why_they_are_refused(world: World) -> None:
    key = await new_user(world, "alice")
    for credential, refused in (("tml-wrong", True), (key, False)):
        client = openai.AsyncOpenAI(
            base_url="http://api/oai/api/v1", api_key=credential, http_client=world.http, max_retries=0
        )
        if refused:
            with pytest.raises(
                openai.AuthenticationError, match="unknown or revoked, expected a live API key"
            ):
                await client.models.list()
        else:
            assert BASE in [model.id async for model in await client.models.list()]


async def test_the_first_key_takes_effect_by_itself(world: World) -> None:
    key = await world.store.write(lambda conn: api_keys.create(conn, "alice"))
    await until_status(world, 401, "tml-anything")
    assert (await ask(world, key)).status_code == 200


async def test_revoking_takes_effect_by_itself_and_does_not_open_the_server(world: World) -> None:
    key = await new_user(world, "alice")
    await revoke(world, "alice")
    answer = await until_status(world, 401, key)
    assert "unknown or revoked" in answer.json()["detail"]
    assert (await ask(world)).status_code == 401
    assert (await ask(world, "tml-anything")).status_code == 401


async def test_a_key_from_before_the_start_counts_from_the_first_request_on(world: World) -> None:
    await world.store.write(lambda conn: api_keys.create(conn, "alice"))
    ring = KeyRing(world.store, SigningSecrets(world.settings.root))
    await ring.refresh()
    assert ring.locked


def routes_of(world: World) -> list[tuple[str, str]]:
    return [
        (method, route.path)
        for route in world.app.routes
        if isinstance(route, Route)
        for method in sorted(route.methods or ())
    ]


async def test_every_route_but_those_that_are_meant_to_be_open_wants_a_key(world: World) -> None:
    await new_user(world, "alice")
    opened = set()
    for method, path in routes_of(world):
        answer = await world.http.request(method, f"http://api{path}", content=b"{}")
        if answer.status_code != 401:
            opened.add(path)
    expected = {
        path
        for _, path in routes_of(world)
        if Trait.OPEN in TRAITS.get(path, Trait.NONE) or path.startswith(authentication.OPEN_BELOW)
    }
    assert opened == expected
    assert {"/healthz", "/readyz", "/metrics", "/api/v1/healthz", "/api/v1/openapi.json"} <= opened
    assert all(
        not path.startswith(("/api/v1/", "/oai/")) or "health" in path or "openapi" in path for path in opened
    )


@pytest.mark.parametrize(
    ("path", "status"),
    [("/api/v1/forward_backward", 401), ("/healthz", 405), ("/metrics", 405), ("/download/x", 405)],
)
async def test_a_refused_body_is_not_read(world: World, path: str, status: int) -> None:
    await new_user(world, "alice")
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("the body was read before it was known whose it is")

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "app": world.app}
    await AuthMiddleware(world.app)(scope, receive, send)
    assert [message.get("status") for message in sent] == [status, None]


# JWTs


async def test_a_key_buys_a_jwt_that_says_who_it_is(world: World) -> None:
    key = await new_user(world, "alice@example.com")
    before = int(time.time())
    token = await token_for(world, key)
    claims = jwt.decode(token, options={"verify_signature": False})
    assert claims["sub"] == "tml:user:alice@example.com"
    assert claims["org_id"] == "local"
    assert claims["email"] == "alice@example.com"
    assert claims["iss"].startswith("passport-")
    assert claims["exp"] - claims["iat"] == tokens.LIFE_S
    assert before <= claims["iat"] <= time.time()
    assert key not in str(claims)
    assert (await ask(world, token)).status_code == 200


async def test_key_and_jwt_are_one_owner(world: World) -> None:
    key = await new_user(world, "alice")
    token = await token_for(world, key)
    made = await world.post("create_session", SESSION, **{"X-API-Key": token})
    beat = await world.post("session_heartbeat", made.json(), **{"X-API-Key": key})
    assert (made.status_code, beat.status_code) == (200, 200)


async def test_revoking_a_key_ends_its_jwts_and_says_so_as_the_sdk_understands(world: World) -> None:
    key = await new_user(world, "alice")
    token = await token_for(world, key)
    assert (await ask(world, token)).status_code == 200
    await revoke(world, "alice")
    answer = await until_status(world, 401, token)
    assert 'error="invalid_token"' in answer.headers["www-authenticate"]
    assert "revoked" in answer.json()["detail"]


def forged(world: World, **changes: Any) -> dict[str, str]:
    """Tokens that are wrong in one way each."""
    now = int(time.time())
    (secret_id,) = world.services.keys._secrets
    good = {
        "iss": tokens.ISSUER,
        "sub": "tml:user:alice",
        "key": 1,
        "secret_id": secret_id,
        "iat": now,
        "exp": now + 60,
    }
    secret = world.services.keys._signing.current.jwt
    other = b"another secret of thirty-two byt"
    signed = {
        "expired": ({**good, "exp": now - 1}, secret),
        "another secret": (good, other),
        "another issuer": ({**good, "iss": "passport-elsewhere"}, secret),
        "no expiry": ({key: value for key, value in good.items() if key != "exp"}, secret),
        "no key": ({key: value for key, value in good.items() if key != "key"}, secret),
        "another key": ({**good, "key": 2}, secret),
        "no secret": ({key: value for key, value in good.items() if key != "secret_id"}, secret),
        "another secret of the key": ({**good, "secret_id": "0" * 16}, secret),
    }
    made = {name: jwt.encode(claims, key, "HS256") for name, (claims, key) in signed.items()}
    made["unsigned"] = jwt.encode(good, None, "none")
    made["cut"] = jwt.encode(good, secret, "HS256")[:-4]
    made["nonsense"] = "eyJ" + "x" * 40
    return made


async def test_jwts_that_are_not_ours_or_too_old_are_invalid_tokens(world: World) -> None:
    key = await new_user(world, "alice")
    assert (await ask(world, await token_for(world, key))).status_code == 200
    for name, token in forged(world).items():
        answer = await ask(world, token)
        assert answer.status_code == 401, name
        assert 'error="invalid_token"' in answer.headers["www-authenticate"], name
        assert answer.json()["detail"].startswith("X-API-Key: found a JWT"), name


async def test_a_jwt_stops_when_it_expires_though_it_was_seen_before(world: World, clock: Clock) -> None:
    key = await new_user(world, "alice")
    ring = world.services.keys
    caller = ring.caller(key)
    token = ring.issue_token(replace(caller, until=clock() + HOUR_S / 2))
    assert (await ask(world, token)).status_code == 200
    clock.skipped_s += HOUR_S / 2
    answer = await ask(world, token)
    assert (answer.status_code, 'error="invalid_token"' in answer.headers["www-authenticate"]) == (401, True)
    assert "found a JWT that has expired" in answer.json()["detail"]


async def test_a_jwt_buys_no_longer_life(world: World) -> None:
    first = await token_for(world, await new_user(world, "alice"))
    second = await token_for(world, first)
    ends = [jwt.decode(each, options={"verify_signature": False})["exp"] for each in (first, second)]
    assert ends[0] == ends[1]


async def test_a_jwt_from_before_the_first_key_is_worth_nothing_after_it(world: World) -> None:
    token = await token_for(world, "tml-anything")
    assert jwt.decode(token, options={"verify_signature": False})["sub"] == "tml:user:local"
    assert (await ask(world, token)).status_code == 200
    await new_user(world, "alice")
    answer = await until_status(world, 401, token)
    assert 'error="invalid_token"' in answer.headers["www-authenticate"]


# Keys that rotate and expire


async def rotate(world: World, overlap_s: float) -> str:
    return await world.store.write(lambda conn: api_keys.rotate(conn, "alice", overlap_s))


async def test_a_new_secret_and_for_its_time_the_old_one_are_one_owner(world: World, clock: Clock) -> None:
    old = await new_user(world, "alice")
    made = await world.post("create_session", SESSION, **{"X-API-Key": old})
    new = await rotate(world, overlap_s=HOUR_S)
    await until_status(world, 200, new)
    for key in (old, new):
        beat = await world.post("session_heartbeat", made.json(), **{"X-API-Key": key})
        assert beat.status_code == 200, beat.text
    clock.skipped_s += HOUR_S
    answer = await ask(world, old)
    assert answer.status_code == 401
    assert "found one that was rotated away" in answer.json()["detail"]
    assert (await ask(world, new)).status_code == 200


async def test_a_jwt_ends_with_the_secret_that_it_was_issued_for(world: World, clock: Clock) -> None:
    old = await new_user(world, "alice")
    before = await token_for(world, old)
    new = await rotate(world, overlap_s=HOUR_S / 2)
    end = clock() + HOUR_S / 2
    await world.services.keys.refresh()
    during = await token_for(world, old)
    after = await token_for(world, new)
    for token in (before, during, after):
        assert (await ask(world, token)).status_code == 200
    assert jwt.decode(during, options={"verify_signature": False})["exp"] <= end
    clock.skipped_s += HOUR_S / 2
    for token in (before, during):
        answer = await ask(world, token)
        assert answer.status_code == 401
        assert 'error="invalid_token"' in answer.headers["www-authenticate"]
    assert (await ask(world, after)).status_code == 200


async def test_a_leaked_secret_can_end_at_once(world: World) -> None:
    old = await new_user(world, "alice")
    token = await token_for(world, old)
    await rotate(world, overlap_s=0)
    await world.services.keys.refresh()
    assert [(await ask(world, each)).status_code for each in (old, token)] == [401, 401]


async def test_a_key_and_its_jwts_expire(world: World, clock: Clock) -> None:
    end = clock() + HOUR_S / 2
    key = await world.store.write(lambda conn: api_keys.create(conn, "alice", expires_at=end))
    await world.services.keys.refresh()
    token = await token_for(world, key)
    assert jwt.decode(token, options={"verify_signature": False})["exp"] <= end
    assert [(await ask(world, each)).status_code for each in (key, token)] == [200, 200]
    clock.skipped_s += HOUR_S / 2
    answers = [await ask(world, each) for each in (key, token)]
    assert [answer.status_code for answer in answers] == [401, 401]
    assert "found one that expired at 2" in answers[0].json()["detail"]


async def test_new_signing_secrets_end_jwts_and_urls_but_no_key(world: World) -> None:
    key = await new_user(world, "alice")
    headers = {"X-API-Key": key}
    session = (await world.post("create_session", SESSION, **headers)).json()["session_id"]
    url = (await world.http.get(f"sessions/{session}/trace_export", headers=headers)).json()["url"]
    token = await token_for(world, key)
    assert (await world.http.get(url)).status_code == 200
    signing_secrets.rotate(world.settings.root)
    answer = await until_status(world, 401, token)
    assert 'error="invalid_token"' in answer.headers["www-authenticate"]
    refused = await world.http.get(url)
    assert (refused.status_code, "request a new one" in refused.text) == (403, True)
    assert (await ask(world, await token_for(world, key))).status_code == 200


async def test_processes_of_one_home_sign_alike(world: World) -> None:
    await new_user(world, "alice")
    rings = [KeyRing(world.store, SigningSecrets(world.settings.root)) for _ in range(2)]
    for ring in rings:
        await ring.refresh()
    assert len({ring._signing.current for ring in [*rings, world.services.keys]}) == 1
    file = world.settings.root / signing_secrets.FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in world.settings.root.glob(f".{signing_secrets.FILE}*")] == []


def damaged(file: Path) -> None:
    file.write_text(file.read_text()[:30])


@pytest.mark.parametrize("change", [damaged, Path.unlink, lambda file: file.write_text("[]")])
async def test_secrets_that_cannot_be_read_are_those_from_before(
    world: World, change: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    token = await token_for(world, await new_user(world, "alice"))
    file = world.settings.root / signing_secrets.FILE
    whole = file.read_text()
    change(file)
    for _ in range(3):
        await world.services.keys.refresh()
    assert (await ask(world, token)).status_code == 200
    assert "cannot be read" in caplog.text
    assert not file.exists() or file.read_text() != whole
    file.write_text(whole)
    await world.services.keys.refresh()
    assert (await ask(world, token)).status_code == 200
    signing_secrets.rotate(world.settings.root)
    await world.services.keys.refresh()
    assert (await ask(world, token)).status_code == 401


def test_secrets_that_were_never_whole_are_refused_with_the_files_name(tmp_path: Path) -> None:
    (tmp_path / signing_secrets.FILE).write_text('{"jwt": "ab')
    with pytest.raises(StartupError, match=signing_secrets.FILE):
        SigningSecrets(tmp_path).refresh()


# Notes of use and of refusals


async def events(world: World) -> list[tuple[str, dict[str, Any]]]:
    with reading(world.store) as conn:
        found = audit_log.events_between(conn, ALL_OWNERS, 0, time.time() + 1, None)
    return [(event.event, dict(event.details)) for event in found]


async def until_noted(world: World, event: str, count: int) -> list[dict[str, Any]]:
    async def found() -> list[dict[str, Any]]:
        return [details for name, details in await events(world) if name == event]

    return await until(found, lambda noted: len(noted) >= count)


async def test_last_use_is_noted_soon_and_then_once_a_minute(world: World) -> None:
    ring, rounds = world.services.keys, 0

    async def refresh() -> None:
        nonlocal rounds
        rounds += 1
        await KeyRing.refresh(ring)

    def used() -> list[float | None]:
        with reading(world.store) as conn:
            return [row.last_used_at for row in api_keys.list_keys(conn)]

    world.patch.setattr(ring, "refresh", refresh)
    world.patch.setattr(keyring, "REFRESH_S", 0.01)
    key = await new_user(world, "alice")
    await new_user(world, "bob")
    assert used() == [None, None]
    await ask(world, key)
    first = await until(used, lambda times: times[0] is not None)
    assert first[1] is None
    await ask(world, key)
    before = rounds
    await until(lambda: rounds >= before + 2)  # the first of them is over, with its notes
    assert used() == first
    world.patch.setattr(keyring, "NOTE_EVERY_S", 0.0)
    await until(used, first.__ne__)


async def test_uses_since_the_last_note_are_noted_when_the_server_stops(world: World) -> None:
    key = await new_user(world, "alice")
    ring = KeyRing(world.store, SigningSecrets(world.settings.root))
    await ring.refresh()
    running = asyncio.create_task(ring.run())
    await asyncio.sleep(0)
    ring.caller(key)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with reading(world.store) as conn:
        assert api_keys.find_live(conn, "alice").last_used_at is not None


async def test_refused_credentials_are_counted_by_address_in_the_audit_log(world: World) -> None:
    world.patch.setattr(keyring, "NOTE_EVERY_S", 0.0)
    await new_user(world, "alice")
    for _ in range(3):
        await ask(world, "tml-wrong")
    await ask(world, "eyJ.no.jwt")
    await ask(world)  # no credential: nobody tried to log in
    await until(lambda: refused(world), {("127.0.0.1", "unknown keys or invalid JWTs"): 4}.__eq__)


async def test_notes_that_the_database_does_not_take_are_written_later(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keyring, "NOTE_EVERY_S", 0.0)
    await new_user(world, "alice")
    with monkeypatch.context() as broken:
        broken.setattr(sqlite, "BEGIN_WRITE", "BEGIN NEVER")
        await ask(world, "tml-wrong")
        await until(lambda: any("trying again" in line for line in caplog.messages))
        assert not any("refused 1 credentials" in line for line in caplog.messages)
    await until(lambda: refused(world), {("127.0.0.1", "unknown keys or invalid JWTs"): 1}.__eq__)
    await until(lambda: sum("refused 1 credentials" in line for line in caplog.messages) == 1)


async def refused(world: World) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    for event, details in await events(world):
        if event == "login_fail":
            counts[details["address"], details["why"]] += details["count"]
    return counts


async def test_use_of_an_ended_key_is_that_keys_event(world: World) -> None:
    old = await new_user(world, "alice")
    await rotate(world, overlap_s=0)
    await world.services.keys.refresh()
    assert (await ask(world, old)).status_code == 401
    (noted,) = await until_noted(world, "key_ended_use", 1)
    assert (noted["key"], noted["why"], noted["count"]) == ("alice", "a key that was replaced", 1)


def test_a_flood_of_addresses_takes_bounded_memory_and_few_lines() -> None:
    counts = Refusals()
    for number in range(10_000):
        counts.note(Refusal(f"10.0.{number // 256}.{number % 256}", "an unknown key"))
    taken = counts.take()
    assert len(taken) == keyring.MOST_ADDRESSES + 1
    assert sum(taken.values()) == 10_000
    assert taken[Refusal(keyring.OTHERS, "any")] == 10_000 - keyring.MOST_ADDRESSES
    assert not counts.take()


# What a client may do about its own key


async def test_a_key_tells_what_it_is(world: World) -> None:
    key = await new_user(world, "alice")
    answer = await ask(world, key, "auth/apikey/me")
    assert answer.json() == {
        "key_id": 1,
        "name": "alice",
        "note": "",
        "details": {"org_details": {"name": "local"}, "user_details": {"email": "alice"}},
    }


async def test_without_keys_any_key_logs_in_and_none_can_be_revoked(world: World) -> None:
    answer = await ask(world, "tml-mine", "auth/apikey/me")
    assert (answer.status_code, answer.json()["name"], answer.json()["key_id"]) == (200, "local", 0)
    refused = await world.http.delete("auth/apikey/me", headers={"X-API-Key": "tml-mine"})
    assert refused.status_code == 400
    assert (
        refused.json()["detail"] == "this server has no API keys: it accepts any, so there is none to revoke"
    )


async def test_a_key_can_revoke_itself_and_only_itself(world: World) -> None:
    alice, bob = await new_user(world, "alice"), await new_user(world, "bob")
    assert (await world.http.delete("auth/apikey/me", headers={"X-API-Key": alice})).status_code == 200
    assert (await ask(world, alice)).status_code == 401
    assert (await ask(world, bob)).status_code == 200


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/api/v1/auth/apikey"), ("GET", "/api/unauthed/auth-config")]
)
async def test_a_browser_login_is_refused_with_what_to_do(world: World, method: str, path: str) -> None:
    answer = await world.http.request(method, f"http://api{path}")
    assert answer.status_code == 400
    assert "skyrl-tinker keys create" in answer.json()["detail"]
