"""Saves for the samplers: several models' at once, each with a fate of its own. The trainer is scripted."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from sqlalchemy import func, select

from skyrl_tinker.domain.ids import ModelKey, RequestKind
from skyrl_tinker.domain.values import AdapterWeights, BaseModelFacts, Failure, LoraSpec, WeightVersion
from skyrl_tinker.engine.engine_metrics import Metrics
from skyrl_tinker.engine.outbox import Outbox
from skyrl_tinker.engine.saves.sampler_saves import Publisher, SamplerSave, SamplerSaveRequest
from skyrl_tinker.engine.unit_commits import UnitCommits
from skyrl_tinker.errors import DiskFullError, StateLostError, StorageError, TrainerError
from skyrl_tinker.protocol.stored_requests import SaveSamplerBody
from skyrl_tinker.store import model_records
from skyrl_tinker.store.database.tables import AdapterVersion
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.futures import queue
from skyrl_tinker.store.store import Store
from tests.engine.support import journal

FACTS = BaseModelFacts("/nowhere", ("tiny",), "Qwen3ForCausalLM", 512, 128, 2, 1, 64, 64, True, (0,))
FULL = LoraSpec(0, 1)


class Trainer:
    """Its disk is full after some bytes; `fault` befalls the capture of adapters."""

    def __init__(self) -> None:
        self.fault: Exception | None = None
        self.captured: list[list[ModelKey]] = []
        self.full: StorageError = StorageError("the weights could not be written: disk broken")

    async def capture_full(self, model: ModelKey, directory: str) -> None:
        write(Path(directory))
        raise self.full

    async def capture_adapters(self, keys: Sequence[ModelKey]) -> dict[ModelKey, AdapterWeights]:
        self.captured.append(list(keys))
        if self.fault is not None:
            raise self.fault
        return {key: AdapterWeights(LoraSpec(8, seed=key), {}) for key in keys}


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


class Samplers:
    async def unload(self, version: WeightVersion) -> None:
        """They have none."""


@pytest.fixture
def publisher(store: Store, bell: Doorbell, tmp_path: Path, trainer: Trainer) -> Publisher:
    commits = UnitCommits(Outbox(store, bell, Metrics()))
    parts = cast(Any, trainer), cast(Any, Samplers()), commits
    return Publisher(store, *parts, FACTS, tmp_path, tmp_path / "checkpoints", cast(Any, None), Metrics())


async def save(store: Store, spec: LoraSpec | None = None, name: str | None = None) -> SamplerSaveRequest:
    """Save a new model. `name` None: an ephemeral save."""
    accepted = await journal.submit_create(store, await journal.new_session(store))
    assert accepted.model_id is not None
    if spec is not None:
        key = await journal.key_of(store, accepted.model_id)
        await store.write(lambda conn: model_records.set_spec(conn, key, spec, "tiny", {}))
    body = SaveSamplerBody(name=name, sampling_session_seq_id=None if name else 0)
    kind = RequestKind.SAVE_WEIGHTS_FOR_SAMPLER
    await journal.submit(store, accepted.model_id, 1, kind, body.to_bytes())
    with store.read() as conn:
        row = queue.queued_after(conn, 0)[-1]
    return SamplerSaveRequest(row, await journal.model_of(store, accepted.model_id), body)


def write(directory: Path) -> None:
    (directory / ".model.safetensors.tmp").write_bytes(b"some")


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


async def test_adapters_of_several_models_are_captured_in_one_call(
    store: Store, publisher: Publisher, trainer: Trainer
) -> None:
    saves = [await save(store) for _ in range(3)]
    captures = await publisher.capture(saves)
    keys = [each.model.key for each in saves]
    assert trainer.captured == [keys]
    captured = [save for save in captures if isinstance(save, SamplerSave)]
    assert [save.row for save in captured] == [request.row for request in saves]
    assert [save.adapter for save in captured] == [AdapterWeights(LoraSpec(8, seed=key), {}) for key in keys]


@pytest.mark.parametrize("error", [StorageError("disk broken"), DiskFullError("no space left on device")])
async def test_what_cannot_be_written_fills_no_memory_and_harms_no_other_save(
    store: Store, publisher: Publisher, trainer: Trainer, tmp_path: Path, error: StorageError
) -> None:
    trainer.full = error
    full, lora = await save(store, FULL), await save(store)
    before = names(tmp_path)
    failed, captured = await publisher.capture([full, lora])
    again = isinstance(error, DiskFullError)
    assert failed == (error if again else Failure("disk broken", "server"))
    assert isinstance(captured, SamplerSave)
    assert names(tmp_path) == before
    with store.read() as conn:
        assert conn.scalar(select(func.count()).select_from(AdapterVersion)) == (1 if again else 2)


async def test_a_name_is_taken_from_its_capture_on(store: Store, publisher: Publisher) -> None:
    first, other = await save(store, name="best"), await save(store, name="best")
    one, two = await publisher.capture([first, other])
    assert isinstance(one, SamplerSave)
    assert isinstance(two, SamplerSave), "another model's name is another name"
    (again,) = await publisher.capture([first])
    assert isinstance(again, Failure)
    assert "best is being saved by an earlier request: choose another name" in again.message


@pytest.mark.parametrize("spec", [None, FULL], ids=["lora", "full"])
async def test_a_name_is_free_again_when_the_capture_failed(
    store: Store, publisher: Publisher, trainer: Trainer, spec: LoraSpec | None
) -> None:
    trainer.fault = StateLostError("the trainer has no state of model 1")
    named = await save(store, spec, name="best")
    first = await publisher.capture([named])
    assert await publisher.capture([named]) == first
    assert [isinstance(each, Failure) for each in first] == [True]


async def test_broken_workers_are_nobodys_answer(
    store: Store, publisher: Publisher, trainer: Trainer
) -> None:
    trainer.fault = TrainerError("rank 0 died")
    with pytest.raises(TrainerError, match="rank 0 died"):
        await publisher.capture([await save(store)])
