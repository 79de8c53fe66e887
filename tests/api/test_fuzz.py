"""Whatever comes, the API answers it, and never with a fault of its own. A real process on a real store."""

import re
import ssl
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import hypothesis
import psutil
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis import Case, GenerationMode

from skyrl_tinker.store import api_keys, server_state
from skyrl_tinker.store.store import Store
from tests.api.support import fuzzing
from tests.api.support.process import Api, launched_on
from tests.api.support.world import BASE, Json, write_facts
from tests.support.certificates import write_certificate

SEED = 20260
NO_ENGINE = ("/readyz", "/oai/api/v1/completions", "/oai/api/v1/chat/completions")
"""There is none behind this API: 503 is right."""
LONG = hypothesis.settings.get_current_profile_name() == "long"
PASSES = 10_000 if LONG else 500
PROMISES = 1_000 if LONG else 100
REFUSED = re.compile("external_weights_upload|console/admin/bases")
"""Parts of the names of routes that take nothing, the last one as no base model is on demand here."""
CASES = {GenerationMode.POSITIVE: 20 if LONG else 4, GenerationMode.NEGATIVE: 10 if LONG else 2}
ENDS = ("/finish", "/unload_model", "/auth/apikey/me")
"""Comes last, in this order: what is made below would be gone, and in the end the key."""


HOST = "tinker.example"


@dataclass(frozen=True)
class Variant:
    """How a server is set up. `locked`: it has a key, which every request brings. `tls`: a certificate.

    `admin`: the key sees what others have.
    """

    locked: bool = False
    admin: bool = False
    tls: bool = False
    settings: Json = field(default_factory=dict)


VARIANTS = {
    "as installed": Variant(),
    "with keys and behind a proxy": Variant(
        locked=True,
        settings={
            "bodies": {"expanded_mb": 2, "held_mb": 1, "wire_mb": 1},
            "sdk": {"custom_loss_server_side": False, "sample_use_retrieve_futures": True},
            "trust_forwarded": True,
        },
    ),
    "with limits of keys and of clients": Variant(
        locked=True,
        admin=True,
        settings={
            "bodies": {"json_mb": 1},
            "keys": {
                "backlog": 20_000,
                "metadata_kb": 0.5,
                "models": 1000,
                "requests_per_s": 10_000.0,
                "resident_gb": 1.0,
                "sessions": 1000,
                "stop_kb": 0.1,
                "stored_gb": 0.001,
            },
            "sdk": {"fwdbwd_max_chunk_bytes_count": 1, "proto_compress_fwdbwd": True},
        },
    ),
    "with a certificate and another name": Variant(
        tls=True,
        settings={
            "allowed_hosts": (HOST,),
            "connections": {"total": 20, "per_address": 10},
            "sampled_logprobs": "processed",
        },
    ),
}


@dataclass(frozen=True)
class Target:
    """`options`: of every request. `ids`: what exists, by the names that fields and parameters have."""

    api: Api
    http: httpx.Client
    options: Json
    ids: Json

    @property
    def memory_mb(self) -> float:
        return float(psutil.Process(self.api.process.pid).memory_info().rss) / 2**20


OFTEN = ("as installed", "with keys and behind a proxy")
PARAMS = [pytest.param(name, marks=() if name in OFTEN else pytest.mark.long) for name in VARIANTS]


