"""Foreign adapters become checkpoints of a home, served before or not."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import Connection
from typer.testing import CliRunner

from skyrl_tinker import config
from skyrl_tinker.cli.commands import app
from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from skyrl_tinker.domain import tinker_path
from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.ids import ModelState
from skyrl_tinker.domain.manifest import read_manifest
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.server.base_models import base_model, tiny_model
from skyrl_tinker.store import api_keys, checkpoint_records, model_records, server_state, session_records
from skyrl_tinker.store.checkpoint_records import CheckpointRow
from skyrl_tinker.store.database.migrate import migrate
from skyrl_tinker.store.model_records import ModelRow
from skyrl_tinker.store.store import Store, write_once
from tests.support.failures import files_up_to
from tests.support.peft_adapters import save_adapter
from tests.support.reads import reading

SPEC = LoraSpec(4, 0, train_mlp=False, train_unembed=False)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("base") / "model"
    tiny_model.make_model(directory, hidden=64, layers=1)
    return str(directory)


@pytest.fixture
def adapter(base: str, tmp_path: Path) -> Path:
    save_adapter(base, tmp_path / "from-elsewhere", r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    return tmp_path / "from-elsewhere"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return config.load(home=tmp_path / "home")


async def serve_once(settings: Settings, base: str) -> None:
    """Store the record that `serve` makes of its base model."""
    facts = base_model.resolve(settings.model_copy(update={"base_model": base, "model_name": "small"}))
    store = Store.open(settings.store_url)
    await store.write(lambda conn: server_state.put_bases(conn, Bases((facts,))))
    await store.close()


def look_up(settings: Settings, path: str) -> tuple[CheckpointRow, ModelRow]:
    return asyncio.run(_look_up(settings, path))


async def _look_up(settings: Settings, path: str) -> tuple[CheckpointRow, ModelRow]:
    where = tinker_path.parse(path)
    store = Store.open(settings.store_url)
    with reading(store) as conn:
        row = checkpoint_records.find(conn, None, where.model_id, where.kind, where.name)
        model = model_records.by_id(conn, where.model_id)
        assert not session_records.list_expired(conn, 1e18, 0.0, 0.0), (
            "nothing that a server would have to end"
        )
    await store.close()
    assert row is not None
    assert model is not None
    return row, model


def run(settings: Settings, *arguments: str) -> str:
    """Return its standard output."""
    result = CliRunner().invoke(app, ["import-adapter", *arguments, "--home", str(settings.root)])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def fail(settings: Settings, *arguments: str) -> str:
    """Return its one line of standard error."""
    result = CliRunner().invoke(app, ["import-adapter", *arguments, "--home", str(settings.root)])
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    return str(line)


def test_a_base_model_may_be_named_as_it_is_served(settings: Settings, base: str, adapter: Path) -> None:
    Directories(settings).make()
    migrate(settings.store_url)
    asyncio.run(serve_once(settings, base))
    row, model = look_up(settings, run(settings, str(adapter), "--base-model", "small").strip())
    assert row.base_model == model.base_model == base


def test_a_path_for_the_model_that_was_served_last_is_all_it_prints(
    settings: Settings, base: str, adapter: Path
) -> None:
    Directories(settings).make()
    migrate(settings.store_url)
    asyncio.run(serve_once(settings, base))
    printed = run(settings, str(adapter))
    row, model = look_up(settings, printed.strip())
    assert printed == f"tinker://{model.model_id}/weights/from-elsewhere\n"
    assert (row.base_model, row.spec, row.has_optimizer) == ("small", SPEC, False)
    assert (model.state, model.spec, model.base_model) == (ModelState.RELEASED, SPEC, "small")
    assert model.user_metadata == {"imported_from": adapter.name}, "clients read it: no path of this host"
    manifest = read_manifest(row.directory)
    assert (manifest.spec, manifest.optimizer, manifest.step) == (SPEC, None, 0)
    assert row.size_bytes == sum(file.stat().st_size for file in Path(row.directory).iterdir())
    assert Path(row.directory).is_relative_to(settings.checkpoint_root)


def test_a_home_never_served_is_told_its_model(settings: Settings, base: str, adapter: Path) -> None:
    assert "--base-model" in fail(settings, str(adapter))
    assert not settings.root.exists()
    path = run(settings, str(adapter), "--base-model", base, "--name", "start").strip()
    row, _ = look_up(settings, path)
    assert (row.base_model, row.name) == (base, "start")
    assert "--base-model" in fail(settings, str(adapter)), "still nothing was served"


def test_one_name_may_be_imported_twice(settings: Settings, base: str, adapter: Path) -> None:
    found = [run(settings, str(adapter), "--base-model", base).strip() for _ in range(2)]
    rows = [look_up(settings, path)[0] for path in found]
    assert len({row.directory for row in rows}) == len(set(found)) == 2


def test_a_name_that_is_no_name_is_refused(settings: Settings, base: str, adapter: Path) -> None:
    assert "checkpoint name" in fail(settings, str(adapter), "--base-model", base, "--name", "a/b")
    renamed = adapter.rename(adapter.with_name("a:b"))
    assert "--name gives another" in fail(settings, str(renamed), "--base-model", base)


def test_where_there_are_keys_one_of_them_finds_it(settings: Settings, base: str, adapter: Path) -> None:
    Directories(settings).make()
    migrate(settings.store_url)
    write_once(settings.store_url, lambda conn: api_keys.create(conn, "alice"))
    assert "--key is missing" in fail(settings, str(adapter), "--base-model", base)
    assert "no live key 'bob'" in fail(settings, str(adapter), "--base-model", base, "--key", "bob")
    path = tinker_path.parse(run(settings, str(adapter), "--base-model", base, "--key", "alice").strip())

    def owner(conn: Connection) -> int | None:
        run = model_records.by_id(conn, path.model_id)
        assert run is not None
        return session_records.owner_of(conn, run.session_id)

    assert write_once(settings.store_url, owner) == 1


def test_what_is_refused_leaves_nothing(settings: Settings, base: str, adapter: Path) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_dora": True}))
    assert "use_dora is True" in fail(settings, str(adapter), "--base-model", base)
    assert list(settings.checkpoint_root.iterdir()) == []


def test_a_full_disk_leaves_nothing(settings: Settings, base: str, tmp_path: Path) -> None:
    for name, rank in (("small", 4), ("large", 256)):
        save_adapter(base, tmp_path / name, r=rank, target_modules=["q_proj", "v_proj"])
    kept = look_up(settings, run(settings, str(tmp_path / "small"), "--base-model", base).strip())[0]
    with files_up_to(100_000):
        line = fail(settings, str(tmp_path / "large"), "--base-model", base)
    assert "could not be written: File too large" in line
    assert list(settings.checkpoint_root.glob("*/*/*")) == [Path(kept.directory)]


def test_a_directory_that_is_no_adapter_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    code = (
        "import sys; from skyrl_tinker.cli.commands import app\n"
        "try: app()\nfinally: assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code, "import-adapter", str(tmp_path), "--home", str(tmp_path / "home")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    told = f"skyrl-tinker: {tmp_path}: found no adapter_model.safetensors, expected the directory of a PEFT"
    assert ran.stderr.startswith(told)
    assert not (tmp_path / "home").exists()
