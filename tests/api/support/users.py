"""People with API keys, who speak one after another."""

from skyrl_tinker.store import api_keys
from tests.api.support.world import Json, World


async def new_user(world: World, name: str, *, admin: bool = False) -> str:
    """Their key. From the first on the server asks for one."""
    key = await world.store.write(lambda conn: api_keys.create(conn, name, admin=admin))
    await world.services.keys.refresh()
    return key


def speak_as(world: World, key: str) -> None:
    """Send all further requests with this key."""
    world.http.headers["X-API-Key"] = key


async def get(world: World, path: str, **query: object) -> Json:
    answer = await world.http.get(path, params={name: str(value) for name, value in query.items()})
    assert answer.status_code == 200, answer.text
    value: Json = answer.json()
    return value
