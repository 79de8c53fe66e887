"""Creation of models, and loads of checkpoints into new and existing ones."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from skyrl_tinker.domain import tinker_path
from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.ids import Effect, ModelKey, ModelState
from skyrl_tinker.domain.values import BaseModelFacts, OptimizerFamily
from skyrl_tinker.engine.outbox import json_answer, persistently, when_possible
from skyrl_tinker.engine.recovery.snapshot_keeper import SnapshotKeeper
from skyrl_tinker.engine.saves.training_saves import Saver
from skyrl_tinker.engine.scheduling.priorities import Share
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.stored_requests import CreateViaLoadBody, LoadWeightsBody
from skyrl_tinker.storage.storage_port import LOCAL_DISK, Storage
from skyrl_tinker.store import checkpoint_records, model_records, session_records
from skyrl_tinker.store.checkpoint_records import CheckpointRow
from skyrl_tinker.store.database.group_commit import Op
from skyrl_tinker.store.futures.finish import FutureOutcome, FutureResult
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.replay.snapshot_records import SnapshotRow
from skyrl_tinker.store.store import Store
from skyrl_tinker.training.trainer_group import TrainerGroup

ANY = "*"
"""Stands for the directory of a checkpoint that is being looked up."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Result of a creation or a load, and the ops that must be committed with it."""

    outcome: FutureOutcome
    also: tuple[Op[Any], ...] = ()
    effect: Effect | None = None


@dataclass(frozen=True, slots=True)
class LoadFiles:
    """Checkpoint to be loaded, with its files here, and the snapshot that keeps them for a later replay."""

    checkpoint: CheckpointRow
    kept: SnapshotRow


@dataclass(eq=False)
class ModelCreation:
    """Creates and loads models on the workers. Every method raises SkyrlTinkerError on failure."""

    _store: Store
    _trainer: TrainerGroup
    facts: InitVar[BaseModelFacts]
    _saver: Saver
    _snapshots: SnapshotKeeper
    _max_lora_rank: int
    _storage: Storage = LOCAL_DISK

    def __post_init__(self, facts: BaseModelFacts) -> None:
        self._bases = Bases((facts,))
        self._loading: Counter[str] = Counter()  # directories

    def is_loading(self, directory: str) -> bool:
        """Return True while a load uses this directory, or looks up a checkpoint, which may be there."""
        return directory in self._loading or ANY in self._loading

    async def fetch(
        self, model: ModelRow, seq_id: int, body: CreateViaLoadBody | LoadWeightsBody, share: Share
    ) -> LoadFiles:
        """Fetch a checkpoint that fits and that the owner of `model` may read; needs no rank.

        Until `loaded` or `discard` its directory stays, even if it is replaced or deleted meanwhile. Waits
        while a disk is full or storage is away. `share`: whose turns of load threads it takes.
        """
        self._loading[ANY] += 1
        try:
            checkpoint = await self._find(model, body.path, body.optimizer)
            self._loading[checkpoint.directory] += 1
        finally:
            self._let_go(ANY)

        async def take() -> SnapshotRow:
            directory = Path(checkpoint.directory)
            await self._storage.fetch_off_loop(directory, share)  # it may have left the cache
            return await self._snapshots.link(
                model.key, seq_id, checkpoint.directory, self._storage, share, optimizer=body.optimizer
            )

        try:
            return LoadFiles(checkpoint, await when_possible(take))
        except BaseException:  # cancelled or failed: nothing else releases it
            self._let_go(checkpoint.directory)
            raise

    def loaded(self, files: LoadFiles) -> None:
        """Release a checkpoint that was loaded."""
        self._let_go(files.checkpoint.directory)

    async def discard(self, files: LoadFiles) -> None:
        """Release a checkpoint that will not be loaded."""
        self._let_go(files.checkpoint.directory)
        await self._snapshots.discard(files.kept)

    def _let_go(self, directory: str) -> None:
        self._loading -= Counter([directory])  # drops zeros

    async def create(self, model: ModelRow) -> Finished:
        self._bases.require(model.base_model)  # the base model may have changed since it was accepted
        await self._trainer.create_model(model.key, model.spec, optimizer_family(model.optimizer_config))
        answer = json_answer({"model_id": model.model_id, "type": "create_model"})
        return Finished(answer, (_set_ready(model),))

    async def create_from(self, model: ModelRow, body: CreateViaLoadBody, files: LoadFiles) -> Finished:
        """Create a model with the shape and the weights of a checkpoint."""
        checkpoint = files.checkpoint
        config = checkpoint.optimizer_config if body.optimizer else body.optimizer_config
        await self._trainer.create_model(model.key, checkpoint.spec, optimizer_family(config))
        try:
            keep = await self._load(model.key, files)
        except Exception:  # of any kind: without its weights the new model is useless
            await self._trainer.release(model.key)
            raise
        set_spec = partial(
            model_records.set_spec, key=model.key, spec=checkpoint.spec, optimizer_config=config
        )
        ready = set_spec, _set_ready(model), keep, _note_parent(model, checkpoint)
        return Finished(_loaded(model, body.path), ready, Effect.LOADED)

    async def load(self, model: ModelRow, body: LoadWeightsBody, files: LoadFiles) -> Finished:
        """Load a checkpoint in place; the gradients accumulated so far are dropped."""
        keep = await self._load(model.key, files)
        return Finished(
            _loaded(model, body.path), (keep, _note_parent(model, files.checkpoint)), Effect.LOADED
        )

    async def _load(self, model: ModelKey, files: LoadFiles) -> Op[Any]:
        """Load a checkpoint; the returned op makes the kept copy the model's snapshot."""
        kept = files.kept
        await self._trainer.load_state(model, files.checkpoint.directory, optimizer=kept.optimizer)
        return self._snapshots.loaded(model, kept)

    async def _find(self, model: ModelRow, path: str, optimizer: bool) -> CheckpointRow:
        parsed = tinker_path.parse(path)

        def find(conn: Connection) -> tuple[CheckpointRow | None, bool]:
            owner = session_records.owner_of(conn, model.session_id)
            checkpoint = checkpoint_records.find(conn, owner, parsed.model_id, parsed.kind, parsed.name)
            return checkpoint, model_records.find(conn, owner, parsed.model_id) is not None

        persisting = self._saver.persisting(parsed)  # together with the query, as the save may end after it
        checkpoint, owned = await persistently(self._store.read, find)
        if checkpoint is None and owned and persisting:
            raise UserError(f"{path} is still being written: load it when its save is answered")
        if checkpoint is None:
            raise checkpoint_records.not_found(path)
        checkpoint_records.require_base(checkpoint, self._bases)
        checkpoint_records.require_resumable(
            checkpoint, optimizer=optimizer, max_lora_rank=self._max_lora_rank
        )
        return checkpoint


def _loaded(model: ModelRow, path: str) -> FutureResult:
    return json_answer({"path": path, "model_id": model.model_id, "type": "load_weights"})


def optimizer_family(config: Mapping[str, Any]) -> OptimizerFamily:
    """Return the optimizer of a model with this optimizer_config."""
    family: OptimizerFamily = config["type"]
    return family


def _set_ready(model: ModelRow) -> Op[bool]:
    return partial(model_records.set_state, key=model.key, state=ModelState.READY, was=[ModelState.CREATING])


def _note_parent(model: ModelRow, checkpoint: CheckpointRow) -> Op[None]:
    parent, steps = checkpoint.model_id, checkpoint.steps
    return partial(model_records.note_parent, key=model.key, parent=parent, steps=steps)
