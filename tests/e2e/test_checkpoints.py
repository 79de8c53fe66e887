"""save_state, load_state and create-from-state, with and without the optimizer; named sampler weights."""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from skyrl_tinker.cli import metrics_file, running_server
from tests.e2e.support.client import Client, datum, logprobs_of, prompt, random_tokens, train

TOKENS = random_tokens(40, seed=5)


def trained(client: Client, **options: int) -> tinker.TrainingClient:
    training = client.new_lora(**options)
    for _ in range(2):
        train(training, TOKENS)
    return training


@pytest.mark.filterwarnings("ignore:DEPRECATED. TrainingClient.load_state:FutureWarning")
def test_logprobs_after_load_equal_those_before_to_the_last_bit(client: Client) -> None:
    training = trained(client)
    before = logprobs_of(training, TOKENS)
    path = training.save_state("kept").result().path
    train(training, TOKENS)
    training.load_state(path).result()
    np.testing.assert_array_equal(logprobs_of(training, TOKENS), before)


@pytest.mark.parametrize("rank", [8, 0])
def test_a_run_resumed_with_its_optimizer_goes_on_as_if_never_stopped(client: Client, rank: int) -> None:
    training = trained(client, rank=rank)
    path = training.save_state("resume").result().path
    resumed = client.service.create_training_client_from_state_with_optimizer(path).result()
    train(training, TOKENS)
    train(resumed, TOKENS)
    np.testing.assert_array_equal(logprobs_of(resumed, TOKENS), logprobs_of(training, TOKENS))


@pytest.mark.filterwarnings("ignore:DEPRECATED. TrainingClient.load_state:FutureWarning")
def test_a_resumed_run_knows_its_parent_and_the_step_it_goes_on_from(client: Client) -> None:
    training = trained(client)
    path = training.save_state("parent").result().path
    train(training, TOKENS)
    resumed = client.service.create_training_client_from_state(path).result()
    train(resumed, TOKENS)
    again = client.service.create_training_client_from_state(
        resumed.save_state("child").result().path
    ).result()
    train(again, TOKENS)
    again.load_state(path).result()  # which is no beginning
    told = [run_of(client, each) for each in (training, resumed, again)]
    assert [(run["parent"], run["steps_before"], run["steps"]) for run in told] == [
        (None, 0, 3),
        (training.model_id, 2, 1),
        (resumed.model_id, 3, 1),
    ]


def test_numbers_of_a_script_that_resumes_go_to_its_new_run(client: Client, tmp_path: Path) -> None:
    """`skyrl-tinker follow` finds it: the script that it goes on from is silent."""
    with tinker.ServiceClient(base_url=client.url) as script:
        training = trained(Client(client.url, script))
        path = training.save_state("killed").result().path
    (tmp_path / "checkpoints.jsonl").write_text(json.dumps({"state_path": path}))
    (log := tmp_path / "metrics.jsonl").touch()
    server = running_server.at(client.url)
    assert metrics_file.run_of(log, server) == training.model_id
    resumed = client.service.create_training_client_from_state(path).result()
    train(resumed, TOKENS)
    log.touch()
    assert metrics_file.run_of(log, server) == resumed.model_id


def run_of(client: Client, training: tinker.TrainingClient) -> dict[str, Any]:
    url = f"{client.url}/api/v1/console/runs/{training.model_id}"
    run: dict[str, Any] = httpx.get(url, headers={"X-API-Key": "tml-local"}).raise_for_status().json()
    return run


@pytest.mark.parametrize("rank", [8, 0])
def test_a_save_is_of_its_turn_whatever_is_sent_behind_it(client: Client, rank: int) -> None:
    training = trained(client, rank=rank)
    before = logprobs_of(training, TOKENS)
    first = training.save_state("pipelined")
    backward = training.forward_backward([datum(TOKENS)], "cross_entropy")
    step = training.optim_step(types.AdamParams(learning_rate=1e-2))
    second = training.save_state("pipelined-too")
    scored = training.forward([datum(TOKENS)], "cross_entropy")
    for each in (backward, step):
        each.result()
    after = scored.result().loss_fn_outputs[0]["logprobs"].to_numpy()
    assert np.abs(after - before).max() > 1e-3
    for saved, expected in ((first, before), (second, after)):
        resumed = client.service.create_training_client_from_state(saved.result().path).result()
        np.testing.assert_array_equal(logprobs_of(resumed, TOKENS), expected)


