"""The dashboard's files: open to anybody, small, and without a way to other hosts or inline scripts."""

import re
from pathlib import Path

import pytest

import skyrl_tinker
from tests.api.support.users import new_user
from tests.api.support.world import World

FILES = Path(skyrl_tinker.__file__).parent / "dashboard"
NAMES = sorted(
    path.relative_to(FILES).as_posix()
    for path in FILES.rglob("*")
    if path.is_file() and path.suffix not in (".py", ".pyc")
)
MOST_BYTES = 200_000


@pytest.mark.parametrize("path", ["/", *(f"/dashboard/{name}" for name in NAMES)])
async def test_every_file_is_open_and_may_load_from_this_server_only(world: World, path: str) -> None:
    await new_user(world, "alice")
    answer = await world.http.get(f"http://api{path}")
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    refusal = await world.http.post(f"http://api{path}", content=b"x")
    assert refusal.status_code == 405


@pytest.mark.parametrize("path", ["/docs", "/docs/assets/swagger-ui-bundle.js"])
async def test_the_documentation_may_load_from_this_server_only_and_keeps_no_key(
    world: World, path: str
) -> None:
    await new_user(world, "alice")
    answer = await world.http.get(f"http://api{path}")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    page, script = (FILES / "docs.html").read_text(), (FILES / "docs.js").read_text()
    assert not re.findall(r"<script(?![^>]*src=)|<style| style=| on\w+=", page)
    assert "persistAuthorization" not in page + script


@pytest.mark.parametrize("path", ["/dashboard", "/dashboard/"])
async def test_the_dashboards_directory_leads_to_the_dashboard(world: World, path: str) -> None:
    await new_user(world, "alice")
    answer = await world.http.get(f"http://api{path}", follow_redirects=True)
    assert (answer.status_code, str(answer.url)) == (200, "http://api/")


@pytest.mark.parametrize("name", ["__init__.py", "../config.py", "%2e%2e/config.py", "missing.js"])
async def test_no_other_file_is_served(world: World, name: str) -> None:
    assert (await world.http.get(f"http://api/dashboard/{name}")).status_code == 404


def test_all_files_together_are_small() -> None:
    assert sum((FILES / name).stat().st_size for name in NAMES) < MOST_BYTES


def test_the_page_has_no_inline_script_or_style_and_every_file_that_it_names_exists() -> None:
    page = (FILES / "index.html").read_text()
    assert not re.findall(r"<script(?![^>]*src=)|<style| style=| on\w+=", page)
    names = re.findall(r'(?:src|href)="dashboard/([^"]+)"', page)
    for script in FILES.glob("*.js"):
        names += re.findall(r'from "\./([^"]+)"', script.read_text())
    assert len(names) > 15
    assert set(names) <= set(NAMES)


def test_what_is_vendored_has_its_licence() -> None:
    assert "MIT License" in (FILES / "vendor" / "uPlot.LICENSE").read_text()
    assert "SIL Open Font License" in (FILES / "vendor" / "Figtree.LICENSE").read_text()
