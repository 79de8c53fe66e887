"""vLLM's next release on a CPU: its Python, over the kernels of the installed release.

The wheel on the package index is for GPUs and another torch; a build for CPUs ends at the installed release.
"""

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import vllm

RELEASE = "0.33.0"


def packages() -> Path:
    """Return a directory to put before all others on PYTHONPATH; it is fetched unless it is there."""
    directory = Path.home() / ".cache" / "skyrl-tinker" / f"vllm=={RELEASE}-{sys.implementation.cache_tag}"
    python = directory / "packages"
    if not (fetched := directory / "fetched").exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*pip, "--dest", directory, f"vllm=={RELEASE}"], check=True)
        (wheel,) = directory.glob("*.whl")
        with ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith((".py", ".json"))]
            archive.extractall(python, names)
        wheel.unlink()
        metadata = python / f"vllm-{RELEASE}+cpu.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {RELEASE}+cpu\n")
        fetched.touch()
    for kernels in Path(vllm.__path__[0]).glob("*.so"):
        link = python / "vllm" / kernels.name
        link.unlink(missing_ok=True)
        link.symlink_to(kernels)
    return python
