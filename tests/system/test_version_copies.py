"""Copies of versions: pulled once by all processes of a host, deleted when nobody holds them."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skyrl_tinker.inference.servers.version_server import VersionServer
from skyrl_tinker.system.interfaces import address_towards
from skyrl_tinker.system.version_copies import VersionCopies

FILES = {"adapter_model.safetensors": b"weights" * 100_000, "adapter_config.json": b"{}"}
ELSEWHERE = "http://192.0.2.9:8000"
"""Replica on a host that does not exist (RFC 5737): addresses of this host are found without asking it."""


@pytest.fixture
async def server() -> AsyncIterator[VersionServer]:
    server = VersionServer("/models/base")
    yield server
    await server.close()


@pytest.fixture
def version(tmp_path: Path) -> Path:
    directory = tmp_path / "home" / "v 1"  # a name to be quoted
    directory.mkdir(parents=True)
    for name, content in FILES.items():
        (directory / name).write_bytes(content)
    return directory


@pytest.fixture
async def url(server: VersionServer, version: Path) -> str:
    if address_towards(ELSEWHERE) is None:
        pytest.skip("this machine has no network interface but loopback")
    return await server.locate(ELSEWHERE, str(version))


async def test_replicas_of_this_host_read_where_the_files_lie(server: VersionServer, version: Path) -> None:
    assert await server.locate("http://127.0.0.1:8000", str(version)) == str(version)
    assert await server.locate(ELSEWHERE, "/models/base") == "/models/base"


async def test_a_copy_has_the_files_and_goes_with_the_last_who_holds_it(url: str, tmp_path: Path) -> None:
    one, two = VersionCopies(tmp_path / "copies"), VersionCopies(tmp_path / "copies")
    copy, same = await asyncio.gather(asyncio.to_thread(one.hold, url), asyncio.to_thread(two.hold, url))
    assert copy == same
    assert {file.name: file.read_bytes() for file in copy.iterdir()} == FILES
    one.release(url)
    assert copy.is_dir()
    two.release(url)
    two.release(url)
    assert list((tmp_path / "copies").iterdir()) == []


async def test_what_a_killed_process_held_goes_when_the_next_one_starts(url: str, tmp_path: Path) -> None:
    code = "from pathlib import Path; from skyrl_tinker.system.version_copies import VersionCopies\n"
    code += (
        f"VersionCopies(Path({str(tmp_path / 'copies')!r})).hold({url!r}); import os; os.kill(os.getpid(), 9)"
    )
    killed = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code])
    assert killed.returncode == -9
    assert any(path.is_dir() for path in (tmp_path / "copies").iterdir())
    VersionCopies(tmp_path / "copies")
    assert list((tmp_path / "copies").iterdir()) == []


async def test_nobody_guesses_a_url(url: str, tmp_path: Path) -> None:
    copies = VersionCopies(tmp_path / "copies")
    signature = url.split("/")[3]
    for wrong in (url.replace(signature, "0" * 64), url.replace("v%201", ""), f"{url}/../.."):
        with pytest.raises(OSError, match="404"):
            await asyncio.to_thread(copies.hold, wrong)
    assert list((tmp_path / "copies").iterdir()) == []


async def test_a_version_that_is_gone_leaves_nothing(url: str, version: Path, tmp_path: Path) -> None:
    await asyncio.to_thread(version.rename, version.with_name("elsewhere"))
    copies = VersionCopies(tmp_path / "copies")
    with pytest.raises(OSError, match="404"):
        await asyncio.to_thread(copies.hold, url)
    assert list((tmp_path / "copies").iterdir()) == []
