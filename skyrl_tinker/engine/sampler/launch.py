"""Assembly of the sampling side: our servers or servers by URL, a router if there are several, the fleet."""

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


def make_fleet(
    settings: Settings,
    token: str,
    placement: Placement,
    base_model: str,
    to_end: ToEnd,
    clock: Callable[[], float] = time.time,
) -> Fleet:
    """Make the fleet of servers that are still to start: `open_fleet`.

    Samples bypass a router that would only hash their keys; it then has the OpenAI requests.
    `token`: of our servers and router. `base_model`: its directory. `clock`: of incidents.
    """
    versions = VersionServer(base_model)
    to_end.append(versions.close)
    routed = _needs_router(settings)
    client = RemoteInferenceClient(
        (settings.router_url or "").rstrip("/"),
        (),
        token if routed or not settings.external_urls else "",  # servers by URL require none
        versions.locate,
        routed and not settings.prefill_urls,
        dialect=engine_of(settings).dialect,
    )
    if settings.prefill_urls:
        client.data.most_sequences = 1  # a prompt's keys and values can be fetched only once
    to_end.append(client.close)
    cores = _cores(settings, _count_servers(settings))
    return Fleet(client, cores, placement, STEP_S[settings.device], clock)


async def open_fleet(
    settings: Settings,
    fleet: Fleet,
    servers: ServerGroup | ExternalServers,
    log_dir: Path,
    to_end: ToEnd,
    log_suffix: str = "",
) -> None:
    """Open a fleet with its servers, which are ready. A single one needs no router.

    `log_suffix`: of the router's log.
    """
    router = None
    if _needs_router(settings):
        prefill = tuple(url.rstrip("/") for url in settings.prefill_urls)
        router = Router(RouterSpec(str(log_dir), fleet.client.token, log_suffix, prefill))
        to_end.append(router.shutdown)
        await router.start(servers.urls)
    fleet.open(servers, servers.urls, router)


def _needs_router(settings: Settings) -> bool:
    return _count_servers(settings) > 1 and settings.router_url is None


def _count_servers(settings: Settings) -> int:
    return len(settings.external_urls) or settings.replicas


def sampler_gpus(settings: Settings) -> int:
    """Count the GPUs that our replicas take in addition to the trainer's."""
    if settings.external_urls or settings.colocated:
        return 0
    return settings.replicas * engine_of(settings).workers(settings.tensor_parallel_size)


def _cores(settings: Settings, servers: int) -> list[int]:
    """Count the engine cores of each server that decode."""
    prefill = len(settings.prefill_urls)
    return [engine_of(settings).cores] * (servers - prefill) + [0] * prefill
