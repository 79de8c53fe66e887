"""A rank needs torch, transformers, safetensors, psutil and NumPy, and nothing else of the server."""

import subprocess
import sys

import pytest

REFUSED = "pydantic pydantic_settings orjson ray vllm fastapi starlette uvicorn sqlalchemy aiohttp pytest"
PROGRAM = """
import importlib, sys

refused, module = sys.argv[1].split(), sys.argv[2]

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ImportError(f"{name} is refused here")

sys.meta_path.insert(0, Refuse())
importlib.import_module(module)
"""


def _import(module: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, REFUSED, module]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("module", ["skyrl_tinker.training.worker", "skyrl_tinker.weight_sync.cuda_ipc"])
def test_a_rank_imports_no_server(module: str) -> None:
    imported = _import(module)
    assert imported.returncode == 0, imported.stderr


def test_an_import_of_the_server_would_be_seen() -> None:
    imported = _import("skyrl_tinker.config")
    assert "is refused here" in imported.stderr
