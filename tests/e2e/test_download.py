"""What leaves the server, by `tinker checkpoint download`, `tinker session export-trace` and the cookbook;
and that PEFT, transformers and vLLM load it."""

import json
import os
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from peft import PeftModel
from tinker_cookbook import weights
from transformers import AutoModelForCausalLM

from tests.e2e.support.client import Array, Client, logprobs_of, random_tokens, train
from tests.support.peft_adapters import token_logprobs
from tests.support.processes import client_of, vllm_servers
from tests.support.sdk_command import run_tinker
from tests.support.serve import Serve

TOKENS = random_tokens(40, seed=5)
ADAPTER = {"adapter_config.json", "adapter_model.safetensors", "MERGING.md"}
# PEFT warns of what is meant here: the adapter adapts the head and leaves the tied embedding alone.
pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")


def cli(server: Serve, home: Path, *arguments: str) -> str:
    """What the SDK's command prints."""
    environment = os.environ | {"TINKER_BASE_URL": server.url, "HOME": str(home)}
    done = run_tinker(("-f", "json", *arguments), environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def trained(client: Client, **options: int) -> tinker.TrainingClient:
    training = client.new_lora(**options)
    train(training, TOKENS, 1e-2 if training.get_info().is_lora else 1e-3)
    return training


def names(directory: Path) -> set[str]:
    return {file.name for file in directory.iterdir()}


def peft_logprobs(base: str, adapter: Path) -> Array:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(model, str(adapter))
    return token_logprobs(adapted, TOKENS[:-1], TOKENS[1:]).numpy()


def vllm_logprobs(server: Serve, adapter: Path) -> Array:
    """Of the server's own replica, given the directory as it is."""
    name = {"lora_name": "downloaded"}
    with client_of(vllm_servers(server.process.pid)[0]) as http:
        http.post("/v1/load_lora_adapter", json={**name, "lora_path": str(adapter)}).raise_for_status()
        try:
            asked = {"model": "downloaded", "prompt": TOKENS, "max_tokens": 1, "prompt_logprobs": 0}
            answer = http.post("/v1/completions", json=asked, timeout=60).raise_for_status().json()
        finally:
            http.post("/v1/unload_lora_adapter", json=name).raise_for_status()
    scored: Sequence[dict[str, dict[str, float]]] = answer["choices"][0]["prompt_logprobs"][1:]
    return np.asarray([entry[str(token)]["logprob"] for entry, token in zip(scored, TOKENS[1:], strict=True)])


def test_a_downloaded_export_scores_in_peft_and_in_vllm_as_in_the_trainer(
    server: Serve, client: Client, model_directory: str, tmp_path: Path
) -> None:
    training = trained(client)
    path = training.save_weights_external("final", ttl_seconds=3600).result().path
    assert path == f"tinker://{training.model_id}/external_weights/final"
    expected = logprobs_of(training, TOKENS)
    train(training, TOKENS)  # the export is of its turn
    told = json.loads(cli(server, tmp_path, "checkpoint", "download", path, "--output", str(tmp_path / "x")))
    found = Path(told["destination"])
    assert names(found) == ADAPTER
    config = json.loads((found / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "tiny"  # `checkpoint push-hf` shows it to others
    np.testing.assert_allclose(peft_logprobs(model_directory, found), expected, atol=1e-4, rtol=0)
    np.testing.assert_allclose(vllm_logprobs(server, found), expected, atol=1e-3, rtol=0)


def test_a_training_checkpoint_is_downloaded_through_an_export_that_is_deleted_again(
    server: Serve, client: Client, model_directory: str, tmp_path: Path
) -> None:
    training = trained(client)
    path = training.save_state("kept").result().path
    expected = logprobs_of(training, TOKENS)
    told = json.loads(cli(server, tmp_path, "checkpoint", "download", path, "--output", str(tmp_path / "x")))
    found = Path(told["destination"])
    assert names(found) == ADAPTER
    np.testing.assert_allclose(peft_logprobs(model_directory, found), expected, atol=1e-4, rtol=0)
    everything = tinker.RestClient(base_url=client.url).list_user_checkpoints(limit=1000).result().checkpoints
    assert not [each for each in everything if each.checkpoint_id == "external_weights/download"]


def test_the_cookbook_downloads_a_training_checkpoint_through_age(
    client: Client, model_directory: str, tmp_path: Path
) -> None:
    training = trained(client)
    path = training.save_state("kept").result().path
    expected = logprobs_of(training, TOKENS)
    weights.download(tinker_path=path, output_dir=str(tmp_path / "x"), base_url=client.url)
    assert names(tmp_path / "x") == ADAPTER
    np.testing.assert_allclose(peft_logprobs(model_directory, tmp_path / "x"), expected, atol=1e-4, rtol=0)


def test_a_full_parameter_export_is_a_model_for_transformers(client: Client, tmp_path: Path) -> None:
    training = trained(client, rank=0)
    path = training.save_weights_external("final").result().path
    expected = logprobs_of(training, TOKENS)
    urls = tinker.RestClient(base_url=client.url).get_external_weights_urls(path).result().urls
    for name, url in urls.items():
        urllib.request.urlretrieve(url, tmp_path / name)
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(urls)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    found = token_logprobs(model, TOKENS[:-1], TOKENS[1:]).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


def test_a_taken_name_and_a_malformed_recipient_are_the_users_errors(client: Client) -> None:
    training = client.new_lora()
    training.save_weights_external("taken").result()
    with pytest.raises(tinker.RequestFailedError, match="taken exists: choose another name") as refused:
        training.save_weights_external("taken").result()
    assert refused.value.category == "user"
    with pytest.raises(tinker.RequestFailedError, match=r"age_encryption_recipients\[0\] is 'me'"):
        training.save_weights_external("mine", age_encryption_recipients=["me"]).result()
    train(training, TOKENS)


def test_a_sessions_trace_is_exported(server: Serve, client: Client, tmp_path: Path) -> None:
    with Client.of(client.url) as own:
        training = own.new_lora()
        train(training, TOKENS)
    session = training.model_id.partition(":train:")[0]
    target = tmp_path / "session.pftrace"
    cli(server, tmp_path, "session", "export-trace", session, "--output", str(target))
    events = json.loads(target.read_text())
    assert [each["args"]["name"] for each in events if each["ph"] == "M"] == [f"model {training.model_id}"]
    kinds = [each["name"] for each in events if each["ph"] == "e"]
    assert kinds == ["create_model", "forward_backward", "optim_step"]
