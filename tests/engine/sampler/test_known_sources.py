"""Who samples a dropped version is looked up again, and nobody else: who publishes drops versions often."""

from typing import Any, cast

import pytest
from sqlalchemy import Connection

from skyrl_tinker.domain.ids import ModelKey, SamplingSessionId, VersionId
from skyrl_tinker.domain.values import WeightVersion
from skyrl_tinker.engine.outbox import Outbox
from skyrl_tinker.engine.sampler import sampler_driver
from skyrl_tinker.engine.sampler.ephemeral_versions import EphemeralVersions
from skyrl_tinker.engine.sampler.inflight_targets import InflightTarget, KnownSources
from skyrl_tinker.engine.sampler.sampler_driver import SamplerDriver
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.engine.scheduling.slots import Concurrency
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.errors import StateLostError
from skyrl_tinker.store import sampling_sessions
from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.store import Store
from tests.engine.support import journal
from tests.store.support.rows import ephemeral
from tests.support.scripted_samplers import ScriptedSamplers


class Clients:
    """A driver, sampling clients, and the look-ups of their sessions."""

    def __init__(self, store: Store, bell: Doorbell, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = store
        self.samplers = cast(Samplers, ScriptedSamplers())
        metrics = Metrics()
        self.driver = SamplerDriver(
            store, self.samplers, Outbox(store, bell, metrics), Concurrency(8, 8), metrics
        )
        nothing = cast(Any, None)
        self._versions = EphemeralVersions(
            store, [self.samplers], self.driver.forget_sources, nothing, nothing
        )
        self.looked_up: list[SamplingSessionId] = []
        self.meanwhile: WeightVersion | None = None
        """Dropped while the store is asked for a session."""
        read = sampler_driver._session_version

        def noted(conn: Connection, session: SamplingSessionId) -> Any:
            self.looked_up.append(session)
            found, dropped, self.meanwhile = read(conn, session), self.meanwhile, None
            if dropped is not None:
                self.driver.forget_sources(dropped)
            return found

        monkeypatch.setattr(sampler_driver, "_session_version", noted)

    async def model(self) -> ModelKey:
        return await journal.key_of(self.store, await journal.ready_model(self.store))

    async def publish(self, model: ModelKey, *, inflight: bool = False) -> WeightVersion:
        number: VersionId = await ephemeral(self.store, model, inflight=inflight)
        version = WeightVersion(number, "lora", "/ram/v")
        if inflight:
            self.samplers.target(model, version)
        return version

    async def open(self, version: WeightVersion | None) -> SamplingSessionId:
        session = await journal.new_session(self.store)
        number = None if version is None else version.id
        return await self.store.write(
            lambda conn: sampling_sessions.create(
                conn, session, 0, base_model="tiny", model_path=None, version_id=number
            )
        )

    async def drop(self, version: WeightVersion) -> None:
        assert await self._versions.retire(version)


@pytest.fixture
def clients(store: Store, bell: Doorbell, monkeypatch: pytest.MonkeyPatch) -> Clients:
    return Clients(store, bell, monkeypatch)


async def test_only_clients_of_a_dropped_version_are_looked_up_again(clients: Clients) -> None:
    dropped, kept = [await clients.publish(await clients.model()) for _ in range(2)]
    mine, others = [await clients.open(dropped) for _ in range(2)], [await clients.open(kept)]
    others.append(await clients.open(None))
    for each in (*mine, *others):
        await clients.driver._source(each)
    clients.looked_up.clear()
    await clients.drop(dropped)
    assert [await clients.driver._source(each) for each in others] == [kept, None]
    assert clients.looked_up == []
    for each in mine:
        with pytest.raises(StateLostError, match="have expired"):
            await clients.driver._source(each)
    assert clients.looked_up == mine


async def test_an_inflight_client_is_looked_up_again_once_nothing_is_left_to_follow(clients: Clients) -> None:
    model = await clients.model()
    first = await clients.publish(model, inflight=True)
    client = await clients.open(first)
    source = await clients.driver._source(client)
    newest = await clients.publish(model, inflight=True)
    await clients.drop(first)
    assert await clients.driver._source(client) is source
    assert isinstance(source, InflightTarget)
    assert source.version == newest
    assert clients.looked_up == [client]
    await clients.drop(newest)
    with pytest.raises(StateLostError, match="have expired"):
        await clients.driver._source(client)


@pytest.mark.parametrize("own", [False, True])
async def test_a_look_up_is_repeated_if_its_own_version_was_dropped_meanwhile(
    clients: Clients, *, own: bool
) -> None:
    mine, other = [await clients.publish(await clients.model()) for _ in range(2)]
    client = await clients.open(mine)
    clients.meanwhile = mine if own else other
    assert await clients.driver._source(client) == mine
    assert clients.looked_up == [client] * (1 + own)


def test_the_oldest_make_room_and_nothing_stays_of_them() -> None:
    first, second, third = (SamplingSessionId(name) for name in "abc")
    version = WeightVersion(VersionId(1), "lora", "/v1")
    target = InflightTarget(ModelKey(1), WeightVersion(VersionId(2), "lora", "/v2"))
    known = KnownSources(2)
    for session, source in ((first, target), (second, version), (third, version)):
        known.add(session, source)
    assert [each in known for each in (first, second, third)] == [False, True, True]
    assert not known._targets
    known.add(first, target)
    known.forget(version)
    known.forget(target.version)
    assert not known._sources
    assert not known._sessions
