"""The pages name what exists: files of the repository, links between pages, modules that a request passes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MOST_WORDS_OF_README = 700


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text())
    for file, anchor in links:
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), file
        assert not anchor or anchor in anchors(target), f"{file}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    names = set(
        re.findall(r"`((?:\w[\w.-]*/)+[\w.-]*\w\.(?:py|md|yaml|toml|lock))(?:::\w+)?`", page.read_text())
    )
    assert not {
        name for name in names if not any((ROOT / base / name).exists() for base in ("", "skyrl_tinker"))
    }


def test_every_test_that_the_traps_page_names_exists() -> None:
    tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "traps.md").read_text())
    assert len(tests) > 36
    assert not [test for file, test in tests if f"def {test}(" not in (ROOT / file).read_text()]


def test_every_package_is_on_the_architecture_page() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    packages = {path.parent.name for path in (ROOT / "skyrl_tinker").glob("**/__init__.py")}
    assert not {name for name in packages - {"pb"} if f"{name}/" not in page}


def test_the_page_of_settings_is_that_of_the_code() -> None:
    page = subprocess.check_output([sys.executable, ROOT / "scripts" / "settings-page"], text=True)
    assert (ROOT / "docs" / "settings.md").read_text() == page, "scripts/settings-page > docs/settings.md"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    assert not {
        page.name
        for page in (ROOT / "docs").glob("*.md")
        if f"]({page.name})" not in index and page.name != "index.md"
    }


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= MOST_WORDS_OF_README
