"""Objects of another owner look exactly like unknown ones: on every route, for every kind of object.

The cases below name every route of the app. A route that is added without one fails the first test.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

import httpx
import pytest
from aiohttp import web
from sqlalchemy import update
from starlette.routing import BaseRoute, Mount, Route

from skyrl_tinker.api.middleware import authentication
from skyrl_tinker.api.middleware.route_traits import TRAITS, Trait
from skyrl_tinker.domain.ids import CheckpointKind
from skyrl_tinker.store import api_keys, audit_log
from skyrl_tinker.store.database.group_commit import Op
from skyrl_tinker.store.database.tables import ApiKey
from tests.api.routes.test_losses import upload
from tests.api.routes.test_openai import engine
from tests.api.support.passes import datum, protobuf
from tests.api.support.users import new_user
from tests.api.support.world import BASE, Json, World, sample, step

PASS = {"Content-Type": "application/x-protobuf"}


@dataclass(frozen=True)
class Things:
    """One of each, all of one session."""

    session: str
    model: str
    sampler: str
    future: str
    weights: str

    @property
    def sampler_weights(self) -> str:
        return f"tinker://{self.model}/sampler_weights/b"

    def unknown(self) -> "Things":
        """Return ids of the same length that do not exist."""
        return Things(
            *(self._changed(each) for each in (self.session, self.model, self.sampler)),
            future="0" * len(self.future),
            weights=self._changed(self.weights),
        )

    def _changed(self, text: str) -> str:
        return text.replace(self.session, str(UUID(int=UUID(self.session).int ^ 1)))


@dataclass(frozen=True)
class Ask:
    """Path below the server's root, and a body: JSON, or bytes as they are."""

    path: str
    json: Json | None = None
    content: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


Case = Callable[[Things, Things], Ask]
"""Function from another owner's (or unknown) objects and one's own to a request."""


def post(path: str, body: Callable[[Things, Things], Json]) -> Case:
    return lambda their, own: Ask(f"/api/v1/{path}", body(their, own))


def at(path: str, body: Json | None = None) -> Case:
    """`path` names the object by a field of Things."""
    return lambda their, own: Ask("/api/v1/" + path.format_map(vars(their)), body)


def create(session: str, number: int = 9) -> Json:
    return {
        "session_id": session,
        "model_seq_id": number,
        "base_model": BASE,
        "lora_config": {"rank": 8, "train_mlp": True, "train_attn": True, "train_unembed": True},
    }


def sampling(session: str, **target: str) -> Json:
    return {"session_id": session, "sampling_session_seq_id": 9, **(target or {"base_model": BASE})}


def backward(model: str) -> bytes:
    return protobuf(model, 1, datum([1, 2]))


def copy(path: str, session: str) -> Json:
    return {"source_path": path, "session_id": session, "model_seq_id": 9}


