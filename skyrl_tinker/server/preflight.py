"""Checks of `serve` before a process starts. Each raises a StartupError that names a setting to change."""

import errno
import os
import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from sqlalchemy import Connection

from skyrl_tinker.bundled import install
from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories, free_bytes
from skyrl_tinker.domain.units import MiB
from skyrl_tinker.errors import NotSupportedError, StartupError, StorageError
from skyrl_tinker.inference.sampling_engine import check_engine, engine_of
from skyrl_tinker.server.addresses import is_http, is_loopback
from skyrl_tinker.server.base_models import catalog
from skyrl_tinker.storage import owner_mark
from skyrl_tinker.storage.checkpoint_storage import CheckpointStorage, open_storage
from skyrl_tinker.storage.owner_mark import LocalPlace
from skyrl_tinker.storage.storage_port import LOCAL_DISK, Storage
from skyrl_tinker.store import api_keys, checkpoint_records, server_state
from skyrl_tinker.store.database.migrate import is_migrated
from skyrl_tinker.store.database.opening import file_of
from skyrl_tinker.store.replay import snapshot_records
from skyrl_tinker.store.store import write_once
from skyrl_tinker.system.packages import is_installed
from skyrl_tinker.weight_sync.factory import choose

START_BYTES = 16 * MiB
"""Room that a start takes under home: sockets, logs, and the pages of the database's log."""
_URL_SETTINGS = ("sampler_urls", "prefill_urls", "decode_urls")
_RAY_S = 5.0  # for its head to answer
_BACKLOG = 4096  # thousands of long polls may connect at once
_ASKED = 20  # directories that are looked for in object storage


def check_settings(settings: Settings) -> None:
    """Refuse settings that are not implemented yet or contradict each other, whatever the placement."""
    _check_samplers(settings)
    _check_further(settings)
    _check_interpreters(settings)
    _check_trained(settings)
    check_tls(settings)
    _check_standby(settings)
    _check_dtype(settings)
    _check_otlp(settings)
    if settings.ray_address is not None:
        _check_ray(settings.ray_address)


def _check_further(settings: Settings) -> None:
    """Refuse further base models whose samplers contradict themselves, or are another's."""
    urls = [url.rstrip("/") for url in settings.external_urls]
    for own in catalog.further(settings):
        with catalog.refusals(own):
            _check_samplers(own)
            _check_dtype(own)
            for url in (url.rstrip("/") for url in own.external_urls):
                if url in urls:
                    raise StartupError(f"sampler_urls: {url} serves another base model")
        urls += [url.rstrip("/") for url in own.external_urls]


def _check_interpreters(settings: Settings) -> None:
    """Refuse interpreters that run no server. That of the settings is also for further base models."""
    further = catalog.further(settings)
    heirs = [each for each in further if settings.bases[each.base_model].sampler_python is None]
    if settings.sampler_python is not None:
        _require_use(settings, *heirs)
    for each in further:
        if each not in heirs:
            with catalog.refusals(each):
                _require_use(each)


def _require_use(*given: Settings) -> None:
    users = [each for each in given if each.sampler_engine == "sglang"]
    if not users:
        raise StartupError(f"sampler_python: found sampler_engine {given[0].sampler_engine}, expected sglang")
    if all(each.external_urls for each in users):
        name = _url_setting(users[0])
        raise StartupError(f"sampler_python and {name}: start the servers with the interpreter yourself")


def _check_trained(settings: Settings) -> None:
    """Refuse several trained base models on a cluster."""
    further = settings.further_trained
    if further and settings.ray_address is not None:
        raise StartupError(
            f"bases.{further[0].base_model}.roles: found train with --ray-address, expected sample alone: on "
            "a cluster only base_model is trained"
        )


def _check_standby(settings: Settings) -> None:
    """Refuse a standby that could not bring back the models of the server before it."""
    if not settings.standby:
        return
    if file_of(settings.store_url) is not None:
        raise StartupError(
            "--standby: found a database that is a file, expected --database-url postgresql+psycopg://…"
        )
    directories = Directories(settings)
    for name, place, url in (
        ("checkpoints", settings.checkpoint_root, settings.checkpoint_url),
        ("snapshots", directories.snapshot_dir, settings.snapshot_url),
    ):
        if url is None and place.is_relative_to(settings.root):
            raise StartupError(
                f"--standby: found {name} under home, {place}; expected --{name} with a URL, or a directory "
                "that all hosts share, under the same path"
            )


def check_placement(settings: Settings) -> None:
    """Refuse settings that contradict the placement, which is decided."""
    _require_abilities(settings, {"colocated": settings.colocated})
    _check_transport(settings)
    for own in catalog.further(settings):
        with catalog.refusals(own):
            _check_transport(own)
    if settings.colocated:
        _check_colocated(settings)


def _check_transport(settings: Settings) -> None:
    torch_groups = engine_of(settings).torch_groups
    choose(
        settings.weight_transport, settings.device, colocated=settings.colocated, torch_groups=torch_groups
    )


