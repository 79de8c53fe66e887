"""What RestClient and AdminClient of the unmodified SDK do, against what was really trained and saved."""

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
import tinker
from tinker import types

from tests.e2e.support.client import Client, datum, logprobs_of, prompt, random_tokens, train

TOKENS = random_tokens(30, seed=7)
LONG = random_tokens(300, seed=8)  # caches count in blocks


@pytest.fixture(scope="module")
def rest(client: Client) -> tinker.RestClient:
    return tinker.RestClient(base_url=client.url)


@pytest.fixture(scope="module")
def admin(client: Client) -> tinker.AdminClient:
    return tinker.AdminClient(base_url=client.url)


def test_copies_load_and_sample_when_the_originals_are_deleted(
    client: Client, rest: tinker.RestClient
) -> None:
    training = client.new_lora()
    train(training, TOKENS)
    before = logprobs_of(training, TOKENS)
    state = training.save_state("s", user_metadata={"step": "1"}).result().path
    sampled = training.save_weights_for_sampler("w").result().path
    copies = [rest.copy_weights(path, "archive").result() for path in (state, sampled)]
    for path in (state, sampled):
        rest.delete_checkpoint_from_tinker_path(path).result()
    resumed = client.service.create_training_client_from_state_with_optimizer(copies[0]).result()
    np.testing.assert_array_equal(logprobs_of(resumed, TOKENS), before)
    sampler = client.service.create_sampling_client(model_path=copies[1]).result()
    scored = sampler.compute_logprobs(prompt(TOKENS)).result()
    np.testing.assert_allclose(scored[1:], before, atol=1e-3)
    run = rest.get_training_run_by_tinker_path(copies[0]).result()
    (copied,) = rest.list_checkpoints(run.training_run_id).result().checkpoints
    assert (copied.checkpoint_type, copied.user_metadata) == ("training", {"step": "1"})
    assert copied.size_bytes


def test_lists_and_changes_are_those_of_the_sdk(client: Client, rest: tinker.RestClient) -> None:
    training = client.new_lora()
    path = training.save_state("a").result().path
    run, session = training.model_id, training.model_id.partition(":")[0]
    runs = rest.list_training_runs(limit=1).result()
    assert [each.training_run_id for each in runs.training_runs] == [run]
    assert runs.cursor.total_count >= 1
    rest.publish_checkpoint_from_tinker_path(path).result()
    rest.publish_checkpoint_from_tinker_path(path).result()
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
    (newest,) = rest.list_user_checkpoints(limit=1).result().checkpoints
    assert (newest.tinker_path, newest.public) == (path, True)
    assert newest.expires_at is not None
    assert newest.expires_at > datetime.now(UTC) + timedelta(hours=1)
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    assert rest.get_weights_info_by_tinker_path(path).result().base_model == client.model
    assert session in rest.list_sessions(limit=1000).result().sessions
    assert run in rest.get_session(session).result().training_run_ids


@pytest.mark.filterwarnings("ignore:RestClient.search_sessions is experimental")
def test_a_session_is_found_and_billed_to_the_token(
    client: Client, rest: tinker.RestClient, admin: tinker.AdminClient
) -> None:
    start = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    metadata = {"experiment": "bill"}
    with tinker.ServiceClient(base_url=client.url, user_metadata=metadata) as service:
        training = service.create_lora_training_client(base_model=client.model, rank=8).result()
        training.forward_backward([datum(TOKENS), datum(TOKENS[:11])], "cross_entropy").result()
        training.forward([datum(TOKENS[:5])], "cross_entropy").result()
        training.save_state("x").result()
        sampler = training.save_weights_and_get_sampling_client().result()
        for _ in range(2):
            params = types.SamplingParams(max_tokens=4, stop=[])
            sampler.sample(prompt(LONG), num_samples=3, sampling_params=params).result()
    session = training.model_id.partition(":")[0]
    rest.assign_session_project(session, "billing").result()
    wanted = types.SessionSearchRequest(project_ids=["billing"], user_metadata=metadata)
    (found,) = rest.search_sessions(wanted).result().sessions
    assert (found.session_id, found.checkpoints_count) == (session, 1)
    assert found.status is not None
    assert found.status.type == "client_finished"
    bill = admin.get_billing_usage(start, start + timedelta(hours=2)).result()
    mine = [each.event_info for each in bill.data if each.session_id == session]
    prefill = {}
    for info in mine:
        if isinstance(info, types.SamplingPrefillBillingEvent):
            prefill[info.cached] = prefill.get(info.cached, 0) + info.token_count
    assert sum(each.token_count for each in mine if each.type == "training") == 29 + 10 + 4
    assert sum(prefill.values()) == 2 * len(LONG)
    assert 0 < prefill[True] < len(LONG)
    assert sum(each.token_count for each in mine if each.type == "sampling_sample") == 2 * 3 * 4
    assert sum(each.count for each in mine if each.type == "checkpoint") == 1
    assert bill.sessions[session].user_metadata == metadata
    (kept,) = admin.get_current_checkpoint_storage_usage("billing").result().data
    assert (kept.checkpoint_count, kept.project_id) == (1, "billing")
    assert kept.size_bytes == found.checkpoint_storage_bytes
    done = [each.event for each in admin.get_audit_log("checkpoints").result().entries]
    assert "checkpoint_create" in done
