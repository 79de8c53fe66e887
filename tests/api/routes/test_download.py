"""Exports by signed URLs: who may fetch what, from where, how long; and that it comes from disk in pieces."""

import shutil
import time
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import httpx
import pytest
from sqlalchemy import update
from tinker.types import ExternalWeightsUrlsResponse

from skyrl_tinker.api.app import create_app
from skyrl_tinker.api.security import signing
from skyrl_tinker.config import Settings
from skyrl_tinker.domain.ids import CheckpointKind
from skyrl_tinker.domain.manifest import Manifest, entry_of, write_manifest
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.store import checkpoint_records
from skyrl_tinker.store.checkpoint_records import NewCheckpoint
from skyrl_tinker.store.database.tables import SavedCheckpoint
from tests.api.support.streaming import stream
from tests.api.support.world import BASE, World, running
from tests.support.object_storage import BUCKET, object_storage

EXTERNAL = CheckpointKind.EXTERNAL_WEIGHTS
LARGE = "model.safetensors"
FILES = {"config.json": b'{"a": 1}', "with space.txt": b"x", LARGE: bytes(range(256)) * 3 * 4096}


async def record(world: World, directory: Path, kind: CheckpointKind = EXTERNAL, **changes: Any) -> str:
    """A checkpoint of a new model that lies in this directory. Returns its path below training_runs."""
    model_id = await world.model()
    key = (await world.queued())[-1].model_key
    assert key is not None
    values: dict[str, Any] = {"base_model": BASE, "spec": LoraSpec(8, 1), "size_bytes": 1, **changes}
    new = NewCheckpoint(model_key=key, kind=kind, name="e", directory=str(directory), **values)
    await world.store.write(lambda conn: checkpoint_records.add(conn, new, replace=False))
    return f"training_runs/{model_id}/checkpoints/{kind}/e"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """An export as the engine leaves it."""
    made = tmp_path / "export"
    made.mkdir()
    for name, content in FILES.items():
        (made / name).write_bytes(content)
    write_manifest(
        made, Manifest(BASE, LoraSpec(8, 1), 0, None, {name: entry_of(made / name) for name in FILES})
    )
    return made


@pytest.fixture
async def stored(settings: Settings, directory: Path) -> AsyncIterator[tuple[World, str]]:
    """A server with an export that is in object storage only."""
    with object_storage():
        elsewhere = settings.model_copy(update={"checkpoints": f"s3://{BUCKET}/run"})
        async with running(elsewhere) as world:
            here = world.settings.checkpoint_root / "1" / "e"
            shutil.copytree(directory, here)
            world.services.storage.store(here)
            export = await record(world, here)
            shutil.rmtree(world.settings.checkpoint_root)
            yield world, export


@pytest.fixture
async def export(world: World, directory: Path) -> str:
    return await record(world, directory)


async def urls_of(world: World, export: str, **headers: str) -> dict[str, str]:
    answer = await world.http.get(f"{export}/external_weights_urls", headers=headers)
    assert answer.status_code == 200, answer.text
    return ExternalWeightsUrlsResponse.model_validate(answer.json()).urls


async def served_whole(world: World, export: str) -> dict[str, str]:
    urls = await urls_of(world, export)
    assert set(urls) == set(FILES)
    for name, content in FILES.items():
        answer = await world.http.get(urls[name])
        assert (answer.status_code, answer.content) == (200, content)
        assert answer.headers["Content-Length"] == str(len(content))
    return urls


async def test_every_file_is_served_to_a_bare_get_whole_in_ranges_and_to_head(
    world: World, export: str
) -> None:
    urls = await served_whole(world, export)
    part = await world.http.get(urls[LARGE], headers={"Range": "bytes=1000000-1000009"})
    assert (part.status_code, part.content) == (206, FILES[LARGE][1000000:1000010])
    assert part.headers["Content-Range"] == f"bytes 1000000-1000009/{len(FILES[LARGE])}"
    head = await world.http.head(urls[LARGE])
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["Content-Length"] == str(len(FILES[LARGE]))


