"""The table of traits: no route is forgotten, and none that is gone is kept."""

from starlette.routing import Route

from skyrl_tinker.api.middleware.route_traits import TRAITS
from tests.api.support.world import World


async def test_every_path_is_that_of_a_route_and_none_that_is_posted_to_is_missing(world: World) -> None:
    routes = [route for route in world.app.routes if isinstance(route, Route) and "{" not in route.path]
    posted = {route.path for route in routes if "POST" in (route.methods or ())}
    assert posted - TRAITS.keys() == set()
    assert TRAITS.keys() - {route.path for route in routes} == set()
