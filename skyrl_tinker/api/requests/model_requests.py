"""create_model and load_weights without model_id. An invalid request is stored as a failed model."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection

from skyrl_tinker.api.base_limits import BaseLimits
from skyrl_tinker.domain import tinker_path
from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.ids import ModelId, OwnerId, Reach, RequestKind, SessionId
from skyrl_tinker.domain.state_size import state_bytes
from skyrl_tinker.domain.values import Failure, LoraSpec
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.schemas.training import CreateModelRequest, CreateViaLoadRequest
from skyrl_tinker.protocol.stored_requests import CreateModelBody, payload_digest
from skyrl_tinker.protocol.validation.key_limits import KeyLimits
from skyrl_tinker.protocol.validation.models import validate_lora_config, validate_optimizer_config
from skyrl_tinker.protocol.validation.steps import validate_create_via_load
from skyrl_tinker.redaction import redact
from skyrl_tinker.store import checkpoint_records
from skyrl_tinker.store.checkpoint_records import CheckpointRow
from skyrl_tinker.store.futures import training_submission
from skyrl_tinker.store.futures.record import Accepted
from skyrl_tinker.store.futures.training_submission import Creation
from skyrl_tinker.store.model_records import DEFAULT_OPTIMIZER, NewModel
from skyrl_tinker.store.reports import holdings

_NO_SPEC = LoraSpec(rank=0, seed=0)  # for a model that failed


def submit(
    conn: Connection, new: Creation, owner: OwnerId | None, limits: KeyLimits, bases: Bases
) -> Accepted:
    """Submit a model. Raises KeyLimitError for one too many; then nothing is stored."""

    def admit(conn: Connection) -> None:
        if limits.models is not None:
            limits.require_models(holdings.sessions_in_training(conn, owner))
        if limits.resident_gb is not None:
            facts = bases.require(new.model.base_model)
            more = state_bytes(facts, new.model.spec, new.model.optimizer_config["type"])
            limits.require_resident(holdings.resident_bytes(conn, owner, bases), more)

    return training_submission.submit_create(conn, new, owner=owner, admit=admit)


def new_model(message: CreateModelRequest, payload: Mapping[str, Any], limits: BaseLimits) -> Creation:
    """Check create_model."""
    digest = payload_digest(RequestKind.CREATE_MODEL, payload)
    try:
        facts = limits.bases.require_trainable(message.base_model)
        spec = validate_lora_config(message.lora_config, limits.of(facts))
        model = _model(message, facts.name, spec, validate_optimizer_config(message.optimizer_config))
    except UserError as error:
        return _failed(RequestKind.CREATE_MODEL, _model(message, message.base_model), digest, error)
    return Creation(RequestKind.CREATE_MODEL, model, digest, CreateModelBody().to_bytes())


def model_from_checkpoint(
    conn: Connection,
    owner: OwnerId | None,
    message: CreateViaLoadRequest,
    payload: Mapping[str, Any],
    limits: BaseLimits,
) -> Creation:
    """Check load_weights without a model_id. The checkpoint determines base model and LoRA config."""
    digest, bases, named = payload_digest(RequestKind.LOAD_WEIGHTS, payload), limits.bases, message.base_model
    try:
        body = validate_create_via_load(message, bases)
        row = find_checkpoint(conn, owner, message.path)
        expected = bases if named is None else Bases((bases.require(named),))
        facts = bases.require_trainable(checkpoint_records.require_base(row, expected).name)
        most = limits.of(facts).max_lora_rank
        checkpoint_records.require_resumable(row, optimizer=message.optimizer, max_lora_rank=most)
    except UserError as error:
        model = _model(message, named or bases.first.name)
        return _failed(RequestKind.LOAD_WEIGHTS, model, digest, error)
    optimizer = row.optimizer_config if message.optimizer else body.optimizer_config
    model = _model(message, facts.name, row.spec, optimizer)
    return Creation(RequestKind.LOAD_WEIGHTS, model, digest, body.to_bytes())


def find_checkpoint(conn: Connection, reach: Reach, path: str) -> CheckpointRow:
    """Return a checkpoint that the caller sees, or a published one.

    Raises UserError for a malformed path, NotFoundError when there is none.
    """
    parsed = tinker_path.parse(path)
    row = checkpoint_records.find(conn, reach, parsed.model_id, parsed.kind, parsed.name)
    if row is None:
        raise checkpoint_records.not_found(path)
    return row


def find_own_checkpoint(conn: Connection, reach: Reach, run: str, checkpoint_id: str) -> CheckpointRow:
    """Return the caller's checkpoint `<kind>/<name>`, with an admin key anybody's.

    Raises UserError (malformed id), NotFoundError.
    """
    path = tinker_path.parse_checkpoint_id(ModelId(run), checkpoint_id)
    return checkpoint_records.require_within(conn, reach, path.model_id, path.kind, path.name)


def _model(
    message: CreateModelRequest | CreateViaLoadRequest,
    base_model: str,
    spec: LoraSpec = _NO_SPEC,
    optimizer_config: Mapping[str, Any] | None = None,
) -> NewModel:
    return NewModel(
        session_id=SessionId(message.session_id),
        model_seq_id=message.model_seq_id,
        base_model=base_model,
        spec=spec,
        optimizer_config=optimizer_config or DEFAULT_OPTIMIZER,
        user_metadata=message.user_metadata,
    )


def _failed(kind: RequestKind, model: NewModel, digest: bytes, error: UserError) -> Creation:
    named = replace(model, base_model=redact(model.base_model))  # by the client, perhaps by mistake
    return Creation(kind, named, digest, failure=Failure(str(error), error.category))
