"""Sessions that have ended leave nothing in the engine's memory."""

import gc
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sized
from typing import Any

from skyrl_tinker.domain.ids import FutureStatus, ModelState, RequestKind
from skyrl_tinker.protocol.stored_requests import SaveSamplerBody, SaveWeightsBody
from skyrl_tinker.store import session_records
from tests.engine.support import journal
from tests.engine.support.world import World

SESSIONS = 5
BOUNDED = frozenset({"StepCurves._windows", "Planner._left"})
"""By the models that train, and to the sessions of the last minute."""


async def test_nothing_grows_with_sessions_that_have_ended(world: World) -> None:
    def found() -> Counter[str]:
        return sizes(world.driver, world.intake)

    await one_after_another(world, SESSIONS)
    before = await world.until(found, lambda now: now["Lanes._closed"] == 0)
    assert {"Lanes._open", "SleepingModels._fetched", "Planner._sessions"} <= before.keys()
    await one_after_another(world, SESSIONS)
    await world.until(lambda: found() - before, lambda grown: not grown)


async def one_after_another(world: World, count: int) -> None:
    """Sessions that train and save, end with gradients and with a request that waits for a missing one."""
    for _ in range(count):
        session = await journal.new_session(world.store)
        created = await journal.submit_create(world.store, session)
        model = created.model_id
        assert model is not None
        sampler = SaveSamplerBody(sampling_session_seq_id=0).to_bytes()
        answered = [
            created,
            await journal.submit_pass(world.store, model, 1),
            await journal.submit_step(world.store, model, 2),
            await journal.submit(world.store, model, 3, RequestKind.SAVE_WEIGHTS_FOR_SAMPLER, sampler),
            await journal.submit(
                world.store, model, 4, RequestKind.SAVE_WEIGHTS, SaveWeightsBody("a").to_bytes()
            ),
            await journal.submit_pass(world.store, model, 5),
        ]
        for each in answered:
            assert (await world.done(each)).status is FutureStatus.DONE
        waits = await journal.submit_step(world.store, model, 7)
        await world.taken_in()
        await world.store.write(
            lambda conn, session=session: session_records.finish(conn, session, "completed", None)
        )
        world.driver.requests.release(await journal.key_of(world.store, model))
        assert (await world.done(waits)).status is FutureStatus.FAILED
        row = await journal.model_of(world.store, model)
        assert row.state is ModelState.RELEASED


def sizes(*roots: object) -> Counter[str]:
    """Return how much is in the containers of all of our objects below `roots`, by class and field."""
    gc.collect()
    found: Counter[str] = Counter()
    seen, left = set[int](), deque[tuple[str, object]](("", root) for root in roots)
    while left:
        name, value = left.popleft()
        if id(value) in seen or name in BOUNDED or (isinstance(value, deque) and value.maxlen is not None):
            continue
        seen.add(id(value))
        if isinstance(value, dict | set | list | tuple | deque) and isinstance(value, Sized):
            found[name] += len(value)
            parts = [*value, *value.values()] if isinstance(value, dict) else [*value]
            left.extend((name, part) for part in parts)
        elif type(value).__module__.startswith("skyrl_tinker."):
            left.extend((f"{type(value).__name__}.{field}", part) for field, part in fields(value))
    return found


def fields(value: Any) -> Iterator[tuple[str, object]]:
    slots: Iterable[str] = (name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()))
    yield from vars(value).items() if hasattr(value, "__dict__") else ()
    yield from ((name, getattr(value, name)) for name in slots if hasattr(value, name))
