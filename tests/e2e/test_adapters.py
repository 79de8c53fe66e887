"""More versions than the samplers may hold, side by side: each client gets its own, whatever dies."""

from collections import deque
from collections.abc import Iterator

import numpy as np
import pytest
import tinker

from tests.e2e.support.client import Array, Client, logprobs_of, prompt
from tests.e2e.support.policies import ATOL, TOKENS, roll, step
from tests.support.processes import below, title
from tests.support.serve import Serve, serving

pytestmark = pytest.mark.long

SETTINGS = {"MAX_LORAS": "2", "MAX_CPU_LORAS": "3", "REPLICAS": "2", "PARITY": '{"canary": false}'}
TENANTS, VERSIONS = 4, 3


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Two replicas with room for three adapters each, two of which fit a batch."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(f"SKYRL_TINKER_{name}", value)
        with serving(tmp_path_factory.mktemp("small") / "home") as server:
            yield server


@pytest.fixture(scope="module")
def samplers(small: Serve) -> Iterator[dict[tinker.SamplingClient, Array]]:
    """12 clients, and what the trainer said of TOKENS when each was made."""
    with Client.of(small.url) as client:
        made: dict[tinker.SamplingClient, Array] = {}
        for tenant in range(TENANTS):
            training = client.new_lora(rank=(8, 16)[tenant % 2], seed=tenant)
            for _ in range(VERSIONS):
                step(training)
                sampler = training.save_weights_and_get_sampling_client().result()
                made[sampler] = logprobs_of(training, TOKENS)
        yield made


def assert_each_its_own(samplers: dict[tinker.SamplingClient, Array]) -> None:
    """All at once, several times over."""
    pending = [(sampler, sampler.compute_logprobs(prompt(TOKENS))) for _ in range(3) for sampler in samplers]
    for sampler, answer in pending:
        np.testing.assert_allclose(answer.result()[1:], samplers[sampler], atol=ATOL)


def test_twelve_versions_are_sampled_at_once_with_room_for_three(
    samplers: dict[tinker.SamplingClient, Array],
) -> None:
    assert_each_its_own(samplers)


def test_a_stream_of_requests_for_three_versions_does_not_starve_a_fourth(
    samplers: dict[tinker.SamplingClient, Array],
) -> None:
    *busy, fourth = list(samplers)[:4]
    stream = deque((sampler, roll(sampler, 60)) for _ in range(4) for sampler in busy)
    late = roll(fourth, 5)
    for _ in range(100):
        sampler, rollout = stream.popleft()
        rollout.result()
        if late.done():
            break
        stream.append((sampler, roll(sampler, 60)))
    assert late.done()
    for _, rollout in stream:
        rollout.result()


def test_a_replica_that_was_started_again_has_what_the_others_have(
    small: Serve, samplers: dict[tinker.SamplingClient, Array]
) -> None:
    victim = next(each for each in below(small.process.pid) if "VLLM::EngineCo" in title(each))
    rollouts = [roll(sampler, 200, samples=2) for sampler in samplers]
    victim.kill()
    for rollout in rollouts:
        assert [len(sequence.tokens) for sequence in rollout.result().sequences] == [200, 200]
    assert_each_its_own(samplers)
