"""Saves for the samplers leave nothing behind when they fail. The trainer is scripted."""

from pathlib import Path
from typing import Any, cast

import pytest

from skyrl_tinker.engine.answers import Outbox
from skyrl_tinker.engine.metrics import Metrics
from skyrl_tinker.engine.publisher import Publisher
from skyrl_tinker.errors import StorageError
from skyrl_tinker.store import futures, models
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.store import Store
from skyrl_tinker.wire.bodies import SaveSamplerBody
from skyrl_tinker.wire.ids import ModelKey, RequestKind
from skyrl_tinker.wire.values import BaseModelFacts, LoraSpec

from . import journal

FACTS = BaseModelFacts("/nowhere", ("tiny",), "Qwen3ForCausalLM", 512, 128, 2, 1, 64, 64, True, (0,))


class Trainer:
    """Its disk is full after some bytes."""

    async def capture_full(self, model: ModelKey, directory: str) -> None:
        write(Path(directory))
        raise StorageError("the weights could not be written: no space left on device")


def write(directory: Path) -> None:
    (directory / ".model.safetensors.tmp").write_bytes(b"some")


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


async def test_a_full_memory_is_not_kept_full(store: Store, bell: Doorbell, tmp_path: Path) -> None:
    accepted = await journal.submit_create(store, await journal.new_session(store))
    assert accepted.model_id is not None
    key = await journal.key_of(store, accepted.model_id)
    await store.write(lambda conn: models.set_spec(conn, key, LoraSpec(0, 1), "tiny", {}))
    body = SaveSamplerBody(sampling_session_seq_id=0)
    kind = RequestKind.SAVE_WEIGHTS_FOR_SAMPLER
    await journal.submit(store, accepted.model_id, 1, kind, body.to_bytes())
    async with store.read() as conn:
        row = (await futures.queued_after(conn, 0))[-1]
    parts = cast(Any, Trainer()), cast(Any, None), Outbox(store, bell)
    publisher = Publisher(store, *parts, FACTS, tmp_path, tmp_path / "checkpoints", Metrics())
    before = names(tmp_path)
    with pytest.raises(StorageError):
        await publisher.capture(row, await journal.model_of(store, accepted.model_id), body)
    assert names(tmp_path) == before
