"""What dead hosts left in object storage goes."""

import os
import shutil
from functools import partial
from pathlib import Path

from skyrl_tinker.domain.ids import CheckpointKind
from skyrl_tinker.domain.manifest import FILE_NAME
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.engine.upkeep.cleanup import CHECKPOINTS, storage_steps
from skyrl_tinker.storage.checkpoint_storage import CheckpointStorage
from skyrl_tinker.store import checkpoint_records
from skyrl_tinker.store.checkpoint_records import NewCheckpoint
from skyrl_tinker.store.store import Store
from tests.engine.support import journal


async def test_saves_that_were_stored_whole_and_never_recorded_go_after_a_day(
    store: Store, tmp_path: Path
) -> None:
    """Their host died between the two, and the save is repeated elsewhere."""
    key, number = await journal.submit_save(store, await journal.ready_model(store))
    local, remote = tmp_path / "local", tmp_path / "remote"
    names = {name: f"a~{number}.{name}" for name in ("recorded", "died", "young")} | {"foreign": "a~99.x"}
    storage = CheckpointStorage(local, f"file://{remote}")
    directories = {name: local / str(key) / "weights" / last for name, last in names.items()}
    for name, directory in directories.items():
        directory.mkdir(parents=True)
        (directory / FILE_NAME).write_text("{}")
        storage.store(directory)
        if name != "young":
            os.utime(remote / directory.relative_to(local) / FILE_NAME, (0, 0))
    shutil.rmtree(local)
    recorded = str(directories["recorded"])
    new = NewCheckpoint(key, CheckpointKind.WEIGHTS, "a", recorded, "tiny", LoraSpec(8, 1), 1)
    await store.write(partial(checkpoint_records.add, new=new, replace=False))
    (step,) = storage_steps(store, storage, None, lambda _: False)
    await step.run()
    kept = {directories[name] for name in ("recorded", "young", "foreign")}
    assert set(storage.listed(CHECKPOINTS)) == kept
