"""Creating models and loading into them: what the trainer driver runs one at a time."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from skyrl_tinker.domain import tinker_path
from skyrl_tinker.domain.ids import CheckpointKind, ModelState
from skyrl_tinker.domain.values import BaseModelFacts, OptimizerFamily
from skyrl_tinker.engine.outbox import Outcome, json_answer
from skyrl_tinker.engine.saves.training_saves import Saver
from skyrl_tinker.errors import NotFoundError, UserError
from skyrl_tinker.protocol.stored_requests import CreateViaLoadBody, LoadWeightsBody
from skyrl_tinker.store import checkpoint_records, model_records, session_records
from skyrl_tinker.store.checkpoint_records import CheckpointRow
from skyrl_tinker.store.database.group_commit import Op
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.store import Store
from skyrl_tinker.training.trainer_group import TrainerGroup


@dataclass(frozen=True, slots=True)
class Finished:
    """A result and what must be committed with it."""

    outcome: Outcome
    also: tuple[Op[Any], ...] = ()


class ModelCreation:
    """The workers' models, made and loaded. Every method raises SkyrlTinkerError on failure."""

    def __init__(
        self,
        store: Store,
        trainer: TrainerGroup,
        facts: BaseModelFacts,
        saver: Saver,
        max_lora_rank: int,
    ) -> None:
        self._store = store
        self._trainer = trainer
        self._facts = facts
        self._saver = saver
        self._max_lora_rank = max_lora_rank
        self._reading: str | None = None

    def reads(self, directory: str) -> bool:
        """Whether a checkpoint's directory is being loaded."""
        return directory == self._reading

    async def create(self, model: ModelRow) -> Finished:
        await self._trainer.create_model(model.key, model.spec, _family(model.optimizer_config))
        answer = json_answer({"model_id": model.model_id, "type": "create_model"})
        return Finished(answer, (_ready(model),))

    async def create_from(self, model: ModelRow, body: CreateViaLoadBody) -> Finished:
        """A new model in the shape and with the weights of a checkpoint."""
        self._require_served(body.base_model)
        async with self._training_state(model, body.path, body.optimizer) as checkpoint:
            config = checkpoint.optimizer_config if body.optimizer else body.optimizer_config
            await self._trainer.create_model(model.key, checkpoint.spec, _family(config))
            try:
                await self._trainer.load_state(model.key, checkpoint.directory, optimizer=body.optimizer)
            except Exception:  # whatever it was: without its weights the new model is nobody's
                await self._trainer.release(model.key)
                raise
        answer = json_answer({"path": body.path, "model_id": model.model_id, "type": "load_weights"})
        return Finished(answer, (_becomes(model, checkpoint, config), _ready(model)))

    async def load(self, model: ModelRow, body: LoadWeightsBody) -> Finished:
        """In place; gradients accumulated so far are gone."""
        async with self._training_state(model, body.path, body.optimizer) as checkpoint:
            await self._trainer.load_state(model.key, checkpoint.directory, optimizer=body.optimizer)
        return Finished(json_answer({"path": body.path, "model_id": model.model_id, "type": "load_weights"}))

    @asynccontextmanager
    async def _training_state(
        self, model: ModelRow, path: str, optimizer: bool
    ) -> AsyncIterator[CheckpointRow]:
        """A checkpoint that fits, and that the owner of `model` may read. Inside, its directory stays, though
        it be replaced or deleted meanwhile."""
        found = await self._find(model, path, optimizer)
        self._reading = found.directory
        try:
            yield found
        finally:
            self._reading = None

    async def _find(self, model: ModelRow, path: str, optimizer: bool) -> CheckpointRow:
        wanted = tinker_path.parse(path)
        with self._store.read() as conn:
            owner = session_records.owner_of(conn, model.session_id)
            found = checkpoint_records.find(conn, owner, wanted.model_id, wanted.kind, wanted.name)
            own = model_records.find(conn, owner, wanted.model_id) is not None
        if found is None and own and self._saver.persisting(wanted):
            raise UserError(f"{path} is still being written: load it when its save is answered")
        if found is None:
            raise NotFoundError(f"no checkpoint {path}: it was never saved, or it is deleted or expired")
        if found.kind is not CheckpointKind.WEIGHTS:
            raise UserError(f"{path} is no training state: load one that save_state made")
        if optimizer and not found.has_optimizer:
            raise UserError(f"{path} has no optimizer state: load it with optimizer=false")
        self._require_served(found.base_model)
        if found.spec.rank > self._max_lora_rank:
            raise UserError(f"{path} has LoRA rank {found.spec.rank} > max_lora_rank {self._max_lora_rank}")
        return found

    def _require_served(self, base_model: str | None) -> None:
        if base_model is not None and base_model not in self._facts.names:
            raise UserError(f"base_model is {base_model!r}, expected one of {', '.join(self._facts.names)}")


def _family(config: Mapping[str, Any]) -> OptimizerFamily:
    family: OptimizerFamily = config["type"]
    return family


def _ready(model: ModelRow) -> Op[None]:
    def op(conn: Connection) -> None:
        model_records.set_state(conn, model.key, ModelState.READY)

    return op


def _becomes(model: ModelRow, checkpoint: CheckpointRow, optimizer_config: Mapping[str, Any]) -> Op[None]:
    def op(conn: Connection) -> None:
        model_records.set_spec(conn, model.key, checkpoint.spec, checkpoint.base_model, optimizer_config)

    return op