CHECKPOINT = "training_runs/{model}/checkpoints/weights/a"
CASES: dict[tuple[str, str], list[Case]] = {
    ("GET", "/oai/api/v1/models/{model:path}"): [lambda t, o: Ask(f"/oai/api/v1/models/{t.sampler_weights}")],
    ("POST", "/api/v1/session_heartbeat"): [
        post("session_heartbeat", lambda t, o: {"session_id": t.session})
    ],
    ("POST", "/api/v1/sessions/{session_id}/finish"): [
        at("sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})
    ],
    ("GET", "/api/v1/sessions/{session_id}"): [at("sessions/{session}")],
    ("PUT", "/api/v1/sessions/{session_id}/project"): [at("sessions/{session}/project", {"project_id": "p"})],
    ("GET", "/api/v1/sessions/{session_id}/trace_export"): [at("sessions/{session}/trace_export")],
    ("POST", "/api/v1/create_model"): [post("create_model", lambda t, o: create(t.session))],
    ("POST", "/api/v1/get_info"): [post("get_info", lambda t, o: {"model_id": t.model})],
    ("POST", "/api/v1/unload_model"): [post("unload_model", lambda t, o: {"model_id": t.model})],
    ("POST", "/api/v1/forward_backward"): [
        lambda t, o: Ask("/api/v1/forward_backward", content=backward(t.model), headers=PASS)
    ],
    ("POST", "/api/v1/forward"): [
        lambda t, o: Ask("/api/v1/forward", content=backward(t.model), headers=PASS)
    ],
    ("POST", "/api/v1/optim_step"): [post("optim_step", lambda t, o: step(t.model, 1))],
    ("POST", "/api/v1/save_weights"): [
        post("save_weights", lambda t, o: {"model_id": t.model, "seq_id": 1, "path": "a"})
    ],
    ("POST", "/api/v1/save_weights_for_sampler"): [
        post("save_weights_for_sampler", lambda t, o: {"model_id": t.model, "seq_id": 1, "path": "a"})
    ],
    ("POST", "/api/v1/save_weights_external"): [
        post("save_weights_external", lambda t, o: {"model_id": t.model, "seq_id": 1, "path": "a"})
    ],
    ("POST", "/api/v1/load_weights"): [
        post(
            "load_weights",
            lambda t, o: {"session_id": t.session, "model_seq_id": 9, "path": o.weights, "optimizer": False},
        ),
        post(
            "load_weights",
            lambda t, o: {"model_id": t.model, "seq_id": 1, "path": o.weights, "optimizer": False},
        ),
    ],
    ("POST", "/api/v1/create_custom_loss"): [post("create_custom_loss", lambda t, o: upload(t.session))],
    ("POST", "/api/v1/weights_info"): [post("weights_info", lambda t, o: {"tinker_path": t.weights})],
    ("POST", "/api/v1/copy_weights"): [
        post("copy_weights", lambda t, o: copy(t.weights, o.session)),
        post("copy_weights", lambda t, o: copy(o.weights, t.session)),
    ],
    ("POST", "/api/v1/create_sampling_session"): [
        post("create_sampling_session", lambda t, o: sampling(t.session)),
        post("create_sampling_session", lambda t, o: sampling(o.session, model_path=t.sampler_weights)),
    ],
    ("POST", "/api/v1/join_sampling_session"): [
        post("join_sampling_session", lambda t, o: {"sampling_session_id": t.sampler})
    ],
    ("GET", "/api/v1/samplers/{sampler_id}"): [at("samplers/{sampler}")],
    ("POST", "/api/v1/asample"): [post("asample", lambda t, o: sample(t.sampler, 9))],
    ("POST", "/api/v1/retrieve_future"): [
        post("retrieve_future", lambda t, o: {"request_id": t.future}),
    ],
    ("POST", "/api/v1/retrieve_futures"): [
        post(
            "retrieve_futures",
            lambda t, o: {
                "target": {"sampling_session_id": t.sampler, "cloned_sampler_id": 0},
                "timeout": 0.0,
            },
        )
    ],
    ("POST", "/api/v1/cancel_future"): [post("cancel_future", lambda t, o: {"request_id": t.future})],
    ("GET", "/api/v1/console/runs/{run}"): [at("console/runs/{model}")],
    ("GET", "/api/v1/console/runs/{run}/metrics"): [at("console/runs/{model}/metrics")],
    ("POST", "/api/v1/console/runs/{run}/metrics"): [
        at("console/runs/{model}/metrics", {"step": 1, "values": {"reward": 1.0}})
    ],
    ("GET", "/api/v1/console/runs/{run}/points"): [at("console/runs/{model}/points")],
    ("GET", "/api/v1/console/runs/{run}/points.csv"): [at("console/runs/{model}/points.csv")],
    ("GET", "/api/v1/training_runs/{run}"): [at("training_runs/{model}")],
    ("GET", "/api/v1/training_runs/{run}/checkpoints"): [at("training_runs/{model}/checkpoints")],
    ("GET", "/api/v1/models/{run}/checkpoints"): [at("models/{model}/checkpoints")],
    ("DELETE", "/api/v1/training_runs/{run}/checkpoints/{checkpoint_id:path}"): [at(CHECKPOINT)],
    ("POST", "/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/publish"): [at(CHECKPOINT + "/publish")],
    ("DELETE", "/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/publish"): [
        at(CHECKPOINT + "/publish")
    ],
    ("PUT", "/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/ttl"): [
        at(CHECKPOINT + "/ttl", {"ttl_seconds": 3600})
    ],
    ("GET", "/api/v1/training_runs/{run}/checkpoints/{checkpoint_id:path}/archive"): [
        at(CHECKPOINT + "/archive")
    ],
    ("GET", "/api/v1/training_runs/{run}/checkpoints/{checkpoint_id:path}/external_weights_urls"): [
        at(CHECKPOINT + "/external_weights_urls")
    ],
}

HOUR = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
TODAY = urlencode({"starting_on": HOUR.isoformat(), "ending_before": (HOUR + timedelta(hours=3)).isoformat()})
LISTS: dict[tuple[str, str], Json | None] = {
    ("GET", "/api/v1/sessions"): None,
    ("POST", "/api/v1/sessions/search"): {"owner": {"type": "accessible"}, "limit": 100},
    ("GET", "/api/v1/training_runs"): None,
    ("GET", "/api/v1/training_runs?access_scope=accessible"): None,
    ("GET", "/api/v1/checkpoints"): None,
    ("GET", "/api/v1/audit?event_type=all"): None,
    ("GET", f"/api/v1/billing/usage/events?{TODAY}"): None,
    ("GET", "/api/v1/billing/usage/checkpoints/current"): None,
    ("GET", "/api/v1/console/runs"): None,
}
"""Routes that name no object and show one's own only."""

ELSEWHERE = {
    ("GET", "/api/v1/console/requests"): "test_tokens_are_the_owners_only",
    ("GET", "/api/v1/console/requests/{request_id}/tokens"): "test_tokens_are_the_owners_only",
    ("GET", "/api/v1/console/requests/{request_id}/items"): "test_tokens_are_the_owners_only",
    ("GET", "/api/v1/console/trace"): "test_a_trace_has_the_callers_requests_only",
    ("GET", "/api/v1/console/admin"): "test_only_an_admin_key_administers",
    ("POST", "/api/v1/console/admin/keys"): "test_only_an_admin_key_administers",
    ("POST", "/api/v1/console/admin/keys/{key}/rotate"): "test_only_an_admin_key_administers",
    ("POST", "/api/v1/console/admin/keys/{key}/adopt"): "test_only_an_admin_key_administers",
    ("PUT", "/api/v1/console/admin/keys/{key}/limits"): "test_only_an_admin_key_administers",
    ("DELETE", "/api/v1/console/admin/keys/{key}"): "test_only_an_admin_key_administers",
    ("POST", "/api/v1/console/admin/bases"): "test_only_an_admin_starts_and_stops_where_there_are_keys",
    ("GET", "/api/v1/console/now"): "test_keys_see_their_own_queue_and_only_admins_the_processes",
    ("POST", "/oai/api/v1/completions"): "test_the_engine_hears_who_asks_from_the_api_alone",
    ("POST", "/oai/api/v1/chat/completions"): "test_the_engine_hears_who_asks_from_the_api_alone",
}
NOBODYS = {
    ("GET", "/api/v1/console/rates"),
    ("POST", "/api/v1/client/config"),
    ("POST", "/api/v1/client/dynamic_config"),
    ("POST", "/api/v1/auth/token"),
    ("GET", "/api/v1/auth/apikey/me"),
    ("DELETE", "/api/v1/auth/apikey/me"),
    ("POST", "/api/v1/auth/apikey"),
    ("POST", "/api/v1/external_weights_upload_start"),
    ("POST", "/api/v1/external_weights_upload_finish"),
    ("POST", "/api/v1/create_session"),
    ("POST", "/api/v1/telemetry"),
    ("GET", "/api/v1/get_server_capabilities"),
    ("GET", "/api/v1/tokenizer"),
    ("GET", "/oai/api/v1/models"),
}
"""No object is named, and none is told of but what the caller has just made or is."""


def routes(world: World) -> Iterator[tuple[str, str]]:
    """Routes of the app that need a key; HEAD is GET without its body."""
    for route in world.app.routes:
        assert isinstance(route, Route | Mount), route
        if not _open(route):
            assert isinstance(route, Route)
            yield from ((method, route.path) for method in (route.methods or set()) - {"HEAD"})


def _open(route: BaseRoute) -> bool:
    path = getattr(route, "path", "")
    return Trait.OPEN in TRAITS.get(path, Trait.NONE) or f"{path}/".startswith(authentication.OPEN_BELOW)


@dataclass(frozen=True)
class Tenant:
    world: World
    key: str
    things: Things

    async def send(self, method: str, ask: Ask) -> httpx.Response:
        return await self.world.http.request(
            method,
            f"http://api{ask.path}",
            json=ask.json,
            content=ask.content,
            headers={**ask.headers, "X-API-Key": self.key},
        )


async def tenant(world: World, name: str, **rights: Any) -> Tenant:
    key = await new_user(world, name, **rights)
    with as_key(world, key):
        session = await world.session()
        model = await world.model(session)
        sampler = await world.sampler(session)
        future = str((await world.ok("asample", sample(sampler, 0)))["request_id"])
    weights = await world.checkpoint(model, CheckpointKind.WEIGHTS, "a")
    await world.checkpoint(model, CheckpointKind.SAMPLER_WEIGHTS, "b")
    return Tenant(world, key, Things(session, model, sampler, future, weights))


class as_key:  # noqa: N801  (reads like a function)
    """Send the world's requests with this key inside the context."""

    def __init__(self, world: World, key: str) -> None:
        self._headers = world.http.headers
        self._key = key

    def __enter__(self) -> None:
        self._headers["X-API-Key"] = self._key

    def __exit__(self, *_: object) -> None:
        del self._headers["X-API-Key"]


@pytest.fixture
async def alice(world: World) -> Tenant:
    return await tenant(world, "alice")


@pytest.fixture
async def bob(world: World, alice: Tenant) -> Tenant:
    return await tenant(world, "bob")


async def test_every_route_has_a_case(world: World) -> None:
    known = {*CASES, *ELSEWHERE, *NOBODYS, *((method, path.partition("?")[0]) for method, path in LISTS)}
    assert set(routes(world)) == known


async def test_what_is_anothers_is_answered_as_what_there_is_not(alice: Tenant, bob: Tenant) -> None:
    unknown = alice.things.unknown()
    for (method, path), cases in CASES.items():
        for number, case in enumerate(cases):
            foreign = await bob.send(method, case(alice.things, bob.things))
            nothing = await bob.send(method, case(unknown, bob.things))
            where = f"{method} {path} [{number}]: {foreign.status_code} {foreign.text}"
            assert (foreign.status_code, nothing.status_code) == (404, 404), where
            assert renamed(foreign, alice.things, unknown) == nothing.content, where
            assert set(foreign.headers) == set(nothing.headers), where


def renamed(answer: httpx.Response, their: Things, unknown: Things) -> bytes:
    text = answer.text.replace(their.session, unknown.session).replace(their.future, unknown.future)
    return text.encode()


async def test_the_cases_are_good_requests_when_they_name_ones_own(alice: Tenant) -> None:
    """Or they would find 404 for another reason."""
    own = alice.things
    wrong = {}
    for (method, path), cases in CASES.items():
        if method == "DELETE" or "finish" in path:  # after which there is less to find
            continue
        for number, case in enumerate(cases):
            answer = await alice.send(method, case(own, own))
            if answer.status_code == 404:
                wrong[f"{method} {path} [{number}]"] = answer.text
    assert not wrong


# Keys that were rotated, have ended, or see everything


async def test_a_rotated_key_finds_its_own_and_nobody_elses(world: World, alice: Tenant, bob: Tenant) -> None:
    key = await world.store.write(lambda conn: api_keys.rotate(conn, "bob", 3600))
    await world.services.keys.refresh()
    holders = replace(bob, key=key), bob
    for holder in holders:
        assert not await found(holder, alice.things)
    for holder in holders:
        assert await found(holder, bob.things) == set(UNCHANGING)


@pytest.mark.parametrize("how", ["expired", "revoked", "rotated away"])
async def test_an_ended_key_is_refused_everywhere_also_its_own(world: World, bob: Tenant, how: str) -> None:
    over = update(ApiKey).where(ApiKey.id == 2).values(expires_at=time.time() - 1)
    ends: dict[str, Op[object]] = {
        "expired": lambda conn: (conn.execute(over), api_keys.rotate(conn, "alice", 0)),
        "revoked": lambda conn: api_keys.revoke(conn, "bob"),
        "rotated away": lambda conn: api_keys.rotate(conn, "bob", 0),
    }
    await world.store.write(ends[how])
    await world.services.keys.refresh()
    for (method, path), cases in CASES.items():
        for case in cases:
            answer = await bob.send(method, case(bob.things, bob.things))
            assert answer.status_code == 401, f"{method} {path}"
    for method, path in LISTS:
        assert (await bob.send(method, Ask(path, LISTS[method, path]))).status_code == 401, path


async def test_an_heir_finds_what_the_dead_key_made(world: World, alice: Tenant, bob: Tenant) -> None:
    await world.store.write(lambda conn: api_keys.revoke(conn, "alice"))
    await world.store.write(lambda conn: api_keys.adopt(conn, "bob", "1"))
    await world.services.keys.refresh()
    assert await found(bob, alice.things) == set(UNCHANGING)
    for (method, path), body in LISTS.items():
        answer = await bob.send(method, Ask(path, body))
        session = "tml:user:bob" if "current" in path else alice.things.session
        assert session in answer.text or alice.things.model in answer.text, path


READ_BY_ADMINS = {
    ("GET", "/api/v1/console/runs/{run}"),
    ("GET", "/api/v1/console/runs/{run}/metrics"),
    ("GET", "/api/v1/console/runs/{run}/points"),
    ("GET", "/api/v1/console/runs/{run}/points.csv"),
    ("GET", "/api/v1/sessions/{session_id}"),
    ("GET", "/api/v1/sessions/{session_id}/trace_export"),
    ("POST", "/api/v1/get_info"),
    ("POST", "/api/v1/weights_info"),
    ("GET", "/api/v1/samplers/{sampler_id}"),
    ("POST", "/api/v1/retrieve_future"),
    ("POST", "/api/v1/retrieve_futures"),
    ("GET", "/api/v1/training_runs/{run}"),
    ("GET", "/api/v1/training_runs/{run}/checkpoints"),
    ("GET", "/api/v1/models/{run}/checkpoints"),
    ("GET", "/api/v1/training_runs/{run}/checkpoints/{checkpoint_id:path}/archive"),
    ("GET", "/api/v1/training_runs/{run}/checkpoints/{checkpoint_id:path}/external_weights_urls"),
}
ENDED_BY_ADMINS = {
    ("POST", "/api/v1/cancel_future"): "admin_cancel",
    ("POST", "/api/v1/unload_model"): "admin_unload",
    ("DELETE", "/api/v1/training_runs/{run}/checkpoints/{checkpoint_id:path}"): "admin_delete",
    ("POST", "/api/v1/sessions/{session_id}/finish"): "admin_finish",
}
UNCHANGING = {route: cases for route, cases in CASES.items() if route not in ENDED_BY_ADMINS}


async def found(who: Tenant, things: Things) -> set[tuple[str, str]]:
    """Routes, of those that end nothing, that know these things when `who` names them."""
    known = set()
    for (method, path), cases in UNCHANGING.items():
        answers = [await who.send(method, case(things, who.things)) for case in cases]
        if not any(map(unknown, answers)):
            known.add((method, path))
        else:
            assert {answer.status_code for answer in answers} <= {404, 422}, path  # 422: that number is used
    return known


def unknown(answer: httpx.Response) -> bool:
    """A checkpoint that is known has no files here to be copied, which is a 404, too."""
    return answer.status_code == 404 and "deleted while it was copied" not in answer.text


@pytest.fixture
async def admin(world: World, alice: Tenant) -> Tenant:
    return await tenant(world, "root", admin=True)


async def test_an_admin_reads_everything_and_uses_nothing_of_others(alice: Tenant, admin: Tenant) -> None:
    before = await state_of(alice)
    assert await found(admin, alice.things) == READ_BY_ADMINS
    assert await state_of(alice) == before
    assert await state_of(replace(admin, things=alice.things)) == before


async def test_an_admin_reads_what_was_made_without_a_key(world: World) -> None:
    session = await world.session()
    model = await world.model(session)
    admin = await tenant(world, "root", admin=True)
    assert (await admin.send("GET", Ask(f"/api/v1/training_runs/{model}"))).status_code == 200


async def test_an_admin_ends_things_of_others_which_is_on_record(alice: Tenant, admin: Tenant) -> None:
    for (method, path), event in ENDED_BY_ADMINS.items():
        (case,) = CASES[method, path]
        answer = await admin.send(method, case(alice.things, admin.things))
        assert answer.status_code == 200, answer.text
        entries = (await admin.send("GET", Ask("/api/v1/audit"))).json()["entries"]
        assert [entry["event_details"]["key"] for entry in entries if entry["event"] == event] == ["root"]


async def test_an_admin_sees_whose_everything_is(alice: Tenant, admin: Tenant) -> None:
    for (method, path), body in LISTS.items():
        rows = listed(await admin.send(method, Ask(path, body)))
        assert len(rows) >= 2, path
        fields = [row for row in rows if isinstance(row, dict)]
        names = {row[key] for row in fields for key in ("owner", "model_owner", "user_name") if key in row}
        assert {name.removeprefix("tml:user:") for name in names} in ({"alice", "root"}, set()), path


async def test_a_search_of_an_admin_can_be_for_its_own_or_somebodys(alice: Tenant, admin: Tenant) -> None:
    async def owners(**owner: object) -> set[str]:
        answer = await admin.send("POST", Ask("/api/v1/sessions/search", {"owner": owner}))
        return {session["owner"] for session in answer.json()["sessions"]}

    assert await owners(type="own") == {"tml:user:root"}
    assert await owners(type="accessible") == {"tml:user:alice", "tml:user:root"}
    assert await owners(type="user", owner_urns=["tml:user:alice", "root"]) == {"tml:user:alice"}


async def test_events_of_keys_are_the_keys_own_and_the_admins(
    alice: Tenant, bob: Tenant, admin: Tenant
) -> None:
    async def keys(who: Tenant) -> list[str | None]:
        entries = (await who.send("GET", Ask("/api/v1/audit"))).json()["entries"]
        return [entry["event_details"]["key"] for entry in entries if entry["event"] == "key_create"]

    assert [await keys(each) for each in (alice, bob)] == [["alice"], ["bob"]]
    assert await keys(admin) == ["alice", "bob", "root"]


async def test_the_owner_without_a_key_is_not_told_of_strangers(world: World) -> None:
    await world.store.write(lambda conn: audit_log.record_key(conn, "login_fail", None, count=1))
    answer = await world.http.get("audit")
    assert answer.json() == {"entries": []}


async def test_nothing_of_anothers_was_changed_by_asking(alice: Tenant, bob: Tenant) -> None:
    before = await state_of(alice)
    for (method, _), cases in CASES.items():
        for case in cases:
            await bob.send(method, case(alice.things, bob.things))
    assert await state_of(alice) == before


async def state_of(one: Tenant) -> list[str]:
    things = one.things
    asks = [
        f"/api/v1/training_runs/{things.model}",
        f"/api/v1/training_runs/{things.model}/checkpoints",
        f"/api/v1/sessions/{things.session}",
        f"/api/v1/samplers/{things.sampler}",
    ]
    return [(await one.send("GET", Ask(path))).text for path in asks]


async def test_lists_tell_of_ones_own_only(world: World, alice: Tenant) -> None:
    """Somebody who has made nothing sees what somebody sees where nobody has made anything."""
    carol_key = await new_user(world, "carol")
    carol = Tenant(world, carol_key, alice.things)
    for (method, path), body in LISTS.items():
        answer = await carol.send(method, Ask(path, body))
        assert answer.status_code == 200, f"{method} {path}: {answer.text}"
        assert alice.things.session not in answer.text, path
        assert not [row for row in listed(answer) if "key_create" not in str(row)], path
        assert listed(await alice.send(method, Ask(path, body))), path


def listed(answer: httpx.Response) -> list[Json]:
    """The one list in an answer."""
    (values,) = [value for value in answer.json().values() if isinstance(value, list)]
    return values


async def test_what_was_made_before_there_were_keys_is_nobodys(world: World) -> None:
    session = await world.session()
    model = await world.model(session)
    carol = await tenant(world, "carol")
    answer = await carol.send("GET", Ask(f"/api/v1/training_runs/{model}"))
    assert answer.status_code == 404


async def test_another_of_ones_own_keys_is_another_owner(world: World, alice: Tenant) -> None:
    second = await new_user(world, "alice-2")
    answer = await replace(alice, key=second).send("GET", Ask(f"/api/v1/training_runs/{alice.things.model}"))
    assert answer.status_code == 404


async def test_a_model_from_anothers_checkpoint_fails_as_from_none(
    world: World, alice: Tenant, bob: Tenant
) -> None:
    """The request is good: it is the promise that fails, with the same words."""
    told = []
    for number, path in enumerate((alice.things.weights, alice.things.unknown().weights)):
        body = {
            "session_id": bob.things.session,
            "model_seq_id": 20 + number,
            "path": path,
            "optimizer": False,
        }
        with as_key(world, bob.key):
            promise = await world.ok("load_weights", body)
            told.append(await world.failure(promise["request_id"]))
    assert told[0].replace(alice.things.session, alice.things.unknown().session) == told[1]


async def test_a_published_checkpoint_is_everybodys_to_read_and_its_owners_to_change(
    world: World, alice: Tenant, bob: Tenant
) -> None:
    run, session = alice.things.model, bob.things.session
    for kind, name in (("weights", "a"), ("sampler_weights", "b")):
        path = f"/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/publish"
        assert (await alice.send("POST", Ask(path))).status_code == 200
    readable = (
        Ask("/api/v1/weights_info", {"tinker_path": alice.things.weights}),
        Ask("/api/v1/create_sampling_session", sampling(session, model_path=alice.things.sampler_weights)),
        Ask(
            "/api/v1/load_weights",
            {"session_id": session, "model_seq_id": 30, "path": alice.things.weights, "optimizer": False},
        ),
    )
    for ask in readable:
        assert (await bob.send("POST", ask)).status_code == 200, ask
    assert {row.model_key for row in await world.queued() if row.kind == "load_weights"}, "not born failed"
    listed = (await bob.send("GET", Ask(f"/api/v1/training_runs/{run}/checkpoints"))).json()
    assert len(listed["checkpoints"]) == 2
    for (method, path), cases in CASES.items():
        if "{checkpoint_id:path}" in path or path.endswith(("/publish", "/ttl")):
            answer = await bob.send(method, cases[0](alice.things, bob.things))
            assert answer.status_code == 404, f"{method} {path}"
    assert (await bob.send("GET", Ask(f"/api/v1/training_runs/{run}"))).status_code == 404


async def test_the_engine_hears_who_asks_from_the_api_alone(world: World, alice: Tenant) -> None:
    """tests/e2e/test_openai.py holds what the engine makes of it."""
    heard = []

    async def handler(request: web.Request) -> web.Response:
        heard.append({name.lower(): value for name, value in request.headers.items()})
        return web.json_response({})

    forged = {"X-Skyrl-Tinker-Owner": "99"}
    paths = ("/oai/api/v1/completions", "/oai/api/v1/chat/completions")
    async with engine(world, *(web.post(path, handler) for path in paths)):
        for path in paths:
            text = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
            body = {"model": alice.things.sampler_weights, **text}
            answer = await alice.send("POST", Ask(path, body, headers=forged))
            assert answer.status_code == 200, answer.text
    assert [each["x-skyrl-tinker-owner"] for each in heard] == ["1", "1"]
    assert not any("x-api-key" in each or "authorization" in each for each in heard)
