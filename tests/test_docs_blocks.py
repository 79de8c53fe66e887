"""Every block of README and docs is run by a test, or named here with the reason why it is not."""

import os
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.main import get_command

from skyrl_tinker import config
from skyrl_tinker.cli.commands import app
from tests.support.pages import ROOT, block, blocks

HERE = "tests/test_docs_blocks.py"
GPU = "it needs a GPU, or a model from the hub"
ENGINE = "it needs Docker"
MINUTES = "it installs, builds or tests for minutes"
PICTURE = "it is read, not run"
BLOCKS = {
    "README.md: scripts/demo": "tests/e2e/test_demo.py::test_the_reward_rises_by_learning_whatever_the_seed",
    "README.md: .venv/bin/skyrl-tinker serve": (
        "tests/e2e/test_readme.py::test_the_readmes_example_runs_and_learns"
    ),
    "README.md: import tinker": "tests/e2e/test_readme.py::test_the_readmes_example_runs_and_learns",
    "README.md: tinker SDK ── HTTP ──► API (FastAPI) ──► store (SQ": PICTURE,
    "CONTRIBUTING.md: scripts/setup cpu tests": MINUTES,
    "CONTRIBUTING.md: .venv/bin/python -m pytest tests/engine/scheduling": MINUTES,
    "CONTRIBUTING.md: python3 -m venv /tmp/release": MINUTES,
    'CONTRIBUTING.md: git tag -s v0.1.0 -m "skyrl-tinker 0.1.0"': "it publishes",
    "docs/architecture.md: tinker SDK / cookbook / curl / OpenAI clients": PICTURE,
    "docs/architecture.md: alembic/ the schema's migrations": PICTURE,
    "docs/benchmarks.md: scripts/bench/latency.py": MINUTES,
    "docs/cluster.md: kubectl create secret generic tinker --from-litera": "it needs Kubernetes",
    "docs/cluster.md: helm install kuberay-operator kuberay-operator --r": "it needs Kubernetes",
    "docs/cluster.md: head=$(kubectl get pods --selector app=tinker-serv": "it needs Kubernetes",
    "docs/cluster.md: ray start --head --node-ip-address=10.0.0.1 --port": "tests/faults/test_cluster.py",
    "docs/cluster.md: scripts/cluster-up skyrl-tinker serve --home /var/": "tests/scripts/test_cluster_up.py",
    "docs/cluster.md: load balancer, any policy": PICTURE,
    "docs/cluster.md: skyrl-tinker serve --database-url postgresql+psyco": "tests/faults/test_api_hosts.py",
    "docs/cluster.md: pip install 'skyrl-tinker[postgresql]'": "tests/faults/test_api_hosts.py",
    "docs/cluster.md: skyrl-tinker serve --standby --database-url postgr": "tests/faults/test_standby.py",
    "docs/cluster.md: export SKYRL_TINKER_DATABASE_URL=postgresql+psycop": "tests/faults/test_standby.py",
    "docs/cookbook.md: .venv/bin/skyrl-tinker make-model my-model": "tests/cookbook/support/kitchen.py",
    "docs/cookbook.md: export TINKER_BASE_URL=http://127.0.0.1:8000 TINKE": "tests/cookbook/test_rl.py",
    "docs/cookbook.md: .venv/bin/python examples/rl_loop.py": "tests/e2e/test_demo.py",
    "docs/cookbook.md: .venv/bin/skyrl-tinker serve --base-model Qwen/Qwe": GPU,
    "docs/cookbook.md: .venv/bin/skyrl-tinker serve --device cuda --base-": GPU,
    "docs/cookbook.md: import tinker": "tests/e2e/test_bases.py::test_the_example_of_the_page_distills",
    'docs/cookbook.md: base_model = "Qwen/Qwen3-4B"': (
        f"{HERE}::test_the_example_of_further_base_models_is_one"
    ),
    "docs/cookbook.md: mkdir -p my-model": (
        "tests/e2e/test_readme.py::test_the_models_tokenizer_arrives_by_the_cookbook_pages_commands"
    ),
    "docs/dashboard.md: skyrl-tinker follow LOG_PATH": "tests/cli/test_metrics_file.py",
    "docs/docker.md: docker compose -f docker/compose.yaml --profile cp": ENGINE,
    "docs/docker.md: export TINKER_BASE_URL=http://127.0.0.1:8000": ENGINE,
    "docs/docker.md: docker compose -f docker/compose.yaml exec server": ENGINE,
    "docs/docker.md: mkdir -p ~/tinker/data ~/tinker/cache": ENGINE,
    "docs/external-samplers.md: export SKYRL_TINKER_VLLM=1 VLLM_SERVER_DEV_MODE=1": (
        "tests/e2e/test_external_samplers.py"
    ),
    "docs/external-samplers.md: export SGLANG_RETURN_ORIGINAL_LOGPROB=1 SGLANG_ENA": (
        "tests/e2e/test_sglang_external.py"
    ),
    "docs/gpus-and-replicas.md: scripts/gpu-check": "tests/scripts/test_gpu_check.py",
    "docs/gpus-and-replicas.md: skyrl-tinker plan --base-model Qwen/Qwen3-8B --gpu": "tests/cli/test_plan.py",
    'docs/gpus-and-replicas.md: base_model = "Qwen/Qwen3-8B"': (
        f"{HERE}::test_the_example_of_further_base_models_is_one"
    ),
    "docs/gpus-and-replicas.md: sample_concurrency = 512": (
        f"{HERE}::test_the_example_of_a_settings_file_is_one"
    ),
    "docs/losses.md: sum over sampled tokens of m * ( -sg(min(r, ratio_": PICTURE,
    "docs/losses.md: sampler = training.save_weights_and_get_sampling_c": (
        "tests/e2e/test_readme.py::test_the_example_of_stable_reinforce_trains"
    ),
    "docs/backup-and-recovery.md: pip install 'skyrl-tinker[postgresql]'": (
        "tests/faults/test_database_away.py"
    ),
    "docs/backup-and-recovery.md: pip install 'skyrl-tinker[s3]'": "tests/e2e/test_object_storage.py",
    "docs/backup-and-recovery.md: skyrl-tinker checkpoints list --older-than 30d": (
        "tests/cli/test_checkpoint_commands.py"
    ),
    "docs/running.md: .venv/bin/skyrl-tinker serve --base-model student": "tests/e2e/test_trained_bases.py",
    "docs/running.md: .venv/bin/skyrl-tinker serve --replicas 0": "tests/e2e/test_training_only.py",
    'docs/running.md: base_model = "Qwen/Qwen3-8B"': (
        f"{HERE}::test_the_example_of_further_base_models_is_one"
    ),
    'docs/running.md: base_model = "student"': f"{HERE}::test_the_example_of_one_on_demand_is_one",
    "docs/running.md: tinker checkpoint download tinker://RUN/weights/NA": "tests/e2e/test_download.py",
    "docs/running.md: from peft import PeftModel": GPU,
    "docs/running.md: [Unit]": "it needs systemd",
    "docs/quick-start.md: scripts/setup cpu": MINUTES,
    "docs/quick-start.md: export TINKER_BASE_URL=http://127.0.0.1:8000 TINKE": (
        "tests/e2e/test_examples.py::test_sft_learns_its_answers"
    ),
    "docs/quick-start.md: scripts/setup gpu": GPU,
    "docs/quick-start.md: .venv/bin/skyrl-tinker serve --base-model Qwen/Qwe": GPU,
    "docs/quick-start.md: python3 -m venv tinker": "tests/e2e/test_wheel.py",
    "docs/samplers.md: python3 -m venv sglang-env": "tests/e2e/test_sglang.py",
    'docs/samplers.md: base_model = "Qwen/Qwen3-4B"': (
        f"{HERE}::test_the_example_of_further_base_models_is_one"
    ),
    "docs/security.md: openssl req -x509 -newkey rsa:2048 -nodes -days 30": (
        "tests/api/test_tls.py::test_the_sdk_trains_and_samples_over_tls"
    ),
    "docs/security.md: [Interface]": "tests/faults/test_tunnel.py",
    "docs/security.md: server {": "it needs nginx",
    "docs/security.md: tinker.example {": "it needs Caddy",
    "docs/sizing.md: skyrl-tinker plan --base-model Qwen/Qwen3-8B --gpu": "tests/cli/test_plan.py",
}
"""By page and beginning: the test that runs the block or the same at another size, or why there is none."""


