"""Training runs: listed, looked into, and what others see of them."""

from datetime import datetime

import pytest

from skyrl_tinker.domain.ids import CheckpointKind
from tests.api.support.users import get, new_user, speak_as
from tests.api.support.world import World, step

WEIGHTS, SAMPLER = CheckpointKind.WEIGHTS, CheckpointKind.SAMPLER_WEIGHTS


def ids(page: dict[str, list[dict[str, str]]]) -> list[str]:
    return [run["training_run_id"] for run in page["training_runs"]]


async def test_the_run_that_was_asked_something_last_comes_first(world: World) -> None:
    session = await world.session()
    runs = [await world.model(session, number) for number in range(3)]
    await world.ok("optim_step", step(runs[1], 1))
    page = await get(world, "training_runs")
    assert ids(page) == [runs[1], runs[2], runs[0]]
    assert page["cursor"] == {"offset": 0, "limit": 20, "total_count": 3}


async def test_pages_are_all_runs_once(world: World) -> None:
    session = await world.session()
    runs = [await world.model(session, number) for number in range(7)]
    pages = [await get(world, "training_runs", limit=3, offset=offset) for offset in (0, 3, 6, 9)]
    assert [len(page["training_runs"]) for page in pages] == [3, 3, 1, 0]
    assert [run for page in pages for run in ids(page)] == runs[::-1]
    assert {page["cursor"]["total_count"] for page in pages} == {7}


async def test_a_list_shows_the_last_checkpoints_of_each_run(world: World) -> None:
    session = await world.session()
    runs = [await world.model(session, number) for number in range(3)]
    for run in runs[:2]:
        await world.checkpoint(run, WEIGHTS, "old")
        await world.checkpoint(run, WEIGHTS, "new")
    await world.checkpoint(runs[0], SAMPLER, "s")
    await world.http.delete(f"training_runs/{runs[1]}/checkpoints/weights/new")
    found = {run["training_run_id"]: run for run in (await get(world, "training_runs"))["training_runs"]}
    names = [
        [(found[run][last] or {}).get("checkpoint_id") for run in runs]
        for last in ("last_checkpoint", "last_sampler_checkpoint")
    ]
    assert names == [["weights/new", "weights/old", None], ["sampler_weights/s", None, None]]
    assert found[runs[0]] == await get(world, f"training_runs/{runs[0]}")


async def test_a_run_that_was_never_made_is_shown_as_corrupted(world: World) -> None:
    run = await world.model(base_model="no/such")
    assert (await get(world, f"training_runs/{run}"))["corrupted"] is True


async def test_runs_of_one_project(world: World) -> None:
    elsewhere, here = await world.model(), await world.model()
    session = here.partition(":")[0]
    put = await world.http.put(f"sessions/{session}/project", json={"project_id": "mine"})
    assert put.status_code == 200
    assert ids(await get(world, "training_runs", project_id="mine")) == [here]
    assert ids(await get(world, "training_runs", project_id="default")) == [elsewhere]
    assert (await get(world, "training_runs", project_id="none"))["cursor"]["total_count"] == 0


async def test_a_wrong_parameter_is_named(world: World) -> None:
    for query in ("limit=0", "limit=1001", "limit=x", "offset=-1", f"offset={2**63}", "access_scope=all"):
        answer = await world.http.get(f"training_runs?{query}")
        assert answer.status_code == 400, query
        assert query.partition("=")[0] in answer.json()["detail"]
        assert int(answer.headers["content-length"]) > 0


async def test_others_see_a_run_by_what_it_has_published_alone(world: World) -> None:
    alice, bob = await new_user(world, "alice"), await new_user(world, "bob")
    speak_as(world, alice)
    private, run = await world.model(), await world.model(user_metadata={"renderer": "qwen3"})
    await world.checkpoint(run, WEIGHTS, "shown")
    await world.checkpoint(run, WEIGHTS, "hidden")
    await world.http.post(f"training_runs/{run}/checkpoints/weights/shown/publish")
    speak_as(world, bob)
    for scope in ("owned", "accessible"):
        assert (await world.http.get(f"training_runs/{private}?access_scope={scope}")).status_code == 404
    assert (await world.http.get(f"training_runs/{run}")).status_code == 404
    assert ids(await get(world, "training_runs")) == []
    assert ids(await get(world, "training_runs", access_scope="accessible")) == [run]
    seen = await get(world, f"training_runs/{run}", access_scope="accessible")
    assert (seen["model_owner"], seen["user_metadata"]) == ("alice", {"renderer": "qwen3"})
    assert seen["last_checkpoint"]["checkpoint_id"] == "weights/shown"
    assert seen["last_checkpoint"]["public"] is True
    assert datetime.fromisoformat(seen["last_request_time"]).tzinfo


LISTS = ["training_runs", "checkpoints", "sessions", "audit", "billing/usage/checkpoints/current"]


@pytest.mark.parametrize("path", LISTS)
@pytest.mark.parametrize("nothing", ["", "false"])
async def test_an_unknown_option_that_asks_for_nothing_is_taken(
    world: World, path: str, nothing: str
) -> None:
    answer = await world.http.get(path, params={"include_archived": nothing})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", LISTS)
async def test_an_unknown_filter_is_refused_by_name(world: World, path: str) -> None:
    """Ignored, it would list what was filtered out."""
    answer = await world.http.get(path, params={"model_name": "a"})
    assert answer.status_code == 400, answer.text
    assert "model_name" in answer.json()["detail"]
