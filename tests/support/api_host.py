"""`skyrl-tinker api` as on another host: with a home of its own, without torch, Ray and vLLM."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skyrl_tinker.store.cluster.signing_secrets import FILE

ABSENT = ("torch", "ray", "transformers", "vllm", "peft")


class ApiHost:
    """Process on a free port. `secrets_of`: the home that it has the secrets of."""

    def __init__(self, home: Path, *options: str, secrets_of: Path | None = None) -> None:
        home.mkdir(parents=True)
        if secrets_of is not None:
            shutil.copy(secrets_of / FILE, home / FILE)
        absent = home / "absent"
        for module in ABSENT:
            (absent / module).mkdir(parents=True)
            (absent / module / "__init__.py").write_text(f"raise ImportError('{module} is not installed')")
        path = os.pathsep.join([str(absent), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "skyrl_tinker", "api", "--home", str(home), "--port", "0", *options]
        self.home = home
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=(home / "complaints").open("wb"),
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            cwd=home,
        )
        self.url = ""

    def wait_up(self) -> "ApiHost":
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("skyrl-tinker API listens: http"), self.complaints()
        self.url = line.split()[-1]
        return self

    def complaints(self) -> str:
        return (self.home / "complaints").read_text()

    def end(self) -> int:
        """End it in good order, unless it has ended. Returns the exit code."""
        self.process.terminate()
        code = self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@contextmanager
def api_host(home: Path, *options: str, secrets_of: Path | None = None) -> Iterator[ApiHost]:
    host = ApiHost(home, *options, secrets_of=secrets_of)
    try:
        yield host
    finally:
        host.end()
