"""Saves for the samplers: several models' at once, each with a fate of its own. The trainer is scripted."""

from collections import defaultdict
from pathlib import Path
from typing import Any, cast

import pytest

from skyrl_tinker.domain.ids import RequestKind
from skyrl_tinker.domain.values import Failure, LoraSpec
from skyrl_tinker.engine.outbox import Outbox
from skyrl_tinker.engine.saves.sampler_saves import Publisher, SamplerSave, SamplerSaveRequest
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.engine.unit_commits import PendingWrites, UnitCommits
from skyrl_tinker.errors import StateLostError, TrainerError
from skyrl_tinker.protocol.stored_requests import SaveSamplerBody
from skyrl_tinker.storage.storage_port import LOCAL_DISK
from skyrl_tinker.store import model_records
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.futures import queue
from skyrl_tinker.store.store import Store
from tests.engine.support import journal
from tests.support.scripted_samplers import ScriptedSamplers
from tests.support.scripted_trainer import ScriptedTrainer, Trained

FULL = LoraSpec(0, 1)


@pytest.fixture
def trainer() -> ScriptedTrainer:
    return ScriptedTrainer(defaultdict(Trained))


@pytest.fixture
def publisher(store: Store, bell: Doorbell, tmp_path: Path, trainer: ScriptedTrainer) -> Publisher:
    commits = UnitCommits(Outbox(store, bell, Metrics()))
    flow = store, cast(Any, trainer), commits, PendingWrites(), tmp_path / "checkpoints", LOCAL_DISK
    samplers, gaps = cast(Any, ScriptedSamplers()), cast(Any, None)
    return Publisher(*flow, samplers, tmp_path, gaps, lambda *_: None, lambda row: None)


async def save(store: Store, spec: LoraSpec | None = None, name: str | None = None) -> SamplerSaveRequest:
    """Save a new model. `name` None: an ephemeral save."""
    accepted = await journal.submit_create(store, await journal.new_session(store))
    assert accepted.model_id is not None
    if spec is not None:
        key = await journal.key_of(store, accepted.model_id)
        await store.write(lambda conn: model_records.set_spec(conn, key, spec, {}))
    body = SaveSamplerBody(name=name, sampling_session_seq_id=None if name else 0)
    kind = RequestKind.SAVE_WEIGHTS_FOR_SAMPLER
    await journal.submit(store, accepted.model_id, 1, kind, body.to_bytes())
    row = await store.read(lambda conn: queue.queued_after(conn, 0)[-1])
    return SamplerSaveRequest(row, await journal.model_of(store, accepted.model_id), body)


async def test_weights_of_several_models_are_captured_in_one_call(
    store: Store, publisher: Publisher, trainer: ScriptedTrainer
) -> None:
    saves = [await save(store), await save(store, FULL), await save(store, name="best")]
    captures = await publisher.capture(saves)
    keys = [each.model.key for each in saves]
    assert trainer.asked("weights") == [dict(zip(keys, (False, False, True), strict=True))]
    captured = [save for save in captures if isinstance(save, SamplerSave)]
    assert [save.row for save in captured] == [request.row for request in saves]
    assert [cast(Any, save.captured).model for save in captured] == keys
    assert [save.version.kind for save in captured] == ["lora", "full", "lora"]


async def test_a_name_is_taken_from_its_capture_on(
    store: Store, publisher: Publisher, trainer: ScriptedTrainer
) -> None:
    first, other = await save(store, name="best"), await save(store, name="best")
    one, two = await publisher.capture([first, other])
    assert isinstance(one, SamplerSave)
    assert isinstance(two, SamplerSave), "another model's name is another name"
    (again,) = await publisher.capture([first])
    assert isinstance(again, Failure)
    assert sorted(trainer.held) == [first.model.key, other.model.key], "what is refused is not kept"
    assert "best is being saved by an earlier request: choose another name" in again.message


async def test_a_name_is_free_again_when_the_capture_failed(
    store: Store, publisher: Publisher, trainer: ScriptedTrainer
) -> None:
    trainer.failing["weights"] = StateLostError("the trainer has no state of model 1")
    named = await save(store, name="best")
    first = await publisher.capture([named])
    assert await publisher.capture([named]) == first
    assert [isinstance(each, Failure) for each in first] == [True]


async def test_broken_workers_are_nobodys_answer(
    store: Store, publisher: Publisher, trainer: ScriptedTrainer
) -> None:
    trainer.failing["weights"] = TrainerError("rank 0 died")
    with pytest.raises(TrainerError, match="rank 0 died"):
        await publisher.capture([await save(store)])