def test_every_block_is_run_by_a_test_or_named_with_a_reason() -> None:
    assert {each.name for each in blocks()} == BLOCKS.keys()


def test_every_test_that_runs_a_block_exists() -> None:
    tests = [where.partition("::") for where in BLOCKS.values() if where.startswith("tests/")]
    assert not [(file, test) for file, _, test in tests if f"def {test}" not in (ROOT / file).read_text()]


def _commands() -> Iterator[list[str]]:
    """The words of each command of each shell block."""
    for each in blocks():
        if each.language in ("sh", "bash"):
            for line in each.text.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    yield words


def _parse(words: list[str]) -> None:
    """Parse as our command line does, which ends on an unknown command, option or value."""
    command = get_command(app)
    context = command.context_class(command)
    while hasattr(command, "resolve_command"):
        name, command, words = command.resolve_command(context, words)
    command.make_context(name, words)


def test_the_command_line_takes_every_command_of_the_pages() -> None:
    ours = [
        words[place + 1 :]
        for words in _commands()
        for place, word in enumerate(words)
        if word == "skyrl-tinker" or word.endswith("/bin/skyrl-tinker")
    ]
    assert len(ours) > 9
    for words in ours:
        _parse(words)


@pytest.mark.parametrize("words", [["serve", "--no-such-option"], ["no-such-command"]])
def test_the_command_line_takes_no_others(words: list[str]) -> None:
    with pytest.raises(Exception, match="No such"):
        _parse(words)


