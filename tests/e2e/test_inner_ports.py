"""Strangers on this machine knock, without the token, at every port that the processes of a server listen on.

Strangers can open connections on loopback, and neither read our files nor our environments.
"""

import importlib
import ipaddress
import os
import pickle
import pkgutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
import ray.core.generated
import tinker

from skyrl_tinker.inference.constants import TOKEN
from skyrl_tinker.server.base_models.tiny_model import make_model
from tests.e2e.support.client import Client, random_tokens, train
from tests.support import serve
from tests.support.processes import title
from tests.support.serve import Serve, serving

pytestmark = pytest.mark.long

PATIENCE_S = 2.0
VLLM_ROUTES = """
GET /metrics /ping /version /load /v1/models /is_sleeping /server_info /docs /openapi.json /weight_version
POST /collective_rpc /update_weights /start_weight_update /finish_weight_update /init_weight_transfer_engine
POST /pause /resume /sleep /wake_up /reset_prefix_cache /reset_mm_cache /abort_requests /ping
POST /tokenize /detokenize /inference/v1/generate /v1/completions /v1/chat/completions /v1/responses
POST /v1/load_lora_adapter /v1/unload_lora_adapter /v1/embeddings /scale_elastic_ep
"""
ROUTER_ROUTES = """
GET / /health /liveness /readiness /workers /list_workers /get_loads /get_server_info /get_model_info /metrics
GET /v1/models
POST /add_worker?url=http://127.0.0.1:1 /remove_worker?url=http://127.0.0.1:1 /flush_cache
POST /finish_session?session_id=s /tokenize /inference/v1/generate /v1/completions /v1/chat/completions
"""
BODY = {
    "model": "base",
    "prompt": "a",
    "messages": [{"role": "user", "content": "a"}],
    "token_ids": [1],
    "sampling_params": {"max_tokens": 1},
    "method": "get_model",
    "lora_name": "a",
    "lora_path": "/",
}
GRPC_UNAUTHENTICATED = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED}


@dataclass(frozen=True)
class Port:
    """A listening TCP socket, and one of the processes that have it."""

    host: str
    number: int
    process: str

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.number}"

    def __str__(self) -> str:
        return f"{self.host}:{self.number} of {self.process[:60]}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """One with everything that has ports: ranks, replicas and their workers two each, a router, gloo."""
    directory = tmp_path_factory.mktemp("doors")
    settings = 'weight_transport = "gloo"\ntensor_parallel_size = 2\n'
    model = directory / "model"
    make_model(model, hidden=128)  # two workers cannot share three key-value heads
    models = ["--base-model", str(model), "--model-name", "tiny"]
    options = ["--replicas", "2", "--trainer-ranks", "2", *models]
    with serving(directory / "home", *options, settings=settings) as running:
        with Client.of(running.url) as client:
            full = client.new_lora(rank=0)
            full.save_weights_and_get_sampling_client().result()  # the members of the weight group have met
        yield running


@pytest.fixture(scope="module")
def ports(server: Serve) -> list[Port]:
    """All but the API's own."""
    return [port for port in _listening(server) if port.number != int(server.url.rpartition(":")[2])]


@pytest.fixture(scope="module")
def open_ports(ports: list[Port]) -> list[Port]:
    """Those where anybody can connect: nobody can at that of the router's metrics."""
    with ThreadPoolExecutor(len(ports)) as threads:
        return [port for port, connects in zip(ports, threads.map(_connects, ports), strict=True) if connects]


def test_every_port_is_on_loopback(ports: list[Port]) -> None:
    assert not [str(port) for port in ports if not ipaddress.ip_address(port.host).is_loopback]


def test_no_socket_takes_datagrams_or_has_an_abstract_name(server: Serve) -> None:
    """Neither has an owner or a mode."""
    for process in server.tree():
        for each in process.net_connections("all"):
            assert each.family == socket.AF_UNIX or each.type == socket.SOCK_STREAM, each
            assert not str(each.laddr).startswith(("@", "\0")), each


def test_unix_sockets_lie_in_directories_of_this_user_alone(server: Serve) -> None:
    paths = {
        Path(each.laddr)
        for process in server.tree()
        for each in process.net_connections("unix")
        if each.laddr and Path(each.laddr).exists()
    }
    assert len(paths) > 5
    for path in paths:
        assert any(_is_private(parent) for parent in path.parents), path


def test_a_knock_without_the_token_is_refused_at_every_port_and_the_server_works_on(
    server: Serve, open_ports: list[Port], tmp_path: Path
) -> None:
    canary = tmp_path / "unpickled"
    before = _processes(server)
    with ThreadPoolExecutor(16) as threads:
        complaints = [each for found in threads.map(_knock, open_ports) for each in found]
        list(threads.map(lambda port: _throw(port, canary), open_ports))
    assert not complaints, "\n".join(complaints)
    assert not canary.exists()
    with Client.of(server.url) as client:
        train(client.new_lora(), random_tokens(20, seed=1))
        sampler = client.base_sampler()
        prompt = tinker.ModelInput.from_ints(random_tokens(5, seed=1))
        for _ in range(4):
            sampler.sample(prompt, 1, tinker.SamplingParams(max_tokens=2)).result()
    assert _processes(server) == before, "something died"


