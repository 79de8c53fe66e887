"""docs/protocol.md tells of every route, and of each a test that exists."""

import ast
import re
from pathlib import Path

import pytest
from fastapi.routing import APIRoute

from tests.api.support.world import World

ROOT = Path(__file__).parents[3]
ROW = re.compile(r"^\| `([A-Z]+) (\S+)` \| [SF] \| (.+?) \| `(\S+?)::(\w+)` \|$", re.MULTILINE)
ROWS = ROW.findall((ROOT / "docs" / "protocol.md").read_text())


def functions_of(file: Path) -> set[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, functions)}


async def test_the_page_has_a_row_for_every_route_and_no_other(world: World) -> None:
    told = [(method, path) for method, path, *_ in ROWS]
    routes = {
        (method, re.sub(r":\w+}", "}", route.path))
        for route in world.app.routes
        if isinstance(route, APIRoute) and route.include_in_schema
        for method in route.methods
    }
    assert len(told) == len(set(told))
    assert set(told) == routes


@pytest.mark.parametrize(("file", "test"), [(row[3], row[4]) for row in ROWS])
def test_the_test_of_a_row_exists(file: str, test: str) -> None:
    assert test.startswith("test_")
    assert test in functions_of(ROOT / file)


def test_every_call_row_was_read() -> None:
    """A row that is written otherwise would go unseen."""
    page = (ROOT / "docs" / "protocol.md").read_text()
    assert len(ROWS) == len(re.findall(r"^\| `[A-Z]+ /", page, re.MULTILINE))