async def test_what_is_in_storage_only_is_streamed_from_there(stored: tuple[World, str]) -> None:
    world, export = stored
    urls = await served_whole(world, export)
    head = await world.http.head(urls[LARGE])
    assert (head.status_code, head.headers["Content-Length"]) == (200, str(len(FILES[LARGE])))
    ranges = {"Range": "bytes=1000000-1000009", "If-Range": head.headers["ETag"]}
    part = await world.http.get(urls[LARGE], headers=ranges)
    assert (part.status_code, part.content) == (206, FILES[LARGE][1000000:1000010])
    assert not world.settings.checkpoint_root.exists()  # no copy was made of it
    world.services.storage.remove(world.settings.checkpoint_root / "1" / "e")
    status, detail = await refusal(world, urls[LARGE])
    assert (status, detail.endswith("its files are gone")) == (404, True)


async def test_urls_hold_for_an_hour_or_as_long_as_the_checkpoint(world: World, directory: Path) -> None:
    soon = time.time() + 100
    for expires_at, expected in ((None, time.time() + 3600), (soon, soon)):
        export = await record(world, directory, expires_at=expires_at)
        answer = (await world.http.get(f"{export}/external_weights_urls")).json()
        expires = datetime.fromisoformat(answer["expires"])
        assert expires.tzinfo is not None
        assert expected - 1 <= expires.timestamp() <= expected + 60
        if expires_at:
            assert expires.timestamp() <= expires_at


async def test_urls_are_at_the_address_that_the_client_used(world: World, export: str) -> None:
    forwarded = {
        "X-Forwarded-Proto": "https",
        "X-Forwarded-Host": "front.example",
        "X-Forwarded-Prefix": "/tinker",
    }
    for url in (await urls_of(world, export, Host="10.0.0.7:8000", **forwarded)).values():
        assert url.startswith("http://10.0.0.7:8000/download/")


async def test_urls_are_at_the_proxys_address_where_a_setting_says_so(
    settings: Settings, directory: Path
) -> None:
    async with running(settings.model_copy(update={"trust_forwarded": True})) as world:
        export = await record(world, directory)
        forwarded = {
            "X-Forwarded-Proto": "https",
            "X-Forwarded-Host": "front.example, inner",
            "X-Forwarded-Prefix": "/tinker/",
        }
        for url in (await urls_of(world, export, **forwarded)).values():
            assert url.startswith("https://front.example/tinker/download/")
            inner = urlsplit(url.replace("https://front.example/tinker", "http://api"))
            assert (await world.http.get(urlunsplit(inner))).status_code == 200
        for url in (await urls_of(world, export)).values():
            assert url.startswith("http://api/download/")


def changed(url: str, path: str | None = None, **query: str) -> str:
    parts = urlsplit(url)
    pairs = dict(parse_qsl(parts.query)) | query
    return urlunsplit(parts._replace(path=path or parts.path, query=urlencode(pairs)))


async def refusal(world: World, url: str) -> tuple[int, str]:
    answer = await world.http.get(url)
    assert answer.headers["Content-Length"] == str(len(answer.content))
    return answer.status_code, str(answer.json()["detail"])


async def test_a_changed_url_is_refused(world: World, export: str) -> None:
    urls = await urls_of(world, export)
    url = urls["config.json"]
    other = urlsplit(urls[LARGE]).path
    later = str(int(dict(parse_qsl(urlsplit(url).query))["expires"]) + 1)
    wrong = (
        changed(url, path=other),
        changed(url, expires=later),
        changed(url, expires="1e99"),
        changed(url, signature="0" * 64),
        changed(url, signature="ü"),
        changed(url, path="/download/checkpoint/99999999999999999999/config.json"),
        changed(url, path="/download/trace/somebody"),
    )
    for each in wrong:
        status, detail = await refusal(world, each)
        assert status == 403
        assert "changed" in detail
    for name in ("expires", "signature"):
        status, detail = await refusal(world, changed(url, **{name: ""}))
        assert status == 403
        assert "lacks expires or signature" in detail


