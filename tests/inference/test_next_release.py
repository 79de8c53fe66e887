"""The plugin in vLLM's next release: the tests of the installed one, in a process that imports the other."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.next_vllm import RELEASE, packages

pytestmark = [pytest.mark.servers, pytest.mark.long, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
SUITE = (
    "tests/inference/client/test_packed_answers.py",
    "tests/inference/client/test_sampling_port.py",
    "tests/inference/test_packed.py",
    "tests/inference/vllm",
    "tests/weight_sync/test_full_parameters.py",
)


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{packages()}:{ROOT}"}


def test_its_servers_are_of_that_release(environment: dict[str, str]) -> None:
    asked = [sys.executable, "-c", "import vllm.version; print(vllm.version.__version__)"]
    told = subprocess.run(asked, env=environment, check=True, capture_output=True, text=True)
    assert told.stdout.strip() == RELEASE


@pytest.mark.parametrize("tests", SUITE)
def test_the_plugin_keeps_its_promises(environment: dict[str, str], tests: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
    ran = subprocess.run(command, env=environment, cwd=ROOT, check=False)
    assert ran.returncode == 0, f"{tests} fails with vLLM {RELEASE}"
