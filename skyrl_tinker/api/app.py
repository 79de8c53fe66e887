"""Composition root of the API."""

from asyncio import Semaphore, TaskGroup
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from importlib import import_module
from pkgutil import iter_modules
from types import SimpleNamespace
from typing import cast

from fastapi import APIRouter, FastAPI
from starlette.datastructures import State
from starlette.routing import BaseRoute

from skyrl_tinker import __version__
from skyrl_tinker.api import error_responses, routes
from skyrl_tinker.api.api_metrics import ApiMetrics
from skyrl_tinker.api.base_limits import BaseLimits
from skyrl_tinker.api.loop_watch import LoopWatch
from skyrl_tinker.api.middleware.admission import AdmissionMiddleware
from skyrl_tinker.api.middleware.arrivals import Arrivals, ArrivalsMiddleware
from skyrl_tinker.api.middleware.authentication import AuthMiddleware
from skyrl_tinker.api.middleware.body_limits import BodyLimitMiddleware, BodyLimits
from skyrl_tinker.api.middleware.disk_room import DiskRoom
from skyrl_tinker.api.middleware.fast_routes import FastPaths
from skyrl_tinker.api.middleware.own_hosts import OwnHostsMiddleware
from skyrl_tinker.api.middleware.request_metrics import RequestMetricsMiddleware
from skyrl_tinker.api.middleware.request_rate import RequestRates
from skyrl_tinker.api.openapi.documents import ERRORS, Documented
from skyrl_tinker.api.pass_heads import PassHeads
from skyrl_tinker.api.process_table import ProcessTable
from skyrl_tinker.api.routes import pages
from skyrl_tinker.api.security.keyring import KeyRing
from skyrl_tinker.api.security.signing import Signer
from skyrl_tinker.api.services import Services
from skyrl_tinker.api.waiting.engine_client import EngineClient, EngineUnavailableError, engine_state
from skyrl_tinker.api.waiting.engine_queues import EngineQueues
from skyrl_tinker.api.waiting.heartbeats import Heartbeats
from skyrl_tinker.api.waiting.kept_value import KeptValue
from skyrl_tinker.api.waiting.key_backlogs import KeyBacklogs
from skyrl_tinker.api.waiting.long_poll import FutureWaiter
from skyrl_tinker.api.waiting.server_snapshot import SnapshotReader
from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.units import MiB
from skyrl_tinker.storage.checkpoint_storage import open_storage
from skyrl_tinker.store.cluster.signing_secrets import SigningSecrets
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.store import Store

LARGE_AT_ONCE = 1
"""Large bodies that are parsed and stored at a time: more would finish no sooner, and all else would wait."""


def create_app(
    settings: Settings, store: Store, bases: Bases, bell: Doorbell, clock: Callable[[], float] | None = None
) -> FastAPI:
    """Build the API on an open store and a bound doorbell, both of which the caller closes.

    `clock`: UTC seconds, by which keys and JWTs expire; default: the database's.
    """
    app = make_app(settings)
    app.state.services = make_services(settings, store, bases, bell, clock)
    return app


def make_services(
    settings: Settings, store: Store, bases: Bases, bell: Doorbell, clock: Callable[[], float] | None = None
) -> Services:
    """Build the services of one run of the app; its lifespan starts and ends them."""
    directories = Directories(settings)
    signing = SigningSecrets(settings.root)
    engine = EngineClient(directories.engine_socket, store, signing)
    alone = settings.api_processes == 1 and settings.engine_listen is None
    queues = EngineQueues(engine, settings.sample_backlog, alone=alone)
    processes = ProcessTable(directories.pid_file)
    snapshots = SnapshotReader(store, queues, processes, gpus=settings.device == "cuda")
    metrics = ApiMetrics()
    keys = KeyRing(store, signing, settings.keys, clock)
    room = DiskRoom((settings.root, settings.checkpoint_root), settings.min_free_gb)
    metrics.watch(
        "disk_free_bytes", "Free bytes under home or for checkpoints, the fewer", lambda: room.free_bytes
    )
    metrics.watch(
        "disk_least_bytes",
        "Free bytes below which new work is refused (min_free_gb)",
        lambda: room.least_bytes,
    )
    metrics.watch(
        "next_key_expiry_timestamp_seconds",
        "When the next live API key expires, UTC seconds; +Inf: none does",
        keys.next_expiry,
    )
    return Services(
        settings,
        store,
        bases,
        bell,
        FutureWaiter(store, bell),
        BaseLimits(settings, store, bases),
        engine,
        metrics,
        KeptValue(partial(_metrics_page, store, engine, metrics)),
        LoopWatch(metrics.blocked),
        Semaphore(LARGE_AT_ONCE),
        keys,
        Signer(signing, settings.trust_forwarded),
        queues,
        RequestRates(store),
        KeyBacklogs(store),
        Arrivals(store),
        Heartbeats(store),
        room,
        KeptValue(snapshots.read),
        PassHeads(),
        open_storage(settings.checkpoint_root, settings.checkpoint_url),
    )


