"""A plain `pip install` of the wheel serves too: the migrations and the model travel inside."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.support.certificates import write_certificate
from tests.support.serve import serving

ROOT = Path(__file__).parents[2]
USER = """
import tinker
with tinker.ServiceClient() as service:
    assert service.create_lora_training_client(base_model="tiny", rank=4).result().model_id
"""


def checkout(target: Path) -> Path:
    """What a build needs of the repository; building writes beside its source."""
    for name in ("skyrl_tinker", "alembic", "examples"):
        shutil.copytree(ROOT / name, target / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target / name)
    return target


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh venv with the wheel; third-party packages are borrowed from this one."""
    directory = tmp_path_factory.mktemp("wheel")
    source = checkout(directory / "source")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(directory), str(source)],
        check=True,
    )
    fresh = directory / "venv"
    venv.create(fresh, symlinks=True)
    site = fresh / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (wheel,) = directory.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return fresh / "bin" / "python"


def test_the_wheel_serves_https_from_a_fresh_venv(installed: Path, tmp_path: Path) -> None:
    where = subprocess.check_output(
        [installed, "-c", "import skyrl_tinker; print(skyrl_tinker.__file__)"], text=True, cwd=tmp_path
    )
    assert where.startswith(str(installed.parents[1]))
    cert, key = write_certificate(tmp_path)
    https = ["--tls-cert", str(cert), "--tls-key", str(key)]
    with serving(tmp_path / "home", *https, python=str(installed)) as server:
        variables = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-local", "SSL_CERT_FILE": str(cert)}
        assert server.url.startswith("https://")
        subprocess.run([sys.executable, "-c", USER], env=os.environ | variables, check=True)
