"""Archives as SDKs up to 0.35 ask for them and their CLI unpacks them."""

import email.utils
import io
import json
import shutil
import tarfile
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from skyrl_tinker.domain.ids import CheckpointKind
from skyrl_tinker.domain.manifest import Manifest, entry_of, write_manifest
from skyrl_tinker.domain.values import LoraSpec
from tests.api.routes.test_download import record
from tests.api.support.world import BASE, World

WEIGHTS, SAMPLER, EXTERNAL = CheckpointKind
CONTENT = bytes(range(256)) * 12345 + b"odd"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A checkpoint directory; a training one has an optimizer beside the adapter."""
    made = tmp_path / "adapter"
    made.mkdir()
    (made / "adapter_model.safetensors").write_bytes(CONTENT)
    (made / "adapter_config.json").write_text('{"r": 8, "base_model_name_or_path": "/models/tiny"}')
    (made / "optimizer.safetensors").write_bytes(b"nobody's business")
    entries = {file.name: entry_of(file) for file in made.iterdir()}
    write_manifest(made, Manifest("/models/tiny", LoraSpec(8, 1), 0, None, entries))
    return made


async def ask(world: World, where: str) -> httpx.Response:
    return await world.http.get(f"{where}/archive", headers={"Accept": "application/gzip"})


@pytest.mark.parametrize("kind", [WEIGHTS, SAMPLER])
async def test_a_lora_checkpoint_is_a_tar_of_its_adapter_behind_a_redirect(
    world: World, adapter: Path, kind: CheckpointKind
) -> None:
    answer = await ask(world, await record(world, adapter, kind))
    assert (answer.status_code, answer.content) == (302, b"")
    expires = email.utils.parsedate_to_datetime(answer.headers["Expires"])
    assert expires.timestamp() == pytest.approx(time.time() + 3600, abs=60)
    assert answer.headers["Expires"].endswith(" GMT")
    served = await world.http.get(answer.headers["Location"])
    assert served.headers["Content-Length"] == str(len(served.content))
    with tarfile.open(fileobj=io.BytesIO(served.content)) as tar:
        found = {member.name: tar.extractfile(member).read() for member in tar.getmembers()}  # type: ignore[union-attr]
    config = json.loads(found.pop("adapter_config.json"))
    assert config == {"r": 8, "base_model_name_or_path": BASE}
    assert b"merge_and_unload" in found.pop("MERGING.md")  # the head is adapted, and tied to the embeddings
    assert found == {"adapter_model.safetensors": CONTENT, "checkpoint_complete": b""}


async def test_an_archives_url_is_signed_and_ends_with_its_checkpoint(world: World, adapter: Path) -> None:
    where = await record(world, adapter, WEIGHTS)
    url = (await ask(world, where)).headers["Location"]
    assert (await world.http.get(url.replace("e.tar", "f.tar"))).status_code == 403
    assert (await world.http.delete(where)).status_code == 200
    assert (await world.http.get(url)).status_code == 404
    assert (await ask(world, where)).status_code == 404


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (WEIGHTS, {"spec": LoraSpec(0, 0)}, "export it with save_weights_external"),
        (EXTERNAL, {}, "its files have URLs"),
    ],
)
async def test_what_has_no_archive_says_what_to_do_instead(
    world: World, adapter: Path, kind: CheckpointKind, changes: dict[str, Any], message: str
) -> None:
    answer = await ask(world, await record(world, adapter, kind, **changes))
    assert answer.status_code == 400
    assert message in answer.json()["detail"]


async def test_files_that_somebody_removed_are_404(world: World, adapter: Path) -> None:
    url = (await ask(world, await record(world, adapter, WEIGHTS))).headers["Location"]
    (adapter / "adapter_config.json").unlink()
    answer = await world.http.get(url)
    assert answer.status_code == 404
    assert "its files are gone" in answer.json()["detail"]
    shutil.rmtree(adapter)
    shutil.copy(__file__, adapter)  # a file in its place
    assert (await world.http.get(url)).status_code == 404
