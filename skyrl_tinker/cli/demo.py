"""`skyrl-tinker demo`: a server of its own around examples/rl_loop.py."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from skyrl_tinker import config
from skyrl_tinker.background import background_server
from skyrl_tinker.bundled import bundled
from skyrl_tinker.directories import Directories


def run_demo(out: Path, seed: int, steps: int) -> bool:
    """True if the policy learned. The server's home is temporary; after a failure it stays, for its logs."""
    home = Path(tempfile.mkdtemp(prefix="skyrl-tinker-demo-"))
    print("starting a server (half a minute) …", file=sys.stderr)
    try:
        with background_server(home) as url:
            learned = _learn(url, out, seed, steps)
    except Exception:  # whatever it was, the logs tell of it: they stay
        print(f"logs: {home / 'logs'}", file=sys.stderr)
        raise
    except KeyboardInterrupt:
        _delete(home)
        raise
    _delete(home)
    return learned


def _delete(home: Path) -> None:
    shutil.rmtree(home)
    Directories(config.load(home=home)).forget_everything()


def _learn(url: str, out: Path, seed: int, steps: int) -> bool:
    loop = [sys.executable, str(bundled("examples") / "rl_loop.py"), "--out", str(out)]
    environment = os.environ | {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-local"}
    return (
        subprocess.run([*loop, "--seed", str(seed), "--steps", str(steps)], env=environment).returncode == 0
    )
