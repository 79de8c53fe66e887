"""The pages name what exists: files of the repository, links between pages, modules that a request passes."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from skyrl_tinker.config.former_settings import FORMER
from tests.support.pages import PAGES, ROOT

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


def test_every_alert_has_its_line_on_the_monitoring_page() -> None:
    groups = yaml.safe_load((ROOT / "docker" / "prometheus" / "alerts.yml").read_text())["groups"]
    rules = [rule["alert"] for group in groups for rule in group["rules"]]
    severities = {rule["labels"]["severity"] for group in groups for rule in group["rules"]}
    assert severities == {"critical", "warning"}
    page = (ROOT / "docs" / "monitoring.md").read_text()
    listed = page.partition("| alert |")[2].split("\n\n")[0].splitlines()[2:]
    assert sorted(re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in listed))) == sorted(rules)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    names = set(
        re.findall(r"`((?:\w[\w.-]*/)+[\w.-]*\w\.(?:py|md|yaml|toml|lock))(?:::\w+)?`", page.read_text())
    )
    assert not {
        name for name in names if not any((ROOT / base / name).exists() for base in ("", "skyrl_tinker"))
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_names_a_setting_of_the_past(page: Path) -> None:
    """Flags of the SDK, which had been settings without a table, are still named as flags."""
    past = {name for name, now in FORMER.items() if f"sdk.{name}" not in (now, *FORMER)}
    assert not past & set(re.findall(r"`([a-z][\w.]*)`", page.read_text()))


def test_every_test_that_the_traps_page_names_exists() -> None:
    tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "traps.md").read_text())
    assert len(tests) > 36
    assert not [test for file, test in tests if f"def {test}(" not in (ROOT / file).read_text()]


def test_every_package_is_on_the_architecture_page() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    packages = {path.parent.name for path in (ROOT / "skyrl_tinker").glob("**/__init__.py")}
    assert not {name for name in packages - {"pb"} if f"{name}/" not in page}


@pytest.mark.parametrize("name", ["settings", "samplers"])
def test_a_page_made_from_the_code_is_that_of_the_code(name: str) -> None:
    page = subprocess.check_output([sys.executable, ROOT / "scripts" / f"{name}-page"], text=True)
    assert (ROOT / "docs" / f"{name}.md").read_text() == page, f"scripts/{name}-page > docs/{name}.md"


def test_a_row_of_the_page_of_sizes_is_that_of_the_code() -> None:
    command = [sys.executable, ROOT / "scripts" / "sizing-page", "Qwen3-0.6B", "4096"]
    row = subprocess.check_output(command, text=True)
    assert row.startswith("| Qwen3-0.6B | rank 64 |")
    assert row in (ROOT / "docs" / "sizing.md").read_text()


def _texts(tree: ast.AST) -> Iterator[str]:
    """Every text of a module; what a formatted one inserts is a NUL."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_every_message_on_the_page_of_troubles_is_one_of_the_code() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    messages = re.findall(r"^\| `([^`]+)`(?! \(of pydantic)", page, re.MULTILINE)
    modules = (ROOT / "skyrl_tinker").rglob("*.py")
    texts = "\n".join(text for module in modules for text in _texts(ast.parse(module.read_text())))
    assert len(messages) > 24
    patterns = {each: ".*".join(map(re.escape, each.split("…"))) for each in messages}
    assert not [each for each, pattern in patterns.items() if not re.search(pattern, texts)]


def test_every_page_is_in_the_sites_navigation() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = [
        page for part in nav for page in (next(iter(part.values())) if isinstance(part, dict) else [part])
    ]
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    assert not {
        page.name
        for page in (ROOT / "docs").glob("*.md")
        if f"]({page.name})" not in index and page.name != "index.md"
    }


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= MOST_WORDS_OF_README
