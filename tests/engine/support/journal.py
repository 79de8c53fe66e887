"""What a client would have submitted, written straight into the store."""

import itertools
from typing import Any

import orjson

from skyrl_tinker.domain.ids import FutureStatus, ModelId, ModelKey, ModelState, RequestKind, SessionId
from skyrl_tinker.domain.values import AdamParams, Failure, LoraSpec
from skyrl_tinker.protocol.protobuf import pass_requests
from skyrl_tinker.protocol.stored_requests import CreateModelBody, OptimStepBody
from skyrl_tinker.store import model_records, session_records
from skyrl_tinker.store.futures import finish, outcomes, training_submission
from skyrl_tinker.store.futures.outcomes import Outcome
from skyrl_tinker.store.futures.record import Accepted
from skyrl_tinker.store.futures.training_submission import Creation, Submission
from skyrl_tinker.store.model_records import ModelRow, NewModel
from skyrl_tinker.store.store import Store
from tests.support.reads import reading

_digests = itertools.count()


def _digest() -> bytes:
    return str(next(_digests)).encode()


async def heartbeat(store: Store, session: SessionId) -> None:
    """Raises the error that the client gets."""
    for error in (
        await store.write(lambda conn: session_records.heartbeat(conn, [(None, session)]))
    ).values():
        raise error


async def new_session(store: Store) -> SessionId:
    return await store.write(lambda conn: session_records.create(conn, owner=None, sdk_version="0.38.0"))


async def submit_create(
    store: Store, session: SessionId, number: int = 0, spec: LoraSpec | None = None
) -> Accepted:
    new = NewModel(session, number, "tiny", spec or LoraSpec(8, 1), {"type": "adamw"}, {})
    body = CreateModelBody().to_bytes()
    return await store.write(
        lambda conn: training_submission.submit_create(
            conn, Creation(RequestKind.CREATE_MODEL, new, _digest(), body), owner=None
        )
    )


async def ready_model(store: Store) -> ModelId:
    """Create a model as if there were an engine."""
    accepted = await submit_create(store, await new_session(store))
    assert accepted.model_id is not None
    key, created = await key_of(store, accepted.model_id), await outcome(store, accepted)
    await store.write(lambda conn: model_records.set_state(conn, key, ModelState.READY))
    await store.write(lambda conn: finish.succeed(conn, created.future_id, "application/json", b"{}"))
    return accepted.model_id


async def submit_save(store: Store, model: ModelId) -> tuple[ModelKey, int]:
    """Queue a save; returns the keys of the model and of its future, which names the save's directory."""
    saved = await submit(store, model, 1, RequestKind.SAVE_WEIGHTS)
    return await key_of(store, model), (await outcome(store, saved)).future_id


async def submit(
    store: Store,
    model: ModelId,
    seq_id: int,
    kind: RequestKind,
    body: bytes = b"",
    failure: Failure | None = None,
) -> Accepted:
    return await store.write(
        lambda conn: training_submission.submit_training(
            conn, Submission(kind, model, seq_id, _digest(), body, failure), owner=None
        )
    )


async def submit_pass(store: Store, model: ModelId, seq_id: int, *, forward_only: bool = False) -> Accepted:
    datum = {
        "model_input": {"chunks": [{"tokens": [1, 2, 3]}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": [2, 3, 4], "dtype": "int64"},
            "weights": {"data": [1.0, 1.0, 1.0], "dtype": "float32"},
        },
    }
    field = "forward_input" if forward_only else "forward_backward_input"
    payload: dict[str, Any] = {
        "model_id": model,
        "seq_id": seq_id,
        field: {"data": [datum], "loss_fn": "cross_entropy"},
    }
    kind = RequestKind.FORWARD if forward_only else RequestKind.FORWARD_BACKWARD
    body = pass_requests.canonical(pass_requests.decode_forward_backward_json(payload))
    return await submit(store, model, seq_id, kind, body)


async def submit_step(
    store: Store, model: ModelId, seq_id: int, params: AdamParams | None = None
) -> Accepted:
    body = OptimStepBody(params or AdamParams()).to_bytes()
    return await submit(store, model, seq_id, RequestKind.OPTIM_STEP, body)


async def outcome(store: Store, accepted: Accepted) -> Outcome:
    with reading(store) as conn:
        found = outcomes.find(conn, accepted.request_id)
    assert found is not None
    return found


async def error_of(store: Store, accepted: Accepted) -> Failure:
    found = await outcome(store, accepted)
    assert found.status is FutureStatus.FAILED
    value = orjson.loads(found.body or b"")
    return Failure(value["error"], value["category"])


async def model_of(store: Store, model: ModelId) -> ModelRow:
    with reading(store) as conn:
        row = model_records.by_id(conn, model)
    assert row is not None
    return row


async def key_of(store: Store, model: ModelId) -> ModelKey:
    return (await model_of(store, model)).key