def make_app(settings: Settings) -> FastAPI:
    """Build routes and middleware; `app.state.services` is to be set before the app is started."""
    app = Documented(
        title="skyrl-tinker",
        version=__version__,
        lifespan=_lifespan,
        openapi_url=pages.OPENAPI_URL,
        docs_url=None,
        redoc_url=None,
    )
    app.state = cast(State, SimpleNamespace())  # its own look-up of attributes is slow, and of each layer
    error_responses.install(app)
    app.mount(pages.DOCS_ASSETS_URL, pages.docs_assets())
    app.mount(pages.PAGES_URL, pages.pages())
    app.routes.extend(_routes())
    app.add_middleware(FastPaths, routes=app.routes)
    app.add_middleware(
        BodyLimitMiddleware,
        limits=BodyLimits(
            wire=settings.bodies.wire_mb * MiB,
            expanded=settings.bodies.expanded_mb * MiB,
            json=settings.bodies.json_mb * MiB,
            held=settings.api_share(settings.bodies.held_mb * MiB),
        ),
        spool=Directories(settings).run_dir,
    )
    app.add_middleware(AdmissionMiddleware)
    app.add_middleware(ArrivalsMiddleware)
    app.add_middleware(AuthMiddleware, metrics_key=settings.metrics_key)
    app.add_middleware(OwnHostsMiddleware, host=settings.host, allowed=settings.allowed_hosts)
    app.add_middleware(RequestMetricsMiddleware, routes=app.routes)  # added last, runs first
    return app


@cache
def _routes() -> Sequence[BaseRoute]:
    """Build the routes of all modules in `routes`: below / of a `root`, below /api/v1 of a `router`.

    They keep nothing of an app: FastAPI takes a fifth of a second for them.
    """
    router = APIRouter(responses=ERRORS)
    modules = [import_module(f"{routes.__name__}.{each.name}") for each in iter_modules(routes.__path__)]
    for name, prefix in (("root", ""), ("router", "/api/v1")):
        for module in modules:
            if own := getattr(module, name, None):
                router.include_router(own, prefix=prefix)
    return tuple(router.routes)


async def _metrics_page(store: Store, engine: EngineClient, metrics: ApiMetrics) -> bytes:
    """Return the metrics of the engine, its samplers and this process; also while the engine is down."""
    try:
        told, up = await engine.ask("/metrics"), True
    except EngineUnavailableError:
        told, up = b"", False
    state = await store.read(engine_state)
    return metrics.text(engine_up=up, ready=state.ready) + told


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    services: Services = app.state.services
    await services.store.wait_until_there()
    await services.waiter.start()
    await services.keys.refresh()
    async with TaskGroup() as tasks:
        background = (
            tasks.create_task(services.waiter.run(), name="future-waiter"),
            tasks.create_task(services.watch.run(), name="loop-watch"),
            tasks.create_task(services.keys.run(), name="key-ring"),
            tasks.create_task(services.arrivals.run(), name="arrivals"),
            tasks.create_task(services.heartbeats.run(), name="heartbeats"),
            tasks.create_task(services.queues.run(), name="engine-queues"),
        )
        yield
        services.waiter.stop()
        for task in background:
            task.cancel()
        await services.engine.close()
