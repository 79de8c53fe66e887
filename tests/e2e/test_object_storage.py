"""A server whose checkpoints are in object storage: what it has on its own disk is a cache."""

import shutil
import tarfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from io import BytesIO
from pathlib import Path

import httpx
import pytest
import tinker

from tests.e2e.support.client import Client, prompt, random_tokens
from tests.faults.test_engine_death import client_of, rounds
from tests.support.object_storage import BUCKET, ObjectStorage, object_storage
from tests.support.serve import HEAL_S, Serve, serving, wait_until

TOKENS = random_tokens(30, seed=1)


@pytest.fixture(scope="module")
def s3() -> Iterator[ObjectStorage]:
    with object_storage() as server:
        yield server


@pytest.fixture(autouse=True)
def api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")


def started(home: Path) -> AbstractContextManager[Serve]:
    return serving(home, "--checkpoints", f"s3://{BUCKET}/run")


def test_checkpoints_outlive_the_disk_of_the_server(s3: ObjectStorage, tmp_path: Path) -> None:
    home = tmp_path / "home"
    with started(home) as server, client_of(server) as client:
        expected = rounds([client.new_lora()], 3)
        training = client.new_lora()
        assert rounds([training], 2) == expected[:2]
        state = training.save_state("state").result().path
        sampler = training.save_weights_for_sampler("sampled").result().path
        scored = scores(client, sampler)
        kept = s3.keys("run/")
        assert len([key for key in kept if key.endswith("/manifest.json")]) == 2
    shutil.rmtree(home / "checkpoints")
    with started(home) as server, client_of(server) as client:
        assert scores(client, sampler) == pytest.approx(scored, abs=1e-5)
        resumed = client.service.create_training_client_from_state_with_optimizer(state).result()
        assert rounds([resumed], 1, first=2) == expected[2:]
        shutil.rmtree(home / "checkpoints")
        rest = tinker.RestClient(base_url=server.url)
        run, checkpoint = sampler.removeprefix("tinker://").split("/", 1)
        route = f"{server.url}/api/v1/training_runs/{run}/checkpoints/{checkpoint}/archive"
        answer = httpx.get(route, headers={"X-API-Key": "tml-local"}, follow_redirects=True, timeout=60)
        with tarfile.open(fileobj=BytesIO(answer.raise_for_status().content)) as archive:
            assert "adapter_model.safetensors" in archive.getnames()
        assert s3.keys("run/") == kept
        rest.delete_checkpoint_from_tinker_path(state).result()
        left = {key for key in kept if "/sampler_weights/" in key}
        assert wait_until(lambda: s3.keys("run/") == left, HEAL_S), s3.keys("run/")


def scores(client: Client, path: str) -> list[float | None]:
    sampler = client.service.create_sampling_client(model_path=path).result()
    return sampler.compute_logprobs(prompt(TOKENS)).result()[1:]