@pytest.fixture(scope="module", params=PARAMS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    variant = VARIANTS[request.param]
    directory = tmp_path_factory.mktemp("fuzz")
    cert, cert_key = write_certificate(directory) if variant.tls else (None, None)
    changes = {"timeouts": {"long_poll_s": 0.01}, "tls_cert": cert, "tls_key": cert_key, **variant.settings}
    with launched_on(directory / "home", partial(_ready, variant=variant), **changes) as (api, key):
        headers = {**({"X-API-Key": key} if key else {}), **({"Host": HOST} if variant.tls else {})}
        verify = ssl.create_default_context(cafile=cert)
        with httpx.Client(base_url=f"{api.url}/api/v1", timeout=60, headers=headers, verify=verify) as http:
            options = {"headers": headers, "verify": str(cert) if cert else True}
            yield Target(api, http, options, _made(http))


async def _ready(store: Store, variant: Variant) -> str:
    """Write what an engine would; return a key, or "" for a server without keys."""
    await write_facts(store)
    engine = {"state": "ready", "detail": "", "since": 0.0}
    await store.write(lambda conn: server_state.put(conn, "engine", engine))
    if variant.locked:
        await store.write(lambda conn: api_keys.create(conn, "fuzz", admin=variant.admin))
        return await store.write(lambda conn: api_keys.rotate(conn, "fuzz", 0))
    return ""


def _made(http: httpx.Client) -> Json:
    def post(path: str, **body: Any) -> Json:
        made: Json = http.post(path, json=body).raise_for_status().json()
        return made

    session = post("create_session")["session_id"]
    model = post("create_model", session_id=session, model_seq_id=0, base_model=BASE)
    sampler = post("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=BASE)
    return {
        "session_id": session,
        "model_id": model["model_id"],
        "run": model["model_id"],
        "request_id": model["request_id"],
        "base_model": BASE,
        "model": BASE,
        **sampler,
        "sampler_id": sampler["sampling_session_id"],
        "tinker_path": f"tinker://{model['model_id']}/weights/a",
        "source_path": f"tinker://{model['model_id']}/weights/a",
        "checkpoint_id": "weights/a",
        "kind": "weights",
        "starting_on": "2026-07-13T00:00:00Z",
        "ending_before": "2026-07-14T00:00:00Z",
    }


def test_damaged_protobuf_is_a_promise_or_a_refusal_and_takes_no_memory(target: Target) -> None:
    before = target.memory_mb
    statuses = fuzzing.send(target.http, _made(target.http)["model_id"], SEED, PASSES)
    assert target.memory_mb < before + 100
    assert set(statuses) >= {200, 400, 404, 422}, statuses
    assert statuses[200] > PASSES / 4
    assert target.http.get("healthz").status_code == 200


def test_what_was_promised_is_told(target: Target) -> None:
    """A wrong pass is a failed promise, a right one waits for the engine."""
    source = fuzzing.bodies(_made(target.http)["model_id"], SEED + 1)
    told: Counter[int] = Counter()
    for _ in range(PROMISES):
        body, headers = next(source)
        answer = target.http.post("forward_backward", content=body, headers=headers)
        if answer.status_code == 200:
            told[target.http.post("retrieve_future", json=answer.json()).status_code] += 1
    assert set(told) <= {200, 408}
    assert min(told[200], told[408]) > 0


def test_what_the_openapi_document_allows_and_what_it_forbids_is_never_a_fault(target: Target) -> None:
    document = target.http.get("openapi.json").json()
    statuses: dict[str, Counter[int]] = {}
    operations = [each.ok() for each in schemathesis.openapi.from_dict(document).get_all_operations()]
    for found in sorted(operations, key=_end):
        seen = statuses.setdefault(f"{found.method} {found.path}", Counter())
        for mode, count in CASES.items():
            if mode is GenerationMode.POSITIVE or _can_be_wrong(found):
                _try(target, found.as_strategy(generation_mode=mode), count, seen)
    with_a_body = {name for name in statuses if name.startswith(("post", "put")) and not REFUSED.search(name)}
    past_parsing = {name for name in with_a_body if set(statuses[name]) - {400}}
    assert len(past_parsing) > 0.9 * len(with_a_body), with_a_body - past_parsing
    assert sum(sum(seen.values()) for seen in statuses.values()) > 300
    assert target.http.get("healthz").status_code == 200


def _can_be_wrong(operation: Any) -> bool:
    """Of texts in a path nothing can be wrong, which hypothesis takes 500 examples to find out."""
    texts = all(each.definition["schema"]["type"] == "string" for each in operation.path_parameters)
    return bool(operation.body or operation.query or operation.headers or not texts)


def _end(operation: Any) -> int:
    """Return the place among ENDS, 0 for an operation that ends nothing."""
    return next((place for place, end in enumerate(ENDS, 1) if operation.path.endswith(end)), 0)


def _try(target: Target, cases: Any, count: int, seen: Counter[int]) -> None:
    @hypothesis.settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(cases)
    def answered(case: Case) -> None:
        if sum(seen.values()) % 3:
            _name_what_exists(case, target.ids)
        answer = case.call(base_url=target.api.url, **target.options)
        seen[answer.status_code] += 1
        assert answer.status_code < 500 or (case.path in NO_ENGINE and answer.status_code == 503), answer.text
        if answer.status_code >= 400 and case.method != "HEAD":
            assert int(answer.headers["content-length"][0]) > 0

    answered()


def _name_what_exists(case: Case, ids: Json) -> None:
    """Use real ids in two of three requests: else nearly all would ask for unknown objects."""
    for given in (case.body, case.path_parameters, case.query):
        if isinstance(given, dict):
            given.update({name: ids[name] for name in given if name in ids})
    if "name" in case.path_parameters:  # of a checkpoint
        case.path_parameters["name"] = "a"
