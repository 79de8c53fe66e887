"""The README's example is what a newcomer runs first."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.e2e.support.client import Client

README = Path(__file__).parents[2] / "README.md"


def test_the_readmes_example_runs_and_learns(client: Client) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    environment = {**os.environ, "TINKER_BASE_URL": client.url, "TINKER_API_KEY": "tml-local"}
    command = [sys.executable, "-W", "ignore", "-c", example]
    printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    *steps, answer = printed.split("\n")[:-1]
    losses = [float(step.split()[0]) for step in steps]
    assert losses[-1] < losses[0] / 2
    assert answer == "4"