def test_a_run_resumed_without_optimizer_starts_adam_anew(client: Client) -> None:
    training = trained(client)
    path = training.save_state("weights-only").result().path
    resumed = client.service.create_training_client_from_state(path).result()
    np.testing.assert_array_equal(logprobs_of(resumed, TOKENS), logprobs_of(training, TOKENS))
    train(training, TOKENS)
    train(resumed, TOKENS)
    assert np.abs(logprobs_of(resumed, TOKENS) - logprobs_of(training, TOKENS)).max() > 1e-6


def test_named_sampler_weights_are_reachable_by_their_path(client: Client) -> None:
    training = trained(client)
    path = training.save_weights_for_sampler("final").result().path
    assert path == f"tinker://{training.model_id}/sampler_weights/final"
    sampler = client.service.create_sampling_client(model_path=path).result()
    scored = sampler.compute_logprobs(prompt(TOKENS)).result()
    np.testing.assert_allclose(scored[1:], logprobs_of(training, TOKENS), atol=1e-3)


def test_a_taken_name_is_refused_unless_overwrite(client: Client) -> None:
    training = trained(client)
    training.save_state("taken").result()
    with pytest.raises(tinker.RequestFailedError, match="taken"):
        training.save_state("taken").result()
    train(training, TOKENS)
    now = logprobs_of(training, TOKENS)
    path = training.save_state("taken", overwrite=True).result().path
    again = client.service.create_training_client_from_state(path).result()
    np.testing.assert_array_equal(logprobs_of(again, TOKENS), now)


def test_training_run_and_weights_info_tell_what_was_saved(client: Client) -> None:
    pending = client.service.create_lora_training_client(
        base_model="tiny", rank=4, seed=1, user_metadata={"renderer_name": "qwen3"}
    )
    training = pending.result()
    path = training.save_state("first", user_metadata={"step": "1"}).result().path
    rest = tinker.RestClient(base_url=client.url)
    run = rest.get_training_run(training.model_id).result()
    assert run.user_metadata == {"renderer_name": "qwen3"}
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.tinker_path == path
    info = client.post("weights_info", {"tinker_path": path}).json()
    assert (info["base_model"], info["is_lora"], info["lora_rank"]) == ("tiny", True, 4)


def test_a_deleted_checkpoint_is_gone(client: Client) -> None:
    training = trained(client)
    path = training.save_state("old").result().path
    tinker.RestClient(base_url=client.url).delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.TinkerError, match="old"):
        client.service.create_training_client_from_state(path).result()


@pytest.mark.filterwarnings("ignore:DEPRECATED. TrainingClient.load_state:FutureWarning")
def test_loading_a_path_that_never_was_names_it(client: Client) -> None:
    training = client.new_lora()
    with pytest.raises(tinker.RequestFailedError, match="never-was"):
        training.load_state(f"tinker://{training.model_id}/weights/never-was").result()
    train(training, TOKENS)


def test_a_save_of_the_ephemeral_kind_leaves_no_checkpoint(client: Client) -> None:
    training = trained(client)
    training.save_weights_and_get_sampling_client().result()
    run = tinker.RestClient(base_url=client.url).get_training_run(training.model_id).result()
    assert run.last_checkpoint is None
    assert run.last_sampler_checkpoint is None


def test_adam_params_are_all_honoured(client: Client) -> None:
    """Two models that differ in one field alone end apart."""
    fields = {"beta1": 0.1, "beta2": 0.5, "eps": 1e-2, "weight_decay": 0.5, "grad_clip_norm": 1e-3}
    outcomes = {}
    for name, value in {"": 0.0, **fields}.items():
        training = client.new_lora()
        params = types.AdamParams(learning_rate=1e-2, **({name: value} if name else {}))
        for row in (TOKENS, TOKENS[::-1], TOKENS):
            training.forward_backward([datum(row)], "cross_entropy")
            training.optim_step(params).result()
        outcomes[name] = logprobs_of(training, TOKENS)
    for name in fields:
        assert np.abs(outcomes[name] - outcomes[""]).max() > 1e-6, name