def test_the_table_of_ports_is_no_longer_than_what_a_server_has(open_ports: list[Port]) -> None:
    assert [word for word in KINDS if not any(word in port.process for port in open_ports)] == []


def test_no_token_of_an_inner_door_stands_in_a_file_below_the_home(server: Serve) -> None:
    tokens = {
        value.encode()
        for process in server.tree()
        for name, value in process.environ().items()
        if name in (TOKEN, "RAY_AUTH_TOKEN")
    }
    assert len(tokens) == 2
    files = [file for file in server.home.rglob("*") if file.is_file()]
    assert {"api.log", "engine.log"} <= {file.name for file in files}
    assert not [file for file in files if any(token in file.read_bytes() for token in tokens)]


def _processes(server: Serve) -> dict[str, int | None]:
    """Map kinds of processes to the pid of the first of each."""
    found = {kind: server.find(kind) for kind in serve.KINDS}
    return {kind: process.pid if process else None for kind, process in found.items()}


def _listening(server: Serve) -> list[Port]:
    found = {}
    for process in server.tree():
        for each in process.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN:
                found.setdefault(each.laddr, title(process))
    plain = {address: address.ip.removeprefix("::ffff:") for address in found}
    return [Port(plain[address], address.port, process) for address, process in found.items()]


def _is_private(directory: Path) -> bool:
    status = directory.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o077


def _knock(port: Port) -> list[str]:
    """Return what is wrong with the port, unless it has closed. An unknown kind is wrong."""
    if not _connects(port):
        return []
    for word, knock in KINDS.items():
        if word in port.process:
            return [f"{port}: {complaint}" for complaint in knock(port)]
    return [f"{port}: a port of an unknown kind"]


def _connects(port: Port) -> bool:
    try:
        socket.create_connection((port.host, port.number), PATIENCE_S).close()
    except OSError:
        return False
    return True


def _knock_http(port: Port, routes: str) -> list[str]:
    complaints = []
    with httpx.Client(base_url=port.url, timeout=30, trust_env=False) as http:
        for line in routes.split("\n"):
            method, *paths = line.split() or [""]
            for path in paths:
                for headers in ({}, {"Authorization": "Bearer wrong"}):
                    body = BODY if method == "POST" else None
                    status = http.request(method, path, json=body, headers=headers).status_code
                    if status not in (401, 403, 404, 405):
                        complaints.append(f"{method} {path} answered {status}")
    return complaints


def _knock_vllm(port: Port) -> list[str]:
    return _knock_http(port, VLLM_ROUTES)


def _knock_router(port: Port) -> list[str]:
    return _knock_http(port, ROUTER_ROUTES)


def _knock_engine(port: Port) -> list[str]:
    """It has two: one of Ray's core, and the check of the router's clients."""
    return _knock_http(port, "GET /\n") if _speaks_http(port) else _knock_grpc(port)


def _knock_grpc(port: Port) -> list[str]:
    """Call every method that Ray's protocol has. All but the standard health check need the token."""
    complaints, refused = [], 0
    with grpc.insecure_channel(f"{port.host}:{port.number}") as channel:
        for method in _ray_methods():
            try:
                channel.unary_unary(method)(b"", timeout=30)
                complaints.append(f"{method} answered")
            except grpc.RpcError as error:
                if error.code() not in GRPC_UNAUTHENTICATED:
                    complaints.append(f"{method} answered {error.code()}: {error.details()}")
                refused += error.code() is grpc.StatusCode.UNAUTHENTICATED
    return complaints or ([] if refused else ["no method of Ray's asked for the token"])


def _ray_methods() -> list[str]:
    methods = []
    for module in pkgutil.iter_modules(ray.core.generated.__path__):
        if module.name.endswith("_pb2"):
            file = importlib.import_module(f"ray.core.generated.{module.name}").DESCRIPTOR
            for service in file.services_by_name.values():
                methods += [f"/{service.full_name}/{each.name}" for each in service.methods]
    assert len(methods) > 100
    return methods + [f"/ray.rpc.ObjectManagerService/{name}" for name in ("Push", "Pull")]


def _speaks_http(port: Port) -> bool:
    try:
        httpx.get(port.url, timeout=30, trust_env=False)
    except httpx.RemoteProtocolError:
        return False
    return True


class _Opens:
    """Its pickle creates a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self._path), "w")


def _throw(port: Port, canary: Path) -> None:
    """Send garbage and pickles, raw and as HTTP, each on a connection of its own."""
    pickled = pickle.dumps(_Opens(canary))
    head = b"POST /collective_rpc HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(pickled)
    for content in (
        os.urandom(4096),
        b"\0" * 64,
        pickled,
        len(pickled).to_bytes(8, "little") + pickled,
        head + pickled,
    ):
        try:
            with socket.create_connection((port.host, port.number), PATIENCE_S) as connection:
                connection.sendall(content)
                connection.settimeout(0.3)
                connection.recv(4096)
        except OSError:
            continue


KINDS = {
    "vllm::router": _knock_router,
    "vllm.vllm_entry": _knock_vllm,
    "skyrl_tinker.engine.engine_process": _knock_engine,
    "gcs/gcs_server": _knock_grpc,
    "raylet/raylet": _knock_grpc,
    "ray::RankProcess": _knock_grpc,
    "ray::SamplerServer": _knock_grpc,
}
"""Part of a process's title, and how its ports that let somebody connect are knocked at."""
