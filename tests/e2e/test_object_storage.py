"""A server whose checkpoints and snapshots are in object storage: what its own disk has is a cache."""

import shutil
import tarfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from io import BytesIO
from pathlib import Path

import httpx
import pytest
import tinker

from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from tests.e2e.support.client import Client, prompt, random_tokens
from tests.faults.test_engine_death import rounds
from tests.support.object_storage import BUCKET, ObjectStorage, object_storage
from tests.support.serve import HEAL_S, Serve, serving
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long

TOKENS = random_tokens(30, seed=1)


@pytest.fixture(scope="module")
def s3() -> Iterator[ObjectStorage]:
    with object_storage() as server:
        yield server


def started(home: Path, port: int = 0) -> AbstractContextManager[Serve]:
    places = ("--checkpoints", f"s3://{BUCKET}/run", "--snapshots", f"s3://{BUCKET}/live")
    return serving(home, "--port", str(port), *places)


def test_models_and_checkpoints_outlive_the_disk_of_the_server(s3: ObjectStorage, tmp_path: Path) -> None:
    home = tmp_path / "home"
    with ExitStack() as outliving:
        with started(home) as server:
            client = outliving.enter_context(Client.of(server.url))
            expected = rounds([client.new_lora()], 3)
            training = client.new_lora()
            assert rounds([training], 2) == expected[:2]
            unnamed = training.save_weights_and_get_sampling_client().result()
            state = training.save_state("state").result().path
            sampler = training.save_weights_for_sampler("sampled").result().path
            export = training.save_weights_external("exported").result().path
            scored = scores(client, sampler)
            kept = s3.keys("run/")
            assert len(whole(kept)) == 3
            wait_until(lambda: len(whole(s3.keys("live/models/"))) == 2, HEAL_S)
            wait_until(lambda: len(whole(s3.keys("live/unnamed/"))) == 1, HEAL_S)
        places = Directories(Settings(home=home))
        for lost in (places.checkpoint_root, places.snapshot_dir, places.overflow_dir, places.ephemeral_dir):
            shutil.rmtree(lost)
        with started(home, int(server.url.rsplit(":", 1)[1])) as server:
            assert rounds([training], 1, first=2) == expected[2:]
            sampled = unnamed.compute_logprobs(prompt(TOKENS)).result(HEAL_S)
            assert sampled[1:] == pytest.approx(scored, abs=1e-5)
            assert scores(client, sampler) == pytest.approx(scored, abs=1e-5)
            resumed = client.service.create_training_client_from_state_with_optimizer(state).result()
            assert rounds([resumed], 1, first=2) == expected[2:]
            shutil.rmtree(places.checkpoint_root)
            archive = unpacked(server, sampler)
            files = downloaded(server, export)
            assert files["adapter_model.safetensors"] == archive["adapter_model.safetensors"]
            assert not list(places.checkpoint_root.rglob("*.safetensors"))
            assert s3.keys("run/") == kept
            tinker.RestClient(base_url=server.url).delete_checkpoint_from_tinker_path(state).result()
            left = {key for key in kept if "/weights/" not in key}
            wait_until(lambda: s3.keys("run/") == left, HEAL_S)
            outliving.close()  # a client takes its time to end without a server


def downloaded(server: Serve, path: str) -> dict[str, bytes]:
    """Return the files behind the SDK's URLs of an export."""
    urls = tinker.RestClient(base_url=server.url).get_external_weights_urls(path).result().urls
    return {name: httpx.get(url, timeout=60).raise_for_status().content for name, url in urls.items()}


def unpacked(server: Serve, path: str) -> dict[str, bytes]:
    """Return the files of an archive, as SDKs up to 0.35 get it."""
    run, checkpoint = path.removeprefix("tinker://").split("/", 1)
    route = f"{server.url}/api/v1/training_runs/{run}/checkpoints/{checkpoint}/archive"
    answer = httpx.get(route, headers={"X-API-Key": "tml-local"}, follow_redirects=True, timeout=60)
    with tarfile.open(fileobj=BytesIO(answer.raise_for_status().content)) as archive:
        return {each.name: archive.extractfile(each).read() for each in archive.getmembers()}


def whole(keys: set[str]) -> set[str]:
    """Return those that say that a directory is complete."""
    return {key for key in keys if key.endswith("/manifest.json")}


def scores(client: Client, path: str) -> list[float | None]:
    sampler = client.service.create_sampling_client(model_path=path).result()
    return sampler.compute_logprobs(prompt(TOKENS)).result()[1:]
