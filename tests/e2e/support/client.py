"""Short words for what the tests say to the real SDK."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import tinker
from tinker import types

Array = np.ndarray
GAP = "sampler_logprob_gap"


@dataclass(frozen=True)
class Client:
    url: str
    service: tinker.ServiceClient
    model: str = "tiny"

    @classmethod
    @contextmanager
    def of(cls, url: str, model: str = "tiny") -> Iterator["Client"]:
        """Closed at the end, or its heartbeats go on complaining."""
        with tinker.ServiceClient(base_url=url) as service:
            yield cls(url, service, model)

    def new_lora(self, *, rank: int = 8, seed: int = 1, **options: Any) -> tinker.TrainingClient:
        pending = self.service.create_lora_training_client(
            base_model=self.model, rank=rank, seed=seed, **options
        )
        return pending.result()

    def new_full(self) -> tinker.TrainingClient:
        return self.new_lora(rank=0)

    def base_sampler(self) -> tinker.SamplingClient:
        return self.service.create_sampling_client(base_model=self.model).result()

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(
            f"{self.url}/api/v1/{path}", json=body, headers={"X-API-Key": "tml-local"}, timeout=60
        )


def metrics_of(url: str) -> str:
    """The metrics as they are now, not as another scraper got them within the last second."""
    time.sleep(1.0)
    return httpx.get(f"{url}/metrics", timeout=30).raise_for_status().text


def datum(tokens: Sequence[int], **inputs: Sequence[float] | Array) -> types.Datum:
    """Tokens t[0..N]: the model reads t[:-1] and predicts t[1:]; other inputs default to weights of 1."""
    targets = np.asarray(tokens[1:], dtype=np.int64)
    arrays = {key: np.asarray(value, dtype=np.float32) for key, value in inputs.items()}
    if not arrays:
        arrays = {"weights": np.ones(len(targets), dtype=np.float32)}
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(targets),
            **{key: types.TensorData.from_numpy(value) for key, value in arrays.items()},
        },
    )


def random_tokens(count: int, seed: int, vocabulary: int = 400) -> list[int]:
    return np.random.default_rng(seed).integers(3, vocabulary, size=count).tolist()


def logprobs_of(training: tinker.TrainingClient, tokens: Sequence[int]) -> Array:
    output = training.forward([datum(tokens)], "cross_entropy").result()
    return np.asarray(output.loss_fn_outputs[0]["logprobs"].to_numpy())


def train(training: tinker.TrainingClient, tokens: Sequence[int], learning_rate: float = 1e-2) -> None:
    """One step that visibly moves the weights."""
    backward = training.forward_backward([datum(tokens)], "cross_entropy")
    step = training.optim_step(types.AdamParams(learning_rate=learning_rate))
    backward.result()
    step.result()


def prompt(tokens: Sequence[int]) -> types.ModelInput:
    return types.ModelInput.from_ints(list(tokens))


def gap_of_next_step(training: tinker.TrainingClient, tokens: Sequence[int]) -> float:
    """The samplers are asked in the background, so it may be the step after the next."""
    deadline = time.monotonic() + 60
    while GAP not in (metrics := _metrics_of_step(training, tokens)):
        assert time.monotonic() < deadline, "no step tells the gap"
    assert GAP not in _metrics_of_step(training, tokens), "told twice"
    return metrics[GAP]


def _metrics_of_step(training: tinker.TrainingClient, tokens: Sequence[int]) -> dict[str, float]:
    training.forward_backward([datum(tokens)], "cross_entropy").result()
    return training.optim_step(types.AdamParams(learning_rate=1e-4)).result().metrics or {}
