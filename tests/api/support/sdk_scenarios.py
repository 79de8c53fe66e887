"""Scenarios of a user with the unmodified SDK: `python -m tests.api.support.sdk_scenarios URL SCENARIO`.

In a process of their own, because the SDK leaves its sockets to the garbage collector.
"""

import os
import sys

sys.modules["torch"] = None  # an extra of the SDK, which takes seconds to import

import pytest  # noqa: E402
import tinker  # noqa: E402

from tests.api.support.base_facts import BASE, CONTEXT, FACTS  # noqa: E402
from tests.api.support.passes import datum  # noqa: E402


def train_and_sample(service: tinker.ServiceClient) -> None:
    training = service.create_lora_training_client(base_model=BASE, rank=8).result()
    assert training.get_info().model_data.tokenizer_id == FACTS.directory
    data = [datum([index % 500, 1]) for index in range(2500)]  # three chunks
    backward = training.forward_backward(data, "cross_entropy")
    step = training.optim_step(tinker.AdamParams(learning_rate=1e-3))
    outputs = backward.result().loss_fn_outputs
    firsts = [output["logprobs"].to_numpy()[0] for output in outputs]
    assert firsts == [index % 500 for index in range(2500)]
    assert step.result().metrics == {"grad_norm": 1.0}
    sampler = training.save_weights_and_get_sampling_client()
    sampled = _sample(sampler, max_tokens=2, num_samples=4)
    assert [sequence.tokens for sequence in sampled.sequences] == [[7, 8]] * 4


def train_on_a_megabyte(service: tinker.ServiceClient) -> None:
    training = service.create_lora_training_client(base_model=BASE, rank=8).result()
    data = [datum([1] * CONTEXT)] * 1024  # one chunk, larger than a MiB
    assert len(training.forward_backward(data, "cross_entropy").result().loss_fn_outputs) == 1024


def be_wrong(service: tinker.ServiceClient) -> None:
    training = service.create_lora_training_client(base_model=BASE, rank=8).result()
    refused = training.forward_backward([datum([1, 2], [1.0])], "cross_entropy")
    fine = training.forward_backward([datum([1, 2])], "cross_entropy")
    with pytest.raises(tinker.RequestFailedError, match=r"datum 0.*weights") as failure:
        refused.result()
    assert str(failure.value.category).lower().endswith("user")
    assert fine.result().metrics["loss:sum"] == 1.5
    sampler = service.create_sampling_client(base_model=BASE)
    with pytest.raises(tinker.BadRequestError, match=rf"2 prompt tokens \+ 99 max_tokens > {CONTEXT}"):
        _sample(sampler, max_tokens=99)


def sample_sixty(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=BASE)
    prompt, params = tinker.ModelInput.from_ints([1, 2]), tinker.SamplingParams(max_tokens=2)
    pending = [sampler.sample(prompt, 1, params) for _ in range(60)]
    assert [each.result().sequences[0].tokens for each in pending] == [[7, 8]] * 60


def _sample(
    sampler: tinker.SamplingClient, max_tokens: int, num_samples: int = 1
) -> tinker.types.SampleResponse:
    prompt = tinker.ModelInput.from_ints([1, 2])
    params = tinker.SamplingParams(max_tokens=max_tokens)
    return sampler.sample(prompt=prompt, num_samples=num_samples, sampling_params=params).result()


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (train_and_sample, train_on_a_megabyte, be_wrong, sample_sixty)
}

if __name__ == "__main__":
    with tinker.ServiceClient(base_url=sys.argv[1]) as client:
        SCENARIOS[sys.argv[2]](client)
    os._exit(0)  # without an end of Python, which may abort while a thread of the SDK writes
