"""Trainer ranks beside the samplers, and transports between them."""

import asyncio
from collections.abc import Iterator

import pytest

from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.training.trainer_group import TrainerGroup, TrainerSpec
from skyrl_tinker.weight_sync.factory import make_transport
from skyrl_tinker.weight_sync.transport import WeightTransport
from tests.inference.support.samplers import Served, each_sampler, sampler

__all__ = ["each_sampler", "sampler"]

CHUNK_BYTES = 100_000
"""Less than a tiny model's embedding, so that a model is many chunks and one of them is a single tensor."""


def launch_trainer(facts: BaseModelFacts, ranks: int) -> TrainerGroup:
    spec = TrainerSpec(facts.directory, ranks, "cpu", "float32", 1, token_budget=512, timeout_s=30.0)
    group = TrainerGroup.launch(spec)
    asyncio.run(group.ready())
    return group


@pytest.fixture(scope="package")
def trainer(servers: dict[str, Served]) -> Iterator[TrainerGroup]:
    """One rank, on the tied model."""
    group = launch_trainer(servers["tied"].facts, 1)
    yield group
    asyncio.run(group.shutdown())


@pytest.fixture(params=["shared_memory", "gloo"])
def transport(request: pytest.FixtureRequest, trainer: TrainerGroup) -> WeightTransport:
    return make_transport(request.param, trainer, CHUNK_BYTES)
