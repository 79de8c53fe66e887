"""Replicas as the fleet shows them: where each is, and by which ways weights reach it."""

import pytest

from skyrl_tinker.protocol.queue_views import ReplicaView
from skyrl_tinker.system.interfaces import address_towards
from skyrl_tinker.weight_sync.factory import TRANSPORTS
from tests.support.sampler_clients import opened_fleet, vllm_client, vllm_servers

HERE, ELSEWHERE, UNKNOWN = "http://127.0.0.1:8100", "http://192.0.2.9:8100", "http://nowhere.invalid:8100"
"""The latter two on hosts that do not exist (RFC 5737, RFC 2606)."""


@pytest.mark.skipif(
    address_towards(ELSEWHERE) is None, reason="this machine has no network interface but loopback"
)
async def test_each_replica_has_the_ways_of_its_host_and_none_while_it_is_replaced() -> None:
    urls = (HERE, ELSEWHERE, UNKNOWN, "http://127.0.0.1:8101")
    servers = vllm_servers(urls, startup_s=1.0, hang_s=2.0, max_model_len=2)
    fleet = opened_fleet(vllm_client(HERE, urls), servers)
    fleet.condemn(urls[3], "it stands still")
    assert fleet.view(TRANSPORTS["shared_memory"].ways) == (
        ReplicaView(HERE, "serving", "127.0.0.1", "shared memory", "shared memory"),
        ReplicaView(ELSEWHERE, "serving", "192.0.2.9", "pull", "pull"),
        ReplicaView(UNKNOWN, "serving", "nowhere.invalid", "pull", "pull"),
        ReplicaView(None, "replaced"),
    )


async def test_members_that_have_come_or_gone_are_another_generation() -> None:
    """What a former member had compiled, its successor at the same address has not."""
    servers = vllm_servers((HERE,), startup_s=1.0, hang_s=2.0, max_model_len=2)
    fleet = opened_fleet(vllm_client(HERE, (HERE,)), servers)
    generations = [fleet.generation]
    fleet.condemn(HERE, "it stands still")
    generations.append(fleet.generation)
    fleet.open(servers, (HERE,), None)
    generations.append(fleet.generation)
    assert generations == sorted(set(generations))
