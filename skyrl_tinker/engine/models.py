"""Creating, loading and saving models: what the trainer driver runs one at a time."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from skyrl_tinker.engine.answers import Outcome, json_answer
from skyrl_tinker.errors import NotFoundError, UserError
from skyrl_tinker.store import checkpoints, models
from skyrl_tinker.store.checkpoints import CheckpointRow, NewCheckpoint
from skyrl_tinker.store.models import ModelRow
from skyrl_tinker.store.store import Store
from skyrl_tinker.store.writer import Op
from skyrl_tinker.training.group import TrainerGroup
from skyrl_tinker.wire import paths
from skyrl_tinker.wire.bodies import CreateViaLoadBody, LoadWeightsBody, SaveWeightsBody
from skyrl_tinker.wire.ids import CheckpointKind, ModelState
from skyrl_tinker.wire.paths import TinkerPath
from skyrl_tinker.wire.values import BaseModelFacts


@dataclass(frozen=True, slots=True)
class Finished:
    """A result and what must be committed with it."""

    outcome: Outcome
    also: tuple[Op[Any], ...] = ()


class Models:
    """The workers' models and their training checkpoints. Every method raises SkyrlTinkerError on failure."""

    def __init__(
        self,
        store: Store,
        trainer: TrainerGroup,
        facts: BaseModelFacts,
        checkpoint_root: Path,
        max_lora_rank: int,
    ) -> None:
        self._store = store
        self._trainer = trainer
        self._facts = facts
        self._root = checkpoint_root
        self._max_lora_rank = max_lora_rank

    async def create(self, model: ModelRow) -> Finished:
        await self._trainer.create_model(model.key, model.spec)
        answer = json_answer({"model_id": model.model_id, "type": "create_model"})
        return Finished(answer, (_ready(model),))

    async def create_from(self, model: ModelRow, body: CreateViaLoadBody) -> Finished:
        """A new model in the shape and with the weights of a checkpoint."""
        self._require_served(body.base_model)
        checkpoint = await self._training_state(body.path, body.optimizer)
        await self._trainer.create_model(model.key, checkpoint.spec)
        try:
            await self._trainer.load_state(model.key, checkpoint.directory, optimizer=body.optimizer)
        except Exception:
            await self._trainer.release(model.key)
            raise
        config = body.optimizer_config if body.optimizer_config is not None else checkpoint.optimizer_config
        answer = json_answer({"path": body.path, "model_id": model.model_id, "type": "load_weights"})
        return Finished(answer, (_becomes(model, checkpoint, config), _ready(model)))

    async def load(self, model: ModelRow, body: LoadWeightsBody) -> Finished:
        """In place; gradients accumulated so far are gone."""
        checkpoint = await self._training_state(body.path, body.optimizer)
        await self._trainer.load_state(model.key, checkpoint.directory, optimizer=body.optimizer)
        return Finished(json_answer({"path": body.path, "model_id": model.model_id, "type": "load_weights"}))

    async def save(self, model: ModelRow, body: SaveWeightsBody, request: int) -> Finished:
        """Write weights and optimizer state; `request` tells directories of one name apart."""
        path = TinkerPath(model.model_id, CheckpointKind.WEIGHTS, body.name)
        if not body.overwrite:
            await require_free(self._store, path)
        directory = free_directory(self._root, model, path, request)
        size = await self._trainer.save_state(model.key, str(directory), optimizer=True)
        new = NewCheckpoint(
            model_key=model.key,
            kind=path.kind,
            name=path.name,
            directory=str(directory),
            base_model=model.base_model,
            spec=model.spec,
            size_bytes=size,
            has_optimizer=True,
            optimizer_config=model.optimizer_config,
            user_metadata=body.user_metadata,
            expires_at=expiry(body.ttl_seconds),
        )
        answer = json_answer({"path": str(path), "type": "save_weights"})
        return Finished(answer, (_recorded(new, replace=body.overwrite),))

    async def _training_state(self, path: str, optimizer: bool) -> CheckpointRow:
        wanted = paths.parse(path)
        async with self._store.read() as conn:
            found = await checkpoints.find(conn, wanted.model_id, wanted.kind, wanted.name)
        if found is None:
            raise NotFoundError(f"no checkpoint {path}: it was never saved, or it is deleted or expired")
        if found.kind is not CheckpointKind.WEIGHTS:
            raise UserError(f"{path} has weights for sampling only: load one that save_state made")
        if optimizer and not found.has_optimizer:
            raise UserError(f"{path} has no optimizer state: load it with optimizer=false")
        self._require_served(found.base_model)
        if found.spec.rank > self._max_lora_rank:
            raise UserError(f"{path} has LoRA rank {found.spec.rank} > max_lora_rank {self._max_lora_rank}")
        return found

    def _require_served(self, base_model: str | None) -> None:
        if base_model is not None and base_model not in self._facts.names:
            raise UserError(f"base_model is {base_model!r}, expected one of {', '.join(self._facts.names)}")


def free_directory(root: Path, model: ModelRow, path: TinkerPath, request: int) -> Path:
    """Where a checkpoint goes. A directory is never written twice: an overwritten one may still be read."""
    directory = root / str(model.key) / path.kind / path.name
    return directory.with_name(f"{path.name}~{request}") if directory.exists() else directory


async def require_free(store: Store, path: TinkerPath) -> None:
    async with store.read() as conn:
        taken = await checkpoints.find(conn, path.model_id, path.kind, path.name)
    if taken is not None:
        raise UserError(f"checkpoint {path} exists: choose another name, delete it, or save with overwrite")


def expiry(ttl_seconds: int | None) -> float | None:
    return None if ttl_seconds is None else time.time() + ttl_seconds


def _ready(model: ModelRow) -> Op[None]:
    async def op(conn: AsyncConnection) -> None:
        await models.set_state(conn, model.key, ModelState.READY)

    return op


def _becomes(model: ModelRow, checkpoint: CheckpointRow, optimizer_config: Mapping[str, Any]) -> Op[None]:
    async def op(conn: AsyncConnection) -> None:
        await models.set_spec(conn, model.key, checkpoint.spec, checkpoint.base_model, optimizer_config)

    return op


def _recorded(new: NewCheckpoint, *, replace: bool) -> Op[None]:
    async def op(conn: AsyncConnection) -> None:
        await checkpoints.add(conn, new, replace=replace)

    return op
