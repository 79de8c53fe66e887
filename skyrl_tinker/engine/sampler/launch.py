"""Assembly of the sampling side: our servers or servers by URL, a router if there are several, the fleet."""

import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from skyrl_tinker.config import Settings
from skyrl_tinker.engine.colocation.placement import Placement
from skyrl_tinker.engine.sampler.fleet import Fleet
from skyrl_tinker.inference.client.remote_client import RemoteInferenceClient
from skyrl_tinker.inference.sampling_engine import engine_of
from skyrl_tinker.inference.servers.external_servers import ExternalServers
from skyrl_tinker.inference.servers.replica_spec import SamplerSpec
from skyrl_tinker.inference.servers.router import Router, RouterSpec
from skyrl_tinker.inference.servers.server_group import ServerGroup
from skyrl_tinker.inference.servers.version_server import VersionServer

STEP_S = {"cuda": 60.0, "cpu": 600.0}
"""Longer than any step. On a CPU, a large model's prefill beside a busy trainer takes minutes."""
ToEnd = list[Callable[[], Awaitable[None]]]


def launch_servers(settings: Settings, spec: SamplerSpec, to_end: ToEnd) -> ServerGroup | ExternalServers:
    """Start the servers without waiting; their `ready` waits."""
    servers: ServerGroup | ExternalServers
    if settings.external_urls:
        servers = ExternalServers(
            settings.external_urls,
            300.0,  # to answer: they may still be starting
            spec.hang_s,
            spec.max_model_len,
            spec.sampled_logprobs,
            "sampler_urls" if settings.sampler_urls else "prefill_urls or decode_urls",
            spec.router_replay,
            dialect=spec.engine.dialect,
            keeps_cache=spec.keeps_cache,
        )
    else:
        servers = ServerGroup.launch(spec)
    to_end.append(servers.shutdown)
    return servers


async def assemble(
    settings: Settings,
    servers: ServerGroup | ExternalServers,
    placement: Placement,
    base_model: str,
    log_dir: Path,
    to_end: ToEnd,
    clock: Callable[[], float] = time.time,
    log_suffix: str = "",
) -> Fleet:
    """Make the fleet of `servers`, which are ready. A single one needs no router.

    Samples bypass a router that would only hash their keys; it then has the OpenAI requests.
    `base_model`: its directory. `clock`: of incidents. `log_suffix`: of the router's log.
    """
    router, token = None, servers.token
    if len(servers.urls) > 1 and settings.router_url is None:
        token = token or secrets.token_hex(32)  # servers by URL require none
        prefill = tuple(url.rstrip("/") for url in settings.prefill_urls)
        router = Router(RouterSpec(str(log_dir), token, log_suffix, prefill))
        to_end.append(router.shutdown)
        await router.start(servers.urls)
    proxy_url = settings.router_url or (router.url if router else servers.urls[0])
    versions = VersionServer(base_model)
    to_end.append(versions.close)
    hashes = router is not None and not router.disaggregates
    client = RemoteInferenceClient(
        proxy_url.rstrip("/"),
        servers.urls,
        token,
        versions.locate,
        hashes,
        dialect=engine_of(settings).dialect,
    )
    if settings.prefill_urls:
        client.data.most_sequences = 1  # a prompt's keys and values can be fetched only once
    to_end.append(client.close)
    cores = _cores(settings, len(servers.urls))
    return Fleet(servers, client, router, placement, STEP_S[settings.device], cores, clock)


def sampler_gpus(settings: Settings) -> int:
    """Count the GPUs that our replicas take in addition to the trainer's."""
    if settings.external_urls or settings.colocated:
        return 0
    return settings.replicas * engine_of(settings).workers(settings.tensor_parallel_size)


def _cores(settings: Settings, servers: int) -> list[int]:
    """Count the engine cores of each server that decode."""
    prefill = len(settings.prefill_urls)
    return [engine_of(settings).cores] * (servers - prefill) + [0] * prefill