def check_storage(settings: Settings) -> None:
    """Refuse object storage that cannot be written to."""
    for name, url in (("checkpoints", settings.checkpoint_url), ("snapshots", settings.snapshot_url)):
        if url is not None:
            with _refusals(name, url):
                CheckpointStorage(settings.root, url, pauses_s=()).probe()


def claim_storage(settings: Settings) -> None:
    """Refuse places of files that belong to another database, or lack files recorded in this one."""
    owner, checkpoints, snapshots = write_once(settings.store_url, _recorded, settings.root)
    snapshot_dir = Directories(settings).snapshot_dir
    for name, root, url, part, recorded in (
        ("checkpoints", settings.checkpoint_root, settings.checkpoint_url, "", checkpoints),
        ("snapshots", snapshot_dir, settings.snapshot_url, "models", snapshots),
    ):
        with _refusals(name, url or str(root)):
            storage = open_storage(root, url, part, pauses_s=())
            place = LocalPlace(root) if url is None else CheckpointStorage(settings.root, url, pauses_s=())
            at_home = url is None and root.is_relative_to(settings.root) and file_of(settings.store_url)
            expected = [] if at_home else recorded  # a disk that has the database has its files
            owner_mark.claim(place, owner, partial(_lacks, expected, root, storage))


def _recorded(conn: Connection) -> tuple[str, list[Path], list[Path]]:
    """Return the database's identity, and the directories of its checkpoints and snapshots."""
    checkpoints = checkpoint_records.list_directories(conn).items()
    snapshots = snapshot_records.all_directories(conn).values()
    kept = [Path(directory) for directory, removed in checkpoints if not removed]
    return server_state.identity(conn), kept, [Path(directory) for directory in snapshots]


def _lacks(recorded: Sequence[Path], root: Path, storage: Storage) -> bool:
    """Return whether none of the directories is there that are recorded below this root."""
    below = [directory for directory in recorded if directory.is_relative_to(root)]
    asked = below[-_ASKED:] if storage is not LOCAL_DISK else []
    return bool(below) and not any(each.is_dir() for each in below) and not any(map(storage.has, asked))


@contextmanager
def _refusals(name: str, place: str) -> Iterator[None]:
    """Turn a fault of a place of files into a StartupError that names its setting."""
    try:
        yield
    except (ImportError, ValueError, StorageError) as error:
        raise StartupError(f"--{name} {place}: {error}{_storage_hint(place, error)}") from error


def _storage_hint(url: str, error: Exception) -> str:
    if isinstance(error, ValueError):
        return "; expected a directory or a URL that fsspec knows, as s3://bucket/path"
    if not url.startswith("s3:"):
        return ""
    if isinstance(error, ImportError):
        return f"; {install('s3')}"
    if "credentials" in str(error):
        return (
            "; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and AWS_ENDPOINT_URL unless it is Amazon's, "
            "or write ~/.aws/credentials"
        )
    return ""


def check_room(home: Path) -> None:
    """Refuse a disk that is full."""
    free = free_bytes(home)
    if free < START_BYTES:
        raise StartupError(
            f"{free / MiB:.1f} MiB are free at {home}, and a start needs {START_BYTES // MiB}: make room "
            "there, then start again; nothing that was acknowledged is lost"
        )


def check_host(settings: Settings) -> None:
    """Refuse to open the server to a network by mistake. A database without tables has no keys."""
    if settings.insecure or is_loopback(settings.host):
        return
    if not (is_migrated(settings.store_url) and write_once(settings.store_url, api_keys.count_keys)):
        raise StartupError(
            f"--host {settings.host} is open to the network and there are no API keys; make one with "
            "`skyrl-tinker keys create`, with this --home and --database-url, use 127.0.0.1, or add "
            "--insecure on a network that you trust"
        )


def _check_dtype(settings: Settings) -> None:
    """Refuse a type that replicas would die of: their LoRA kernels on CUDA take 16-bit types only."""
    ours = settings.samples and not settings.external_urls
    if settings.device == "cuda" and settings.trainer_dtype == "float32" and ours:
        raise StartupError(
            "--trainer-dtype float32 with --device cuda: GPU samplers take adapters in 16-bit types only; "
            "leave it out, or set bfloat16"
        )


