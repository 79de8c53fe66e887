"""The kernels of liger-kernel compute what stands for them on a CPU."""

import json
import subprocess
import sys
from importlib.util import find_spec

from skyrl_tinker.training.models.fused import liger


def test_it_is_found_where_it_and_triton_are_installed() -> None:
    assert liger.installed() == bool(find_spec("liger_kernel") and find_spec("triton"))


def test_its_kernels_interpreted_compute_what_stands_for_them() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.training.support.liger_interpreted"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    errors = json.loads(ended.stdout.splitlines()[-1])
    assert errors.keys() == {"product", "gate", "up", "query", "key"}
    assert max(errors.values()) < 1e-5, errors
