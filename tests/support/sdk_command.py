"""The `tinker` command of the SDK, as its users call it."""

import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

COMMAND = """
import sys
sys.modules["torch"] = None  # an extra of the SDK, which takes seconds to import
sys.argv[0] = "tinker"
from tinker.cli.__main__ import cli
sys.exit(cli())
"""


def run_tinker(
    arguments: tuple[str, ...], environment: Mapping[str, str], **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run it, once more if Python aborts, as it may at its end while a thread of the SDK writes.

    That is python/cpython#86883; these commands may be repeated.
    """
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, *arguments], env=environment, text=True, **options
        )
        if done.returncode != -signal.SIGABRT:
            break
    return done
