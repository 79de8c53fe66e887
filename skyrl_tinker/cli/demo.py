"""`skyrl-tinker demo`: examples/rl_loop.py on a temporary server."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skyrl_tinker import config
from skyrl_tinker.bundled import bundled
from skyrl_tinker.directories import Directories
from skyrl_tinker.errors import StartupError
from skyrl_tinker.inference.sampling_engine import engine_of
from skyrl_tinker.server.announcement import READY
from skyrl_tinker.server.base_models import tiny_model
from skyrl_tinker.server.base_models.base_model import TINY
from skyrl_tinker.server.base_models.tiny_families import find_family
from skyrl_tinker.system import processes

_STOP_S = 20.0


@contextmanager
def background_server(home: Path, *options: str) -> Iterator[str]:
    """Run `skyrl-tinker serve --home HOME --port 0 OPTIONS…` and yield its URL once it is ready.

    It ends with the block, or with this process. Raises StartupError when it does not become ready; stderr
    then says why.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "skyrl_tinker", "serve", "--home", str(home), "--port", "0", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=processes.die_with_parent,
    )
    try:
        yield _wait_for_url(process)
    finally:
        _stop(process)


def _wait_for_url(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(READY):
            return line.removeprefix(READY).strip()
    raise StartupError(f"the server ended while starting (exit code {process.wait()})")


def _stop(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdout is not None
    process.stdout.close()


def run_demo(out: Path, seed: int, steps: int, arch: str, **engine: Any) -> bool:
    """Return whether the policy learned. After a failure the server's temporary home is kept for its logs.

    `engine`: settings of the sampling engine, None where not given.
    """
    find_family(arch)  # before there is anything to delete
    seeded = engine_of(config.load(**engine)).abilities.seed
    given = [f"--{name.replace('_', '-')}={value}" for name, value in engine.items() if value is not None]
    home = Path(tempfile.mkdtemp(prefix="skyrl-tinker-demo-"))
    tiny_model.make_model(Directories(config.load(home=home)).models_dir / TINY, arch=arch)
    print("starting a server (half a minute) …", file=sys.stderr)
    try:
        with background_server(home, *given) as url:
            learned = _learn(url, out, steps, f"--seed={seed}", *([] if seeded else ["--unseeded"]))
    except (OSError, StartupError):  # of a server that does not start or end: its logs explain it
        print(f"logs: {home / 'logs'}", file=sys.stderr)
        raise
    except KeyboardInterrupt:
        _delete(home)
        raise
    _delete(home)
    return learned


def _delete(home: Path) -> None:
    shutil.rmtree(home)
    Directories(config.load(home=home)).delete_outside_home()


def _learn(url: str, out: Path, steps: int, *seeds: str) -> bool:
    loop = [sys.executable, str(bundled("examples") / "rl_loop.py"), "--out", str(out)]
    environment = os.environ | {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-local"}
    return subprocess.run([*loop, *seeds, f"--steps={steps}"], env=environment).returncode == 0
