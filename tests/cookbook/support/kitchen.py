"""A directory from which tinker-cookbook's recipes run offline, and what a run of one leaves behind."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cookbook.support import data

MODEL = "Qwen/Qwen3-4B-Instruct-2507"  # recipes choose their renderer by this name; a directory of it is here
TEACHER = "Qwen/Qwen3-30B-A3B-Instruct-2507"  # likewise
RENDERER = "qwen3_instruct"
REPOSITORY = Path(__file__).parents[3]

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """What a recipe wrote to its log_path."""

    log_path: Path

    @property
    def metrics(self) -> list[Row]:
        """One row for each step of training; some loops write a last one that only sums up."""
        rows = read_jsonl(self.log_path / "metrics.jsonl")
        return [row for row in rows if any(key.startswith("progress") for key in row)]

    @property
    def checkpoints(self) -> list[Row]:
        return read_jsonl(self.log_path / "checkpoints.jsonl")

    @property
    def settings(self) -> Row:
        """Those given and the recipe's defaults."""
        return json.loads((self.log_path / "config.json").read_text())

    def column(self, name: str) -> list[float]:
        return [row[name] for row in self.metrics]


class Kitchen:
    """Model, one of a teacher or judge, datasets and logs of all runs, under one working directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model_directory = directory / MODEL
        for seed, made in enumerate((self.model_directory, directory / TEACHER)):
            command = [sys.executable, "-m", "skyrl_tinker", "make-model", str(made), "--seed", str(seed)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        data.write_all(directory)
        self.url = ""

    def write_config(self) -> Path:
        """Settings of a server of both models, each by its name at the hub, as a file for --config."""
        own = f'base_model = "{self.model_directory}"\nmodel_name = "{MODEL}"\n'
        other = f'model_name = "{TEACHER}"\nroles = ["train", "sample"]\n'
        (file := self.directory / "server.toml").write_text(
            f'{own}[bases."{self.directory / TEACHER}"]\n{other}'
        )
        return file

    def cook(self, recipe: str, name: str, *arguments: str) -> Run:
        """`python -m tinker_cookbook.recipes.RECIPE ...` as a user runs it; AssertionError if it fails."""
        return self.run(f"tinker_cookbook.recipes.{recipe}", name, *arguments)

    def run(self, module: str, name: str, *arguments: str) -> Run:
        """`python -m MODULE ...`, with the arguments that most recipes take before those given."""
        run = self.log(name)
        common = [f"model_name={MODEL}", f"log_path={run.log_path}", f"base_url={self.url}"]
        self.call(module, *common, *arguments)
        return run

    def call(self, module: str, *arguments: str) -> str:
        """`python -m MODULE ...` in the working directory, and its output; AssertionError if it fails."""
        finished = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=self.directory,
            env=os.environ | self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert finished.returncode == 0, finished.stdout[-5000:]
        return finished.stdout

    def log(self, name: str, *checkpoints: Row) -> Run:
        """The log_path of that name; with checkpoints, as a run that ended after them left it."""
        run = Run(self.directory / "logs" / name)
        if checkpoints:
            data.write_jsonl(run.log_path / "checkpoints.jsonl", checkpoints)
        return run

    def _environment(self) -> dict[str, str]:
        """No way out to a hub, and this repository's modules."""
        return {
            "PYTHONPATH": str(REPOSITORY),
            "TINKER_API_KEY": "tml-local",
            "TINKER_BASE_URL": self.url,
            "TINKER_COOKBOOK_RUNS_DIR": str(self.directory / "logs"),
            "TINKER_TELEMETRY": "0",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HOME": str(self.directory / "huggingface"),
        }


def read_jsonl(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]
