"""Base models of the hub: the description first, weights while the API listens."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from skyrl_tinker import config
from skyrl_tinker.directories import Directories
from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.errors import StartupError
from skyrl_tinker.server.base_models import base_model, hub, tiny_model, weights_download
from skyrl_tinker.store import server_state
from skyrl_tinker.store.database.migrate import migrate
from skyrl_tinker.store.store import write_once
from tests.api.support.world import FACTS
from tests.support.hub import COMMIT, NAME, Hub
from tests.support.serve import Serve
from tests.support.waiting import PATIENCE_S, wait_until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hub") / "model"
    tiny_model.make_model(directory)
    (directory / "consolidated.safetensors").write_bytes(b"the same weights")
    (directory / "pytorch_model.bin").write_bytes(b"the same weights")
    return directory


def _environment(served: Hub, cache: Path) -> dict[str, str]:
    return {**os.environ, "HF_ENDPOINT": served.url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}


FETCH = """
import sys
from pathlib import Path
from skyrl_tinker import config
from skyrl_tinker.domain.weight_files import listed_weights
from skyrl_tinker.server.base_models import base_model, hub
facts = base_model.resolve(config.load(base_model=sys.argv[1]))
print(facts.directory)
hub.fetch_weights(facts.hub_name, Path(facts.directory), lambda done, size: print(done, size))
listed_weights(Path(facts.directory))
"""


def _fetch(environment: dict[str, str]) -> list[str]:
    command = [sys.executable, "-c", FETCH, NAME]
    return subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.splitlines()


def test_weights_come_after_the_description_and_only_once(model: Path, tmp_path: Path) -> None:
    with Hub(model).serve() as served:
        served.give_weights()
        environment = _environment(served, tmp_path)
        directory, *reports = _fetch(environment)
        assert Path(directory).name == COMMIT
        assert served.fetched[-1] == "model.safetensors"
        assert "tokenizer.json" in served.fetched
        assert not {"consolidated.safetensors", "pytorch_model.bin"} & {*served.fetched}
        size = (model / "model.safetensors").stat().st_size
        assert reports[-1] == f"{size} {size}"
        assert (Path(directory) / "model.safetensors").read_bytes() == (
            model / "model.safetensors"
        ).read_bytes()
        known = len(served.fetched)
        assert _fetch(environment) == [directory]
        assert len(served.fetched) == known
    assert _fetch({**environment, "HF_HUB_OFFLINE": "1"}) == [directory]


def test_the_api_listens_while_the_model_is_downloaded_and_ctrl_c_breaks_it_off(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Hub(model).serve() as served:
        for name, value in _environment(served, tmp_path / "cache").items():
            monkeypatch.setenv(name, value)
        home = tmp_path / "home"
        server = Serve(home, "--base-model", NAME)
        assert served.half_sent.wait(PATIENCE_S)
        settings = config.load(home=home)
        written = config.Settings.model_validate_json(Directories(settings).settings_file.read_text())
        url = f"http://127.0.0.1:{written.port}"
        waiting = f"downloading {NAME}: 0.00 of 0.00 GB"
        wait_until(lambda: _readiness(url) == (503, waiting))
        assert httpx.get(f"{url}/healthz").status_code == 200
        assert server.find("engine") is None
        server.stop()
        assert server.process.stderr is not None
        said = server.process.stderr.read()
        assert f"skyrl-tinker: {waiting}\n" in said


def test_the_engine_starts_while_a_further_model_is_downloaded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Hub(model).serve() as served:
        for name, value in _environment(served, tmp_path / "cache").items():
            monkeypatch.setenv(name, value)
        server = Serve(tmp_path / "home", "--also", NAME)
        assert served.half_sent.wait(PATIENCE_S)
        wait_until(lambda: server.find("engine"))
        server.stop()


def test_one_model_that_cannot_be_fetched_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config.load(home=tmp_path)
    (directories := Directories(settings)).make()
    migrate(settings.store_url)
    directories.settings_file.write_text(settings.model_dump_json())
    names = ("org/a", "org/b", "org/c")
    bases = Bases(tuple(replace(FACTS, directory=name, hub_name=name) for name in names))
    write_once(settings.store_url, lambda conn: server_state.put_bases(conn, bases))
    fetched = []

    def fetch(name: str, *_: object) -> None:
        fetched.append(name)
        if name == "org/b":
            raise StartupError("the hub has no org/b")

    monkeypatch.setattr(hub, "fetch_weights", fetch)
    assert weights_download.run(directories.settings_file, ["org/a"]) == 0
    assert fetched.pop() == "org/a"
    assert weights_download.run(directories.settings_file, ["org/b", "org/c"]) == 1
    assert fetched == ["org/b", "org/c"]
    assert caplog.messages[-1] == "ended: the hub has no org/b"


def _readiness(url: str) -> tuple[int, str]:
    try:
        answer = httpx.get(f"{url}/readyz")
    except httpx.TransportError:
        return 0, ""
    return answer.status_code, str(answer.json().get("detail"))


def test_a_model_that_is_not_served_is_refused_before_its_weights_come(model: Path, tmp_path: Path) -> None:
    with Hub(model).serve() as served:
        served.files["config.json"] = b'{"architectures": ["NoSuchForCausalLM"]}'
        refused = subprocess.run(
            [sys.executable, "-m", "skyrl_tinker", "serve", "--home", str(tmp_path), "--base-model", NAME],
            env=_environment(served, tmp_path / "cache"),
            capture_output=True,
            text=True,
            check=False,
        )
        assert refused.returncode == 1
        assert "architecture NoSuchForCausalLM is not supported" in refused.stderr
        assert "model.safetensors" not in served.fetched


def test_a_hub_that_cannot_be_reached_is_told_with_the_ways_around_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(StartupError, match=r"hub cannot be reached.*HF_ENDPOINT.*config\.json"):
        base_model.resolve(config.load(base_model="nobody/nothing"))


def test_a_name_that_no_hub_has_is_refused() -> None:
    with pytest.raises(StartupError, match="not a model directory, and the hub download failed"):
        base_model.resolve(config.load(base_model="no/such/directory"))
