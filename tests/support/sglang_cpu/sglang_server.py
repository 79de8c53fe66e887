"""A real SGLang server, and the interpreter that runs it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from skyrl_tinker.inference.servers.ports import LOOPBACK, reserve_port
from skyrl_tinker.inference.servers.replica_spec import SamplerSpec
from skyrl_tinker.inference.sglang.sglang_process import SglangProcess
from skyrl_tinker.system.processes import die_with_parent
from tests.support import serve

WHEELS = ("sglang==0.5.23", "xxhash", "easydict", "gguf", "scipy", "soundfile", "kernels<0.15")
START_S = 1200.0


def interpreter() -> Path:
    """Return an interpreter of this environment with SGLang, which is fetched unless it is there.

    The packages are for all checkouts; the interpreter is this one's own.
    """
    directory = Path.home() / ".cache" / "skyrl-tinker" / f"{WHEELS[0]}-{sys.implementation.cache_tag}"
    packages, fetched = directory / "packages", directory / "fetched"
    if not fetched.exists():
        fetch = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--target",
            str(packages),
            *WHEELS,
        ]
        subprocess.run(fetch, check=True)
        fetched.touch()
    command, path = Path(sys.prefix, "sglang-python"), f"{packages}:{Path(__file__).parent}"
    command.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {sys.executable} "$@"\n')
    command.chmod(0o755)
    return command


@contextmanager
def sampling(home: Path, *options: str, **settings: str) -> Iterator[serve.Serve]:
    """Start skyrl-tinker, whose samples SGLang makes. `settings`: further ones, in capital letters."""
    chosen = {"SAMPLER_ENGINE": "sglang", **settings}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in chosen.items():
            patch.setenv(f"SKYRL_TINKER_{name}", value)
        with serve.serving(home, *options, within_s=START_S) as server:
            yield server


@contextmanager
def serving(spec: SamplerSpec, python: Path) -> Iterator[str]:
    """Start a server of its own; yields its URL."""
    engine = SglangProcess(python)
    with reserve_port(LOOPBACK) as guard, Path(spec.log_dir, "sglang.log").open("wb") as log:
        port = guard.getsockname()[1]
        process = subprocess.Popen(
            engine.command(replace(spec, engine=engine), port, LOOPBACK),
            env=engine.environment(spec, 0, "lo"),
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        url = f"http://{LOOPBACK}:{port}"
        try:
            _wait(process, url, Path(log.name))
            yield url
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            with urlopen(f"{url}/health"):
                return
        except (URLError, OSError):
            time.sleep(0.5)
    raise TimeoutError(log.read_text()[-4000:])