async def test_an_expired_url_says_when_it_expired(world: World, export: str) -> None:
    world.patch.setattr(signing, "LIFE_S", -60)
    url = (await urls_of(world, export))["config.json"]
    status, detail = await refusal(world, url)
    assert status == 403
    assert detail.startswith("this URL expired at 20")


@pytest.mark.parametrize("name", ["manifest.json", "..", "../export/config.json", "%2e%2e", "nonsense"])
async def test_only_files_of_the_manifest_are_served_whatever_is_signed(
    world: World, export: str, name: str
) -> None:
    """The signature holds; so the name alone decides."""
    url = (await urls_of(world, export))["config.json"]
    path = f"{urlsplit(url).path.rpartition('/')[0]}/{name}"
    expires = signing.expiry()
    signature = world.services.signer._signature(path, str(expires))
    answer = await world.http.get(changed(url, path=path, expires=str(expires), signature=signature))
    assert answer.status_code in (403, 404)
    assert b'"a"' not in answer.content


async def test_a_deleted_checkpoint_is_404_and_so_is_one_whose_files_are_gone(
    world: World, export: str, directory: Path
) -> None:
    url = (await urls_of(world, export))["config.json"]
    (directory / "config.json").unlink()
    assert (await refusal(world, url))[0] == 404
    assert (await world.http.delete(export)).status_code == 200
    assert (await refusal(world, url))[0] == 404
    assert (await world.http.get(f"{export}/external_weights_urls")).status_code == 404


async def test_an_expired_checkpoint_is_404_though_its_url_is_fresh(world: World, export: str) -> None:
    url = (await urls_of(world, export))["config.json"]
    over = update(SavedCheckpoint).values(expires_at=time.time() - 1)
    await world.store.write(lambda conn: conn.execute(over))
    assert (await refusal(world, url))[0] == 404


@pytest.mark.parametrize("kind", [CheckpointKind.WEIGHTS, CheckpointKind.SAMPLER_WEIGHTS])
async def test_only_exports_have_urls(world: World, directory: Path, kind: CheckpointKind) -> None:
    where = await record(world, directory, kind)
    answer = await world.http.get(f"{where}/external_weights_urls")
    assert answer.status_code == 400
    assert "expected one made by save_weights_external" in answer.json()["detail"]


@pytest.mark.parametrize("step", ["start", "finish"])
async def test_an_upload_is_refused_with_what_to_do(world: World, step: str) -> None:
    answer = await world.post(f"external_weights_upload_{step}", {"upload_id": "u"})
    assert answer.status_code == 400
    assert "skyrl-tinker import-adapter" in answer.json()["detail"]


async def test_a_download_goes_on_in_pieces_though_urls_are_signed_anew_and_the_checkpoint_goes(
    world: World, export: str, directory: Path
) -> None:
    url = (await urls_of(world, export))[LARGE]

    seen: list[int] = []

    async def meanwhile() -> None:
        seen.append(1)
        if len(seen) == 1:
            await urls_of(world, export)
            await world.http.delete(export)
            shutil.rmtree(directory)

    pieces = await stream(world, url, meanwhile)
    assert b"".join(pieces) == FILES[LARGE]
    assert max(map(len, pieces)) <= 1 << 20
    assert (await refusal(world, url))[0] == 404


async def test_another_api_process_knows_the_signature(world: World, settings: Settings, export: str) -> None:
    url = (await urls_of(world, export))["config.json"]
    other = create_app(settings, world.store, world.services.bases, world.bell)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(other)) as http:
        assert (await http.get(url)).content == FILES["config.json"]


async def test_a_malformed_recipient_fails_the_save_at_once_and_takes_its_seq_id(world: World) -> None:
    model = await world.model()
    body = {"model_id": model, "seq_id": 1, "path": "e", "age_encryption_recipients": ["age1x"]}
    message = await world.failure((await world.ok("save_weights_external", body))["request_id"])
    assert message.startswith("age_encryption_recipients[0] is 'age1x', expected an age public key")
    good = {"model_id": model, "seq_id": 2, "path": "e", "ttl_seconds": None}
    await world.ok("save_weights_external", good)
    assert [row.seq_id for row in await world.queued()] == [0, 1, 2]
