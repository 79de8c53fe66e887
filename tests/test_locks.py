"""The locked versions: complete, with hashes, within the ranges of pyproject.toml, and of one index."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SERVER = [*PROJECT["build-system"]["requires"], *PROJECT["project"]["dependencies"]]
EXTRAS: Mapping[str, list[str]] = PROJECT["project"]["optional-dependencies"]
PIN = re.compile(r"^([a-z0-9-]+)==([^ ;]+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE)


def locked(*names: str) -> dict[str, str]:
    texts = [(ROOT / "requirements" / f"{name}.lock").read_text() for name in names]
    return {pin[1]: pin[2] for text in texts for pin in PIN.finditer(text)}


@pytest.mark.parametrize("file", sorted((ROOT / "requirements").glob("*.lock")), ids=lambda file: file.stem)
def test_each_package_has_one_version_and_its_hashes(file: Path) -> None:
    rest = PIN.sub("", file.read_text())
    assert locked(file.stem)
    assert not [line for line in rest.splitlines() if line and not line.startswith("# ")]


@pytest.mark.parametrize(
    ("extras", "locks"),
    [
        (("cpu", "postgresql"), ("torch-cpu", "cpu")),
        (("gpu", "postgresql"), ("gpu",)),
        (("cpu", "demo", "dev", "s3", "otlp"), ("torch-cpu", "cpu", "dev")),
        (("gpu", "demo", "dev", "s3", "otlp"), ("gpu", "dev")),
        (("cookbook", "docs"), ("torch-cpu", "cpu", "dev", "tests")),
        (("cookbook", "docs"), ("gpu", "dev", "tests")),
    ],
)
def test_locks_have_all_that_is_asked_for(extras: tuple[str, ...], locks: tuple[str, ...]) -> None:
    found = locked(*locks)
    asked = [Requirement(text) for text in (*SERVER, *(each for extra in extras for each in EXTRAS[extra]))]
    wrong = {
        str(each): found.get(canonicalize_name(each.name))
        for each in asked
        if not each.specifier.contains(found.get(canonicalize_name(each.name), "0"), prereleases=True)
    }
    assert not wrong


@pytest.mark.parametrize("name", ["fastapi", "uvicorn"])
def test_packages_whose_internals_are_used_stop_at_the_next_minor_version(name: str) -> None:
    (asked,) = [each for each in map(Requirement, SERVER) if each.name == name]
    major, minor, *_ = locked("cpu")[name].split(".")
    assert not asked.specifier.contains(f"{major}.{int(minor) + 1}")


@pytest.mark.parametrize("script", ["scripts/setup", "docker/install-packages"])
def test_no_second_index_may_give_a_package_of_the_first(script: str) -> None:
    text = (ROOT / script).read_text()
    assert "--extra-index-url" not in text
    assert "--require-hashes" in text