def _check_otlp(settings: Settings) -> None:
    """Refuse a collector that the engine could not speak to: it would fail again and again."""
    endpoint = settings.otlp_endpoint
    if endpoint is None:
        return
    if not is_http(endpoint):
        raise StartupError(f"otlp_endpoint: found {endpoint!r}, expected http://host:port")
    if not all(map(is_installed, ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http"))):
        raise StartupError(f"otlp_endpoint: the OpenTelemetry packages are not installed; {install('otlp')}")


def _check_ray(address: str) -> None:
    """Refuse a cluster that is not there: Ray itself would try for minutes, again and again."""
    found = address
    if address == "auto":  # the address that `ray start` notes on each node
        note = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
        found = os.environ.get("RAY_ADDRESS") or (note.read_text().strip() if note.is_file() else "")
    host, _, port = found.rpartition(":")
    if found and not (host and port.isdigit()):
        raise StartupError(f"ray_address: found {found!r}, expected HOST:PORT or auto")
    try:
        if not found:
            raise ConnectionError("it is a node of none")
        socket.create_connection((host, int(port)), _RAY_S).close()
    except OSError as error:
        raise StartupError(
            f"--ray-address {address}: no Ray cluster answers this host ({error}); start one on it with `ray "
            "start` (docs/cluster.md)"
        ) from error


def check_tls(settings: Settings) -> None:
    """Refuse a certificate that the API could not load: its process would die again and again."""
    cert, key = settings.tls_cert, settings.tls_key
    if (cert is None) != (key is None):
        raise StartupError("--tls-cert and --tls-key: found one of them, expected both or none")
    if cert is None or key is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key, password=_no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise StartupError(f"--tls-cert {cert} and --tls-key {key}: {error}") from error


def _no_password() -> str:
    raise ValueError("the private key is encrypted, expected one without a password")


def _check_colocated(settings: Settings) -> None:
    """Refuse contradictions when colocated: trainer rank i and sampler GPU i are then one device."""
    if settings.phases.min_s > settings.phases.max_s:
        raise StartupError(
            f"phases.min_s {settings.phases.min_s:g} > phases.max_s {settings.phases.max_s:g}: "
            "the shortest phase cannot exceed the longest wait of the other side"
        )
    if not settings.samples:
        raise StartupError("--placement colocated and --replicas 0: found no samplers to take turns with")
    if settings.external_urls:
        raise StartupError(
            f"--placement colocated and {_url_setting(settings)}: this server cannot place samplers that it "
            "does not start"
        )
    samplers = settings.replicas * engine_of(settings).workers(settings.tensor_parallel_size)
    ranks = settings.trainer_ranks
    if settings.device == "cuda" and samplers != ranks:
        raise StartupError(
            f"--placement colocated on CUDA: {ranks} trainer ranks share their GPUs with {samplers} sampler "
            f"GPUs ({settings.replicas} replicas x {samplers // settings.replicas}): make the numbers equal"
        )


def _require_abilities(settings: Settings, asked: Mapping[str, bool]) -> None:
    try:
        engine_of(settings).abilities.require(name for name, given in asked.items() if given)
    except NotSupportedError as error:
        raise StartupError(str(error)) from error


def _check_samplers(settings: Settings) -> None:
    asked = {
        "router_replay": settings.router_replay,
        "reasoning_parser": settings.reasoning_parser is not None,
        "tool_parser": settings.tool_parser is not None,
        "processed_logprobs": settings.sampled_logprobs == "processed",
        "prefill_urls": bool(settings.prefill_urls),
        "router_url": settings.router_url is not None,
        "ray_address": settings.ray_address is not None,
    }
    _require_abilities(settings, asked)
    _check_urls(settings)
    name = _url_setting(settings) if settings.external_urls else ""
    if settings.samples:
        check_engine(settings, name)
    if name and settings.replicas != 1:
        raise StartupError(
            f"--replicas {settings.replicas} and {name}: the server either starts samplers "
            "or uses running ones; give one of the two"
        )


def _check_urls(settings: Settings) -> None:
    for name in (*_URL_SETTINGS, "router_url"):
        given = getattr(settings, name)
        for url in (given,) if isinstance(given, str) else given or ():
            if not is_http(url):
                raise StartupError(f"{name}: found {url!r}, expected http://host:port")
    urls = settings.external_urls
    if len({url.rstrip("/") for url in urls}) < len(urls):
        names = " and ".join(name for name in _URL_SETTINGS if getattr(settings, name))
        raise StartupError(f"{names} name a server twice: {', '.join(urls)}")
    if settings.router_url is not None and not urls:
        raise StartupError("router_url needs sampler_urls: adapters and weights go to each sampler directly")
    if bool(settings.prefill_urls) != bool(settings.decode_urls):
        raise StartupError("prefill_urls and decode_urls: found one of them, expected both or none")
    if settings.prefill_urls and settings.router_replay:
        raise StartupError(
            "router_replay: found prefill_urls, expected none: servers that continue prompts do not know "
            "the experts of their tokens"
        )
    if settings.prefill_urls and settings.sampler_urls:
        raise StartupError("prefill_urls and sampler_urls: a server does one or both; give one of the two")


def _url_setting(settings: Settings) -> str:
    return next(name for name in _URL_SETTINGS if getattr(settings, name))


def listen(host: str, port: int) -> socket.socket:
    """Open the listening socket of a server; port 0 is any free one.

    `serve` holds it until it ends and each API process inherits it, so that no other process can take the
    port, and connections made while an API restarts wait instead of being refused.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError) as error:  # a name of the wrong form is a UnicodeError
        code = getattr(error, "errno", 0) or 0
        unknown = str(getattr(error, "strerror", error)).partition(" (")[0]  # those of names are below 0
        reason = os.strerror(code) if code > 0 else unknown
        if code in (errno.EADDRINUSE, errno.EACCES):
            message = f"cannot listen on {host}:{port} ({reason}); choose another --port (0 = any free one)"
        else:
            message = f"cannot listen on {host}:{port} ({reason}); expected --host of this machine"
        raise StartupError(message) from error
