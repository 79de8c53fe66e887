"""HTTPS by the API itself, spoken to by the unmodified SDK."""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

from skyrl_tinker.store.database.migrate import migrate
from skyrl_tinker.store.store import Store
from tests.api.support.engine import working
from tests.api.support.process import launched
from tests.api.support.world import settings_for, write_facts
from tests.support.certificates import write_certificate

ROOT = Path(__file__).parents[2]


async def test_the_sdk_trains_and_samples_over_tls(tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        settings = settings_for(tmp_path / "home", port=port, tls_cert=cert, tls_key=key)
        migrate(settings.store_url)
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
