"""An adapter that PEFT trained elsewhere goes on here, imported while the server runs."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tinker

from tests.e2e.support.client import Client, logprobs_of, random_tokens, train
from tests.support.peft_adapters import save_adapter, token_logprobs
from tests.support.serve import Serve

pytestmark = pytest.mark.long

TOKENS = random_tokens(40, seed=5)


def run_import(server: Serve, adapter: Path, *arguments: str) -> str:
    """What the command prints."""
    command = [sys.executable, "-m", "skyrl_tinker", "import-adapter", str(adapter), *arguments]
    done = subprocess.run([*command, "--home", str(server.home)], capture_output=True, text=True, check=True)
    return done.stdout


def test_training_goes_on_from_a_foreign_adapter(
    server: Serve, client: Client, model_directory: str, tmp_path: Path
) -> None:
    config = {"r": 4, "lora_alpha": 20, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    peft = save_adapter(model_directory, tmp_path / "elsewhere", **config)
    path = run_import(server, tmp_path / "elsewhere", "--name", "start").removesuffix("\n")
    assert path.startswith("tinker://")
    assert path.endswith("/weights/start")
    training = client.service.create_training_client_from_state(path).result()
    expected = token_logprobs(peft.merge_and_unload(), TOKENS[:-1], TOKENS[1:]).numpy()
    found = logprobs_of(training, TOKENS)
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)
    train(training, TOKENS)
    assert np.abs(logprobs_of(training, TOKENS) - found).max() > 1e-4
    assert training.get_info().lora_rank == 4


def test_the_import_is_a_training_run_with_one_checkpoint(
    server: Serve, client: Client, model_directory: str, tmp_path: Path
) -> None:
    save_adapter(model_directory, tmp_path / "elsewhere", r=4, target_modules=["q_proj"])
    path = run_import(server, tmp_path / "elsewhere").strip()
    rest = tinker.RestClient(base_url=client.url)
    run = rest.get_training_run_by_tinker_path(path).result()
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.tinker_path == path
    assert (run.base_model, run.is_lora, run.lora_rank, run.corrupted) == ("tiny", True, 4, False)
    with pytest.raises(tinker.TinkerError, match="optimizer"):
        client.service.create_training_client_from_state_with_optimizer(path).result()
