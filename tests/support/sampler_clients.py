"""Client of samplers, their fleet, and servers of others, with the dialect of vLLM, as stand-ins speak it."""

from functools import partial
from typing import Any

from skyrl_tinker.engine.sampler.fleet import Fleet
from skyrl_tinker.inference.client.remote_client import RemoteInferenceClient
from skyrl_tinker.inference.servers.external_servers import ExternalServers
from skyrl_tinker.inference.vllm.vllm_dialect import VLLM

vllm_client = partial(RemoteInferenceClient, dialect=VLLM)
vllm_servers = partial(ExternalServers, dialect=VLLM)


def opened_fleet(
    client: RemoteInferenceClient, servers: Any = None, router: Any = None, cores: Any = None, **options: Any
) -> Fleet:
    """A fleet whose members are the client's servers; without `servers` none of them may be lost."""
    urls = client.server_urls
    client.retarget("", ())
    fleet = Fleet(client, (1,) * len(urls) if cores is None else cores, **options)
    fleet.open(servers, urls, router)
    return fleet
