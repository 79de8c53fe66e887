"""Models to be: made anew, or from a checkpoint. A wrong wish becomes a model that is born failed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from skyrl_tinker.domain import tinker_path
from skyrl_tinker.domain.ids import CheckpointKind, OwnerId, RequestKind, SessionId
from skyrl_tinker.domain.values import Failure, LoraSpec
from skyrl_tinker.errors import NotFoundError, UserError
from skyrl_tinker.protocol.schemas import CreateModelRequest, CreateViaLoadRequest
from skyrl_tinker.protocol.stored_requests import CreateModelBody, payload_digest
from skyrl_tinker.protocol.validation import (
    Limits,
    validate_base_model,
    validate_create_via_load,
    validate_lora_config,
    validate_optimizer_config,
)
from skyrl_tinker.store import checkpoint_records
from skyrl_tinker.store.checkpoint_records import CheckpointRow
from skyrl_tinker.store.futures import training_submission
from skyrl_tinker.store.futures.record import Accepted
from skyrl_tinker.store.model_records import NewModel

_ADAMW = {"type": "adamw"}
_NO_SPEC = LoraSpec(rank=0, seed=0)  # of a model that will never be


@dataclass(frozen=True, slots=True)
class Creation:
    """A model to be made by the engine, or with `failure` one that never will be."""

    kind: RequestKind
    model: NewModel
    digest: bytes
    body: bytes = b""
    failure: Failure | None = None

    def submit(self, conn: Connection, owner: OwnerId | None) -> Accepted:
        return training_submission.submit_create(
            conn,
            self.kind,
            self.model,
            owner=owner,
            body=self.body,
            digest=self.digest,
            failure=self.failure,
        )


def anew(wanted: CreateModelRequest, payload: Mapping[str, Any], limits: Limits) -> Creation:
    """create_model."""
    digest = payload_digest(RequestKind.CREATE_MODEL, payload)
    try:
        validate_base_model(wanted.base_model, limits)
        spec = validate_lora_config(wanted.lora_config, limits)
        model = _model(wanted, wanted.base_model, spec, validate_optimizer_config(wanted.optimizer_config))
    except UserError as error:
        return _failed(RequestKind.CREATE_MODEL, _model(wanted, wanted.base_model), digest, error)
    return Creation(RequestKind.CREATE_MODEL, model, digest, CreateModelBody().to_bytes())


def from_checkpoint(
    conn: Connection,
    owner: OwnerId | None,
    wanted: CreateViaLoadRequest,
    payload: Mapping[str, Any],
    limits: Limits,
) -> Creation:
    """load_weights without a model_id. The checkpoint tells base model and LoRA config."""
    digest = payload_digest(RequestKind.LOAD_WEIGHTS, payload)
    try:
        body = validate_create_via_load(wanted, limits)
        row = find_checkpoint(conn, owner, wanted.path)
        _check_resumable(row, wanted.optimizer, limits)
    except UserError as error:
        base_model = wanted.base_model or limits.base_models[0]
        return _failed(RequestKind.LOAD_WEIGHTS, _model(wanted, base_model), digest, error)
    optimizer = row.optimizer_config if wanted.optimizer else body.optimizer_config
    model = _model(wanted, wanted.base_model or row.base_model, row.spec, optimizer)
    return Creation(RequestKind.LOAD_WEIGHTS, model, digest, body.to_bytes())


def find_checkpoint(conn: Connection, owner: OwnerId | None, path: str) -> CheckpointRow:
    """This owner's, or a published one. UserError for a malformed path, NotFoundError when there is none."""
    where = tinker_path.parse(path)
    row = checkpoint_records.find(conn, owner, where.model_id, where.kind, where.name)
    if row is None:
        raise NotFoundError(f"path: found {path!r}, expected a checkpoint that exists and has not expired")
    return row


def _check_resumable(row: CheckpointRow, optimizer: bool, limits: Limits) -> None:
    if row.kind is not CheckpointKind.WEIGHTS:
        raise UserError(
            f"path: found a checkpoint of kind {row.kind}, expected weights (made by save_weights)"
        )
    if row.base_model not in limits.base_models:
        raise UserError(
            f"path: found a checkpoint of base model {row.base_model!r}, "
            f"expected one of {', '.join(limits.base_models)}"
        )
    if row.spec.rank > limits.max_lora_rank:
        raise UserError(
            f"path: found a checkpoint of LoRA rank {row.spec.rank}, "
            f"expected at most {limits.max_lora_rank} (the server's setting max_lora_rank)"
        )
    if optimizer and not row.has_optimizer:
        raise UserError(
            "optimizer: found true, expected false: the checkpoint holds no optimizer state "
            "(create_training_client_from_state loads it)"
        )


def _model(
    wanted: CreateModelRequest | CreateViaLoadRequest,
    base_model: str,
    spec: LoraSpec = _NO_SPEC,
    optimizer_config: Mapping[str, Any] | None = None,
) -> NewModel:
    return NewModel(
        session_id=SessionId(wanted.session_id),
        model_seq_id=wanted.model_seq_id,
        base_model=base_model,
        spec=spec,
        optimizer_config=optimizer_config or _ADAMW,
        user_metadata=wanted.user_metadata,
    )


def _failed(kind: RequestKind, model: NewModel, digest: bytes, error: UserError) -> Creation:
    return Creation(kind, model, digest, failure=Failure(str(error), error.category))
