"""Paths in rows: relative below the home, absolute elsewhere, and the same to those who read them."""

from pathlib import Path

from sqlalchemy import Connection, select

from skyrl_tinker.domain.ids import CheckpointKind, ModelKey
from skyrl_tinker.store import checkpoint_records, weight_versions
from skyrl_tinker.store.checkpoint_records import NewCheckpoint
from skyrl_tinker.store.database import file_paths
from skyrl_tinker.store.database.tables import AdapterVersion, SavedCheckpoint, Snapshot
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.replay import snapshot_records
from skyrl_tinker.store.replay.snapshot_records import SnapshotRow
from skyrl_tinker.store.store import Store, write_once
from tests.support.reads import reading

KIND = CheckpointKind.SAMPLER_WEIGHTS


def record(conn: Connection, model: ModelRow, root: Path) -> None:
    """Record a named version, the checkpoint that it is in, and a snapshot, below `root`."""
    version = weight_versions.insert_version(conn, model.key, "lora", durable=True)
    weight_versions.publish_version(conn, version, str(root / "a"), 1)
    new = NewCheckpoint(model.key, KIND, "a", str(root / "a"), "tiny", model.spec, 1, version_id=version)
    checkpoint_records.add(conn, new, replace=False)
    snapshot_records.put(conn, model.key, SnapshotRow(3, str(root / "s"), optimizer=True))


def stored(conn: Connection) -> list[str | None]:
    return [conn.scalar(select(table.directory)) for table in (AdapterVersion, SavedCheckpoint, Snapshot)]


def read(conn: Connection, model: ModelKey) -> list[str]:
    """The paths that those get who load, sample and replay."""
    checkpoint = checkpoint_records.latest_for_model(conn, model, KIND)
    assert checkpoint is not None
    assert checkpoint.version_id is not None
    version = weight_versions.published_version(conn, checkpoint.version_id)
    snapshot = snapshot_records.find(conn, model)
    assert version is not None
    assert snapshot is not None
    assert snapshot_records.all_directories(conn) == {model: snapshot.directory}
    return [version.directory, checkpoint.directory, snapshot.directory]


async def test_what_lies_below_the_home_moves_with_it(
    store: Store, url: str, model: ModelRow, tmp_path: Path
) -> None:
    await store.write(lambda conn: record(conn, model, tmp_path / "d"))
    with reading(store) as conn:
        assert stored(conn) == ["d/a", "d/a", "d/s"]
        assert read(conn, model.key) == [str(tmp_path / path) for path in ("d/a", "d/a", "d/s")]
    moved = Store.open(url, Path("/moved/home"))
    with reading(moved) as conn:
        assert read(conn, model.key) == ["/moved/home/d/a", "/moved/home/d/a", "/moved/home/d/s"]
    await moved.close()


async def test_what_lies_elsewhere_stays_where_it_is(
    store: Store, url: str, model: ModelRow, tmp_path: Path
) -> None:
    await store.write(lambda conn: record(conn, model, Path("/disk")))
    for home in (tmp_path, Path("/moved/home")):
        opened = Store.open(url, home)
        with reading(opened) as conn:
            assert read(conn, model.key) == ["/disk/a", "/disk/a", "/disk/s"]
        await opened.close()


async def test_relocated_paths_are_those_below_the_old_directory(
    store: Store, url: str, model: ModelRow, tmp_path: Path
) -> None:
    def relocate(old: str | Path, new: str | Path) -> int:
        return write_once(url, lambda conn: file_paths.relocate(conn, Path(old), Path(new)), tmp_path)

    await store.write(lambda conn: record(conn, model, Path("/disk/checkpoints")))
    assert relocate("/disk/check", "/large") == 0
    assert relocate("/disk", "/large") == 3
    with reading(store) as conn:
        assert read(conn, model.key) == [f"/large/checkpoints/{name}" for name in "aas"]
    assert relocate("/large/checkpoints/a", tmp_path / "a") == 2
    with reading(store) as conn:
        assert stored(conn) == ["a", "a", "/large/checkpoints/s"]
    assert relocate(tmp_path, "/disk") == 2
    with reading(store) as conn:
        assert read(conn, model.key) == ["/disk/a", "/disk/a", "/large/checkpoints/s"]


async def test_an_unpublished_version_is_no_path(store: Store, url: str, model: ModelRow) -> None:
    await store.write(lambda conn: weight_versions.insert_version(conn, model.key, "lora", durable=False))
    assert write_once(url, lambda conn: file_paths.relocate(conn, Path("/"), Path("/x"))) == 0


async def test_ephemeral_versions_lie_where_the_home_of_today_has_them(store: Store, model: ModelRow) -> None:
    def publish(conn: Connection, *, durable: bool) -> None:
        version = weight_versions.insert_version(conn, model.key, "lora", durable=durable)
        weight_versions.publish_version(conn, version, f"/ram/old/v{version}", 1)

    for durable in (False, True, False):
        await store.write(lambda conn, durable=durable: publish(conn, durable=durable))  # type: ignore[misc]
    await store.write(lambda conn: weight_versions.settle_ephemeral(conn, Path("/ram/new")))
    with reading(store) as conn:
        assert list(conn.scalars(select(AdapterVersion.directory).order_by(AdapterVersion.id))) == [
            "/ram/new/v1",
            "/ram/old/v2",
            "/ram/new/v3",
        ]
