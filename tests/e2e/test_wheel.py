"""A plain `pip install` of the wheel serves too: migrations, examples and the model travel inside."""

import os
import shutil
import sqlite3
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.support.certificates import write_certificate
from tests.support.serve import serving

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


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


def run(python: Path, code: str, directory: Path) -> str:
    return subprocess.check_output([python, "-c", code], text=True, cwd=directory).strip()


def test_the_wheel_serves_https_from_a_fresh_venv_and_learns_by_its_own_example(
    installed: Path, tmp_path: Path
) -> None:
    fresh = str(installed.parents[1])
    assert run(installed, "import skyrl_tinker; print(skyrl_tinker.__file__)", tmp_path).startswith(fresh)
    examples = run(installed, "from skyrl_tinker import bundled as b; print(b.bundled('examples'))", tmp_path)
    assert examples.startswith(fresh)
    cert, key = write_certificate(tmp_path)
    https = ["--tls-cert", str(cert), "--tls-key", str(key)]
    several = ["--api-processes", "2"]  # on SQLite: those of tests/faults/ have PostgreSQL
    with serving(tmp_path / "home", *https, *several, python=str(installed)) as server:
        variables = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-local", "SSL_CERT_FILE": str(cert)}
        assert server.url.startswith("https://")
        demo = [sys.executable, f"{examples}/rl_loop.py", "--steps=3", f"--out={tmp_path}"]
        subprocess.run(demo, env=os.environ | variables)  # exits with 1: three steps learn too little
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_the_wheel_migrates_a_database(installed: Path, tmp_path: Path) -> None:
    command = [installed, "-m", "skyrl_tinker", "db", "migrate", "--home", str(tmp_path)]
    subprocess.run(command, cwd=tmp_path, check=True)
    with sqlite3.connect(tmp_path / "skyrl-tinker.db") as database:
        (revision,) = database.execute("select version_num from alembic_version").fetchone()
    database.close()
    versions = (ROOT / "alembic" / "versions").glob("*.py")
    assert revision == max(path.name.partition("_")[0] for path in versions)
