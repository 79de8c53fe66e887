"""`serve` replaces whatever dies under it."""

from collections.abc import Iterator

import pytest

from tests.support.serve import HEAL_S, KINDS, Serve, serving, wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Its own one: most of the deaths here are also the engine's."""
    with serving(tmp_path_factory.mktemp("healing")) as healing:
        yield healing


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "router"])
def test_it_heals_when_one_is_killed(server: Serve, kind: str) -> None:
    victim = server.find(kind)
    assert victim is not None
    victim.kill()

    def healed() -> bool:
        found = server.find(kind)
        return found is not None and found != victim and server.ready()

    assert wait_until(healed, HEAL_S)
    current = server.tree()
    assert wait_until(
        lambda: not [each for each in server.seen if each not in current and each.is_running()], 10
    )
