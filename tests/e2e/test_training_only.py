"""A server that only trains (`replicas = 0`): half the processes; a later start samples its weights."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import tinker
from tinker import types
from tinker_cookbook import weights

from tests.e2e.support.client import Client, datum, logprobs_of, prompt, random_tokens, train
from tests.support.processes import vllm_servers
from tests.support.serve import HEAL_S, Serve, serving

pytestmark = pytest.mark.long

TOKENS = random_tokens(40, seed=6)
REFUSED = "base_model 'tiny' is served for training only (replicas = 0), expected one that is sampled"
AFTERWARDS = "weights saved under a name can be sampled after a start of the server with samplers"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with serving(tmp_path_factory.mktemp("training_only") / "home", "--replicas", "0") as served:
        yield served


@pytest.fixture(scope="module")
def client(server: Serve) -> Iterator[Client]:
    with tinker.ServiceClient(base_url=server.url, api_key="tml-local") as service:
        yield Client(server.url, service)


def test_no_process_samples_and_the_server_tells_it(server: Serve) -> None:
    assert vllm_servers(server.process.pid) == []
    assert server.find("trainer") is not None
    assert server.find("router") is None
    (model,) = tinker.RestClient(base_url=server.url).get_server_capabilities().result().supported_models
    assert (model.model_name, model.trainable, model.sampleable) == ("tiny", True, False)
    now = httpx.get(f"{server.url}/api/v1/console/now", timeout=30).raise_for_status().json()
    assert (now["state"], now["problems"], now["replicas"], now["samplers"]) == ("ready", [], [], [])
    (served,) = now["server"]["base_models"]
    assert (served["replicas"], served["trainer_ranks"], served["sampleable"]) == (0, 1, False)


def test_fine_tuning_learns_and_its_state_comes_back(client: Client, tmp_path: Path) -> None:
    training = client.new_lora()
    losses = []
    for _ in range(8):
        done = training.forward_backward([datum(TOKENS)], "cross_entropy")
        step = training.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(done.result().metrics["loss:sum"])
        step.result()
    assert losses[-1] < 0.7 * losses[0]
    expected = logprobs_of(training, TOKENS)
    path = training.save_state("done").result().path
    resumed = client.service.create_training_client_from_state(path).result()
    np.testing.assert_array_equal(logprobs_of(resumed, TOKENS), expected)
    adapter = weights.download(tinker_path=path, output_dir=str(tmp_path / "a"), base_url=client.url)
    assert (Path(adapter) / "adapter_model.safetensors").is_file()


def test_whoever_would_sample_is_refused_by_name(client: Client) -> None:
    training = client.new_lora()
    with pytest.raises(tinker.BadRequestError, match=re.escape(REFUSED)) as base:
        client.base_sampler()
    assert AFTERWARDS in str(base.value)
    path = training.save_weights_for_sampler("named").result().path
    with pytest.raises(tinker.BadRequestError, match=re.escape(REFUSED)):
        client.service.create_sampling_client(model_path=path).result()
    with pytest.raises(tinker.RequestFailedError, match=re.escape(REFUSED)):
        training.save_weights_and_get_sampling_client().result()
    train(training, TOKENS)  # the refused save is no gap
    oai = openai.OpenAI(base_url=f"{client.url}/oai/api/v1", api_key="tml-local", max_retries=0)
    with oai:
        assert [model.id for model in oai.models.list()] == []
        for model in ("tiny", path):
            with pytest.raises(openai.BadRequestError, match=re.escape(REFUSED)):
                oai.completions.create(model=model, prompt="a", max_tokens=1)


def test_a_later_start_with_samplers_samples_the_saved_weights(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with (
        serving(home, "--replicas", "0") as without,
        tinker.ServiceClient(base_url=without.url, api_key="tml-local") as service,
    ):
        training = Client(without.url, service).new_lora()
        train(training, TOKENS)
        expected = logprobs_of(training, TOKENS)
        path = training.save_weights_for_sampler("later").result().path
    with (
        serving(home) as with_samplers,
        tinker.ServiceClient(base_url=with_samplers.url, api_key="tml-local") as service,
    ):
        sampler = service.create_sampling_client(model_path=path).result()
        scores = sampler.compute_logprobs(prompt(TOKENS)).result(HEAL_S)
        np.testing.assert_allclose(scores[1:], expected, atol=1e-3)
