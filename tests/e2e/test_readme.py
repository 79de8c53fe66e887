"""Blocks of README and docs, run as they stand there."""

import os
import subprocess
import sys
from pathlib import Path

from tinker import types

from tests.e2e.support.client import Client, prompt
from tests.support.pages import block


def test_the_readmes_example_runs_and_learns(client: Client) -> None:
    example = block("README.md: import tinker").text
    environment = {**os.environ, "TINKER_BASE_URL": client.url, "TINKER_API_KEY": "tml-local"}
    command = [sys.executable, "-W", "ignore", "-c", example]
    printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    *steps, answer = printed.split("\n")[:-1]
    losses = [float(step.split()[0]) for step in steps]
    assert losses[-1] < losses[0] / 2
    assert answer == "4"


def test_the_models_tokenizer_arrives_by_the_cookbook_pages_commands(client: Client, tmp_path: Path) -> None:
    environment = os.environ | {"TINKER_BASE_URL": client.url, "TINKER_API_KEY": "tml-local"}
    commands = ["bash", "-eo", "pipefail", "-c", block("docs/cookbook.md: mkdir -p my-model").text]
    subprocess.run(commands, env=environment, cwd=tmp_path, check=True)
    assert {"config.json", "tokenizer.json"} <= {file.name for file in (tmp_path / "my-model").iterdir()}


def test_the_example_of_stable_reinforce_trains(client: Client) -> None:
    example = block("docs/losses.md: sampler = training.save_weights_and_get_sampling_c")
    params = types.SamplingParams(max_tokens=4, stop=[])
    names = {"training": client.new_lora(), "types": types, "prompt": prompt([5, 6, 7]), "params": params}
    exec(example.text, names)
    losses = names["training"].forward_backward([names["datum"]], "stable_reinforce").result()
    assert losses.metrics["loss:sum"] != 0
