"""The table of traits: no route is forgotten, and none that is gone is kept."""

from starlette.routing import Route

from skyrl_tinker.api.app import make_app
from skyrl_tinker.api.middleware.route_traits import TRAITS
from skyrl_tinker.config import Settings
from tests.api.support.world import World


async def test_every_path_is_that_of_a_route_and_none_that_is_posted_to_is_missing(world: World) -> None:
    routes = [route for route in world.app.routes if isinstance(route, Route) and "{" not in route.path]
    posted = {route.path for route in routes if "POST" in (route.methods or ())}
    assert posted - TRAITS.keys() == set()
    assert TRAITS.keys() - {route.path for route in routes} == set()


def test_apps_of_one_process_have_their_routes_in_common() -> None:
    """FastAPI takes a fifth of a second to build them, and most tests of the API have an app of their own."""
    first, second = (make_app(Settings()).routes for _ in range(2))
    assert len(first) > 80
    assert sum(one is not other for one, other in zip(first, second, strict=True)) == 3  # document and pages
