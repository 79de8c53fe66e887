"""HTTPS by the API itself, spoken to by the unmodified SDK."""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

from skyrl_tinker.store.store import Store
from tests.api.support.engine import working
from tests.api.support.process import launched
from tests.api.support.world import new_home, write_facts
from tests.support.pages import block

ROOT = Path(__file__).parents[2]


def certificate_of_the_page(directory: Path) -> tuple[Path, Path]:
    """Make one by the first command of docs/security.md. Returns its path and that of its key."""
    page = block("docs/security.md: openssl req -x509 -newkey rsa:2048 -nodes -days 30").text
    command = page.partition("\nskyrl-tinker")[0]
    subprocess.run(command, shell=True, cwd=directory, check=True, capture_output=True)
    return directory / "cert.pem", directory / "key.pem"


async def test_the_sdk_trains_and_samples_over_tls(tmp_path: Path) -> None:
    cert, key = certificate_of_the_page(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        settings = new_home(tmp_path / "home", port=port, tls_cert=cert, tls_key=key)
        store = Store.open(settings.store_url)
        await write_facts(store)
        with launched(settings, listener) as api:
            await asyncio.to_thread(api.wait_until_up)
            async with working(store, settings.root):
                command = [
                    sys.executable,
                    "-m",
                    "tests.api.support.sdk_scenarios",
                    api.url,
                    "train_and_sample",
                ]
                variables = {**os.environ, "TINKER_API_KEY": "tml-test", "SSL_CERT_FILE": str(cert)}
                user = await asyncio.to_thread(
                    subprocess.run, command, cwd=ROOT, env=variables, timeout=300, check=False
                )
        await store.close()
    assert user.returncode == 0