def test_every_script_and_module_of_the_pages_exists() -> None:
    for words in _commands():
        if words[0].startswith("scripts/"):
            assert os.access(ROOT / words[0], os.X_OK), words
        elif words[0] == ".venv/bin/python":
            assert find_spec(words[2]) if words[1] == "-m" else (ROOT / words[1]).exists(), words


def test_the_example_of_a_settings_file_is_one(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(block("docs/gpus-and-replicas.md: sample_concurrency = 512").text)
    assert config.load(tmp_path / "settings.toml").vllm_args["quantization"] == "fp8"


def test_the_example_of_further_base_models_is_one(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(block('docs/cookbook.md: base_model = "Qwen/Qwen3-4B"').text)
    assert config.load(tmp_path / "settings.toml").for_base("Qwen/Qwen3-8B").replicas == 2
    (tmp_path / "settings.toml").write_text(block('docs/running.md: base_model = "Qwen/Qwen3-8B"').text)
    trained = config.load(tmp_path / "settings.toml").bases["Qwen/Qwen3-4B"]
    assert (trained.trains, trained.trainer_ranks) == (True, 1)
    (tmp_path / "settings.toml").write_text(
        block('docs/gpus-and-replicas.md: base_model = "Qwen/Qwen3-8B"').text
    )
    (teacher,) = config.load(tmp_path / "settings.toml").bases.values()
    assert (teacher.roles, teacher.tensor_parallel_size) == (("sample",), 2)
    (tmp_path / "settings.toml").write_text(block('docs/samplers.md: base_model = "Qwen/Qwen3-4B"').text)
    sampled = config.load(tmp_path / "settings.toml").for_base("Qwen/Qwen3-8B")
    assert (sampled.sampler_engine, sampled.sampler_python) == (
        "sglang",
        Path.cwd() / "sglang-env/bin/python",
    )


def test_the_example_of_one_on_demand_is_one(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(block('docs/running.md: base_model = "student"').text)
    settings = config.load(tmp_path / "settings.toml")
    assert (settings.idle_s_of("other"), settings.idle_s_of("student")) == (600.0, None)
