"""A session's requests as a Chrome trace."""

import asyncio
from typing import Any

from skyrl_tinker.api.resources import chrome_trace
from skyrl_tinker.domain.ids import SessionId
from tests.api.support.world import World, sample, step

Event = dict[str, Any]


async def exported(world: World, session: str) -> list[Event]:
    answer = (await world.http.get(f"sessions/{session}/trace_export")).json()
    assert answer["status"] == "ready"
    served = await world.http.get(answer["url"])
    assert served.status_code == 200
    events: list[Event] = served.json()
    return events


async def test_each_model_and_sampler_is_a_track_with_a_slice_for_each_of_its_requests(world: World) -> None:
    world.patch.setattr(chrome_trace, "PAGE", 2)  # so that there are several
    session = await world.session()
    made = [await world.model(session, number) for number in range(3)]
    sampler = await world.sampler(session)
    steps = [(await world.ok("optim_step", step(made[0], seq)))["request_id"] for seq in (1, 2, 3)]
    samples = [(await world.ok("asample", sample(sampler, seq)))["request_id"] for seq in (0, 10**18)]
    await world.succeed(steps[0], "application/json", b"{}")
    await world.fail(samples[0], "no")
    await world.model()  # of somebody else
    events = await exported(world, session)
    tracks = {each["pid"]: each["args"]["name"] for each in events if each["ph"] == "M"}
    assert list(tracks.values()) == [*(f"model {model}" for model in made), f"sampler {sampler}"]
    begins = [each for each in events if each["ph"] == "b"]
    told = [(tracks[each["pid"]], each["name"], each["args"]["seq_id"]) for each in begins]
    assert told == [
        (f"model {made[0]}", "create_model", 0),
        *((f"model {made[0]}", "optim_step", seq) for seq in (1, 2, 3)),
        (f"model {made[1]}", "create_model", 0),
        (f"model {made[2]}", "create_model", 0),
        (f"sampler {sampler}", "sample", 0),
        (f"sampler {sampler}", "sample", 10**18),
    ]
    status = {each["args"]["request_id"]: each["args"]["status"] for each in begins}
    assert [status[each] for each in (*steps, *samples)] == [
        "done",
        "pending",
        "pending",
        "failed",
        "pending",
    ]


async def test_a_slice_ends_when_its_request_did_and_pending_ones_are_open(world: World) -> None:
    model = await world.model()
    (session, _, _) = model.partition(":train:")
    done = (await world.ok("optim_step", step(model, 1)))["request_id"]
    await world.ok("optim_step", step(model, 2))
    await world.succeed(done, "application/json", b"{}")
    events = await exported(world, session)
    begins = {each["id"]: each for each in events if each["ph"] == "b"}
    ends = [each for each in events if each["ph"] == "e"]
    assert [begins[each["id"]]["args"]["request_id"] for each in ends] == [done]
    (end,) = ends
    begin = begins[end["id"]]
    assert {key: end[key] for key in ("cat", "pid", "tid", "name")} == {
        key: begin[key] for key in ("cat", "pid", "tid", "name")
    }
    assert 0 <= end["ts"] - begin["ts"] < 3600e6


async def test_a_session_without_requests_is_an_empty_trace(world: World) -> None:
    assert await exported(world, await world.session()) == []


async def test_an_unknown_session_is_404_and_a_changed_url_403(world: World) -> None:
    assert (await world.http.get("sessions/nobody/trace_export")).status_code == 404
    mine, other = await world.session(), await world.session()
    url = (await world.http.get(f"sessions/{mine}/trace_export")).json()["url"]
    assert (await world.http.get(url.replace(mine, other))).status_code == 403


async def test_others_have_their_turn_between_the_pages(world: World) -> None:
    world.patch.setattr(chrome_trace, "PAGE", 1)
    session = await world.session()
    for number in range(10):
        await world.sampler(session, number)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    others = asyncio.create_task(other())
    pieces = [piece async for piece in chrome_trace.chrome_trace(world.store, SessionId(session), None)]
    others.cancel()
    assert len(pieces) == 10 + 1
    assert turns > len(pieces)
