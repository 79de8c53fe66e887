"""No key, token or signature stands in a log, an error or the database, wherever a client puts it."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import astuple
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from skyrl_tinker.config import Settings
from skyrl_tinker.store import api_keys
from skyrl_tinker.store.cluster import signing_secrets
from skyrl_tinker.store.store import write_once
from tests.api.security.test_tenancy import CASES, Things, create
from tests.api.support.process import Api, launched_on
from tests.api.support.world import write_facts


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with launched_on(tmp_path / "home", write_facts, tmp_path / "api.log") as (made, _):
        yield made


class Client:
    """Somebody who puts secrets everywhere. `told`: bodies of errors, and of requests that failed."""

    def __init__(self, api: Api, key: str) -> None:
        self._http = httpx.Client(base_url=api.url, headers={"X-API-Key": key})
        self.told: list[str] = []

    def ask(self, method: str, path: str, **request: object) -> httpx.Response:
        answer = self._http.request(method, path, **request)  # type: ignore[arg-type]
        if answer.status_code >= 400:
            self.told.append(answer.text)
        return answer

    def failed(self, path: str, body: object) -> None:
        """Send a request that is accepted, and read why it failed."""
        promise = self.ask("POST", f"/api/v1/{path}", json=body).json()
        answer = self.ask("POST", "/api/v1/retrieve_future", json={"request_id": promise["request_id"]})
        assert answer.json()["category"] == "user", answer.text
        self.told.append(answer.text)


def test_no_secret_is_repeated_or_kept(api: Api, tmp_path: Path) -> None:
    settings = api.settings
    old = write_once(settings.store_url, lambda conn: api_keys.create(conn, "alice", admin=True))
    key = write_once(settings.store_url, lambda conn: api_keys.rotate(conn, "alice", 3600))
    revoked = write_once(settings.store_url, lambda conn: api_keys.create(conn, "bob"))
    write_once(settings.store_url, lambda conn: api_keys.revoke(conn, "bob"))
    with httpx.Client(base_url=api.url, headers={"X-API-Key": revoked}) as http:
        while http.get("/api/v1/sessions").status_code != 401:
            pass  # until the server has heard of the keys
    client = Client(api, key)
    token = client.ask("POST", "/api/v1/auth/token").json()["jwt"]
    session = client.ask("POST", "/api/v1/create_session", json={}).json()["session_id"]
    url = urlsplit(client.ask("GET", f"/api/v1/sessions/{session}/trace_export").json()["url"])
    (signature,) = parse_qs(url.query)["signature"]
    model = client.ask("POST", "/api/v1/create_model", json=create(session)).json()["model_id"]
    own = Things(session, model, f"{session}:sample:0", "0" * 32, f"tinker://{model}/weights/a")

    for secret in (key, old, revoked, key + "x", token, token[:-5]):
        put_everywhere(client, own, secret)
        for header in (
            {"X-API-Key": secret},
            {"Authorization": f"Bearer {secret}", "X-API-Key": ""},
            {"Authorization": f"Basic {secret}", "X-API-Key": ""},
        ):
            client.ask("GET", "/api/v1/sessions", headers=header)
        client.ask("GET", f"{url.path}?expires=9&signature={secret}")
    client.ask("GET", f"{url.path}x?{url.query}")
    client.ask("GET", f"{url.path}/x?{url.query}")
    client.ask("GET", f"{url.path}?{url.query}")
    api.stop()

    everything = {
        "errors": "\n".join(client.told).encode(),
        "log": (tmp_path / "api.log").read_bytes(),
        **dict(columns(settings)),
    }
    assert len(client.told) > 250
    assert b"refused" in everything["log"]
    values = {*json.loads((settings.root / signing_secrets.FILE).read_text()).values(), signature}
    values |= {each.removeprefix("tml-") for each in (old, key, revoked)} | {*token.split(".")[1:]}
    found = {(place, text) for place, held in everything.items() for text in values if text.encode() in held}
    assert not sorted(found)


def put_everywhere(client: Client, own: Things, secret: str) -> None:
    """In place of every id that a route takes, in paths, in queries, and where a value is wrong."""
    wrong = Things(*[secret] * len(astuple(own)))
    for (method, _), cases in CASES.items():
        for case in cases:
            ask = case(wrong, own)
            client.ask(method, ask.path, json=ask.json, content=ask.content, headers=dict(ask.headers))
    client.ask("GET", f"/api/v1/{secret}")
    client.ask("POST", f"/download/{secret}")
    client.ask("GET", "/api/v1/sessions", params={"limit": secret})
    client.ask("GET", "/api/v1/audit", params={"day": secret, "api_key": secret})
    client.ask("POST", "/api/v1/create_session", content=f'{{"sdk_version": {secret}}}')
    client.ask("POST", "/api/v1/create_session", json={"tags": {"a": secret}})
    client.ask("POST", "/oai/api/v1/completions", json={"model": [secret], "prompt": "a"})
    number = len(client.told)
    client.failed("create_model", {**create(own.session, 1000 + number), "base_model": secret})
    client.failed(
        "load_weights",
        {"session_id": own.session, "model_seq_id": 2000 + number, "path": secret, "optimizer": False},
    )


def columns(settings: Settings) -> Iterator[tuple[str, bytes]]:
    """All that each column of the database holds."""
    with closing(sqlite3.connect(settings.root / "skyrl-tinker.db")) as raw:
        for (table,) in raw.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            for _, column, *_ in raw.execute(f"PRAGMA table_info({table})").fetchall():
                held = [value for (value,) in raw.execute(f"SELECT {column} FROM {table}")]
                parts = [each if isinstance(each, bytes) else str(each).encode() for each in held]
                yield f"{table}.{column}", b"\n".join(parts)
