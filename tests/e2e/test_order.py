"""Order by seq_id and run-once, on the wire, below what the SDK lets one do."""

import itertools
from typing import Any

import pytest

from tests.e2e.support.client import Client, random_tokens

TOKENS = random_tokens(10, seed=1)


def finished(client: Client, request_id: str) -> Any:
    """Long-polls as an older, JSON-only SDK does."""
    for _ in range(10):
        answer = client.post("retrieve_future", {"request_id": request_id})
        if answer.status_code == 200:
            return answer.json()
        assert answer.status_code == 408
    raise AssertionError("no result")


class Model:
    """A training run driven with raw requests."""

    _session_numbers = itertools.count()

    def __init__(self, client: Client) -> None:
        self.client = client
        self.session_id = self.send("create_session", tags=[], user_metadata={}, sdk_version="0.38.0")[
            "session_id"
        ]
        promise = self.send(
            "create_model",
            session_id=self.session_id,
            model_seq_id=0,
            base_model=self.client.model,
            lora_config={"rank": 4, "seed": 1},
        )
        self.model_id = finished(client, promise["request_id"])["model_id"]

    def send(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self.client.post(path, body)
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result

    def forward_backward(self, seq_id: int, tokens: list[int] = TOKENS) -> str:
        data = {
            "model_input": {"chunks": [{"tokens": tokens[:-1]}]},
            "loss_fn_inputs": {
                "target_tokens": {"data": tokens[1:], "dtype": "int64"},
                "weights": {"data": [1.0] * (len(tokens) - 1), "dtype": "float32"},
            },
        }
        body = {"data": [data], "loss_fn": "cross_entropy"}
        sent = self.send(
            "forward_backward", forward_backward_input=body, model_id=self.model_id, seq_id=seq_id
        )
        return str(sent["request_id"])

    def optim_step(self, seq_id: int, learning_rate: float = 1e-2) -> str:
        sent = self.send(
            "optim_step", model_id=self.model_id, seq_id=seq_id, adam_params={"learning_rate": learning_rate}
        )
        return str(sent["request_id"])

    def losses(self, *request_ids: str) -> list[float]:
        return [finished(self.client, request_id)["metrics"]["loss:sum"] for request_id in request_ids]


def test_chunks_arriving_2_3_1_run_as_1_2_3(client: Client) -> None:
    """1 is a pass, 2 a step, 3 a pass: only in that order does the loss of 3 differ from that of 1."""
    model = Model(client)
    step = model.optim_step(2)
    third = model.forward_backward(3)
    first = model.forward_backward(1)
    before, after = model.losses(first, third)
    assert finished(client, step)["metrics"]["grad_norm"] > 0
    assert after < before


def test_a_duplicate_training_request_runs_once(client: Client) -> None:
    model = Model(client)
    first = model.forward_backward(1)
    assert model.forward_backward(1) == first
    step = model.optim_step(2)
    assert model.optim_step(2) == step
    norm = finished(client, step)["metrics"]["grad_norm"]
    again = model.forward_backward(3)
    model.losses(first, again)
    alone = Model(client)
    alone.forward_backward(1)
    reference = alone.optim_step(2)
    assert finished(client, reference)["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-6)


def test_the_same_seq_id_with_another_payload_is_refused(client: Client) -> None:
    model = Model(client)
    model.optim_step(1, 1e-2)
    answer = client.post(
        "optim_step", {"model_id": model.model_id, "seq_id": 1, "adam_params": {"learning_rate": 2e-2}}
    )
    assert answer.status_code == 422
    assert "seq_id" in answer.text


def test_a_duplicate_create_model_is_the_same_model(client: Client) -> None:
    model = Model(client)
    body = {
        "session_id": model.session_id,
        "model_seq_id": 0,
        "base_model": "tiny",
        "lora_config": {"rank": 4, "seed": 1},
    }
    promise = model.send("create_model", **body)
    assert finished(client, promise["request_id"])["model_id"] == model.model_id


def test_a_repeated_ephemeral_save_gives_the_first_sampling_session(client: Client) -> None:
    """The SDK's retry carries the same seq_id and another sampling_session_seq_id."""
    model = Model(client)
    first = model.send(
        "save_weights_for_sampler", model_id=model.model_id, seq_id=1, sampling_session_seq_id=0
    )
    again = model.send(
        "save_weights_for_sampler", model_id=model.model_id, seq_id=1, sampling_session_seq_id=1
    )
    assert again["request_id"] == first["request_id"]
    assert finished(client, first["request_id"])["sampling_session_id"]


def test_a_duplicate_sample_is_drawn_once(client: Client) -> None:
    model = Model(client)
    session = model.send(
        "create_sampling_session", session_id=model.session_id, sampling_session_seq_id=0, base_model="tiny"
    )
    body = {
        "sampling_session_id": session["sampling_session_id"],
        "seq_id": 10**18,
        "num_samples": 2,
        "prompt": {"chunks": [{"tokens": TOKENS}]},
        "sampling_params": {"max_tokens": 4},
    }
    first, again = model.send("asample", **body), model.send("asample", **body)
    assert first == again
    assert len(first["sample_sequence_ids"]) == 2
    sequences = finished(client, first["request_id"])["sequences"]
    assert sequences == finished(client, first["request_id"])["sequences"]


def test_results_can_be_fetched_again_and_again(client: Client) -> None:
    model = Model(client)
    request_id = model.forward_backward(1)
    assert finished(client, request_id) == finished(client, request_id)
