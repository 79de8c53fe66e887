"""What the dashboard is told, and whom of."""

import csv
import math
import os
import re
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from sqlalchemy import Connection, update

from skyrl_tinker.api.middleware import disk_room
from skyrl_tinker.api.resources import step_curve
from skyrl_tinker.api.waiting import engine_queues, kept_value
from skyrl_tinker.cli.server_tables import process_lines, run_lines, status_lines
from skyrl_tinker.config import Settings
from skyrl_tinker.directories import Directories
from skyrl_tinker.domain.ids import ModelId, ModelState
from skyrl_tinker.engine.scheduling import throughput
from skyrl_tinker.protocol.queue_views import Incident
from skyrl_tinker.protocol.schemas.console import StepMeasures
from skyrl_tinker.store import model_records, server_state
from skyrl_tinker.store.console import step_points
from skyrl_tinker.store.console.step_points import LossFunction
from skyrl_tinker.store.database.tables import Future
from skyrl_tinker.system.processes import identities, write_pid_file
from tests.api.support.databases import ON_BOTH
from tests.api.support.passes import datum, post_pass, protobuf
from tests.api.support.users import get, new_user, speak_as
from tests.api.support.waiting import Waiting, ready_model, submit, waiting
from tests.api.support.world import BASE, Json, World, running, sample, step
from tests.engine.support import journal
from tests.support.skew import skew
from tests.support.waiting import until


@pytest.fixture
async def busy(settings: Settings) -> AsyncIterator[Waiting]:
    async with waiting(settings) as made:
        yield made


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep no answer for a second."""
    monkeypatch.setattr(engine_queues, "EVERY_S", 0.01)
    monkeypatch.setattr(kept_value, "KEPT_S", -1.0)


async def now(world: World) -> Json:
    return await get(world, "console/now")


async def test_an_idle_server_says_what_it_serves_and_has_no_problems(busy: Waiting) -> None:
    told = await now(busy.api)
    (served,) = told["server"]["base_models"]
    assert (served["base_model"], served["context_length"]) == ("org/tiny", 64)
    assert told["caller"] == {"name": "local", "admin": False, "keys": False, "sees_all": True}
    assert (told["state"], told["ready"], told["problems"]) == ("ready", True, [])
    assert told["queue"] == []
    assert told["trainers"][0]["running"] is None
    assert told["replicas"] == [
        {
            "base_model": "org/tiny",
            "address": "http://10.0.0.2:8100",
            "host": "10.0.0.2",
            "state": "serving",
            "weights_by": "gloo",
            "adapters_by": "pull",
            "in_flight": 0,
            "weights": [],
        }
    ]


async def test_a_waiting_request_has_the_words_of_its_long_poll(busy: Waiting) -> None:
    model = await ready_model(busy.api)
    request = await submit(busy.api, "optim_step", step(model, 2))
    reason = "waiting for seq 1 of this model (2 has arrived)"

    async def look() -> bool:
        return [entry["reason"] for entry in (await now(busy.api))["queue"]] == [reason]

    await until(look)
    polled = await busy.api.retrieve(request)
    assert polled.json()["queue_state_reason"] == reason
    (entry,) = (await now(busy.api))["queue"]
    assert entry["session_id"] == model.partition(":")[0]
    assert (entry["owner"], entry["kind"], entry["waiting"]) == ("local", "training", 1)
    assert 0 <= entry["oldest_age_s"] < 30


async def test_what_waits_long_is_a_problem_with_its_reason(world: World) -> None:
    await world.set_engine("restarting", "replaying 3 of 9 units")
    await world.ok("asample", sample(await world.sampler(), 0))
    told = await now(world)
    assert told["problems"][0]["text"] == "the engine is restarting: replaying 3 of 9 units"
    assert told["queue"][0]["reason"] == "the engine is restarting: replaying 3 of 9 units"
    await _age(world, 600)
    waits = (await now(world))["problems"][-1]
    assert waits["level"] == "warning"
    assert waits["text"].startswith("1 sampling request of local, the oldest for 10 min: the engine is")
    named = await world.ok("create_session", {"sdk_version": "0.38.0", "display_name": "letters"})
    session = named["session_id"]
    await world.ok("asample", sample(await world.sampler(session), 0))
    await _age(world, 600)
    subjects = {problem["subject"] for problem in (await now(world))["problems"]}
    assert subjects == {"engine", waits["subject"], f"letters ({session})"}
    assert "letters" not in waits["subject"]


async def _age(world: World, seconds: float) -> None:
    older = update(Future).values(created_at=time.time() - seconds)
    await world.store.write(lambda conn: conn.execute(older))


async def test_the_trainer_says_what_it_runs_and_what_follows(busy: Waiting) -> None:
    named = await busy.api.ok("create_session", {"sdk_version": "0.38.0", "display_name": "letters"})
    first, second = await ready_model(busy.api), await ready_model(busy.api, named["session_id"])
    busy.trainer.go_on.clear()
    for model in (first, second):
        await submit(busy.api, "optim_step", step(model, 1))

    async def look() -> bool:
        (trainer,) = (await now(busy.api))["trainers"]
        return trainer["running"] is not None and trainer["following"] is not None

    await until(look)
    (trainer,) = (await now(busy.api))["trainers"]
    assert trainer["running"]["kind"] == trainer["following"]["kind"] == "optim_step"
    assert trainer["running"]["model_ids"] == [first]
    assert trainer["following"]["model_ids"] == [second]
    assert (trainer["running"]["names"], trainer["following"]["names"]) == ([None], ["letters"])
    told = await now(busy.api)
    assert {entry["name"]: entry["session_id"] for entry in told["queue"]}["letters"] == named["session_id"]
    lines = [line for line in status_lines(told) if line.startswith(("trainer", "next"))]
    assert re.fullmatch(rf"trainer   optim_step of 1 model \({first}\) for \d+\.\d s", lines[0])
    assert lines[1] == "next      optim_step of 1 model (letters)"
    assert trainer["running"]["running_s"] >= 0
    busy.trainer.go_on.set()


async def test_tokens_per_second_are_those_of_the_last_samples(busy: Waiting) -> None:
    busy.samplers.go_on.set()
    request = await submit(busy.api, "asample", sample(await busy.api.sampler(), 0))
    assert (await busy.api.result(request, Accept="application/x-protobuf")).status_code == 200
    rates = (await now(busy.api))["rates"]
    assert rates["sampled"]["over_10_s"] == pytest.approx(3 / 10)
    assert rates["sampled"]["over_60_s"] == pytest.approx(3 / 60)
    assert rates["trained"]["over_60_s"] == 0


async def test_the_last_hour_of_rates_is_there_when_a_page_opens(
    busy: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy.samplers.go_on.set()
    request = await submit(busy.api, "asample", sample(await busy.api.sampler(), 0))
    assert (await busy.api.result(request, Accept="application/x-protobuf")).status_code == 200
    now, slot = time.monotonic(), throughput.SLOT_S
    monkeypatch.setattr(throughput, "time", SimpleNamespace(monotonic=lambda: now + 4000 + slot))
    later = await get(busy.api, "console/rates")
    assert (later["every_s"], len(later["sampled"]), sum(later["sampled"])) == (slot, throughput.SLOTS, 0)
    monkeypatch.setattr(throughput, "time", SimpleNamespace(monotonic=lambda: now + 2 * slot))
    soon = await get(busy.api, "console/rates")
    assert sum(soon["sampled"]) * slot == 3
    assert len(soon["trained"]) == len(soon["sampled"]) <= 3


async def test_keys_see_their_own_queue_and_only_admins_the_processes(world: World) -> None:
    keys = {name: await new_user(world, name) for name in ("alice", "bob")}
    root = await new_user(world, "root", admin=True)
    sessions = {}
    for name, key in keys.items():
        speak_as(world, key)
        await world.ok("asample", sample(await world.sampler(), 0))
        sessions[name] = (await now(world))["queue"][0]["session_id"]
    for name, key in keys.items():
        speak_as(world, key)
        told = await now(world)
        assert [entry["owner"] for entry in told["queue"]] == [name]
        assert (told["processes"], told["memory"]) == (None, None)
        assert told["caller"] == {"name": name, "admin": False, "keys": True, "sees_all": False}
    speak_as(world, root)
    told = await now(world)
    assert {entry["session_id"] for entry in told["queue"]} == set(sessions.values())
    assert told["processes"] is not None
    assert 0 < told["memory"]["available_bytes"] <= told["memory"]["total_bytes"]


async def test_a_lost_process_and_a_standing_warning_are_told_to_who_sees_all(busy: Waiting) -> None:
    await busy.store.write(lambda conn: server_state.put(conn, server_state.WARNING, "they differ by 1e-1"))
    busy.driver._incidents.append(Incident(time.time() - 125, "the trainer was lost: rank 0 died"))
    busy.driver._incidents.append(Incident(time.time() - 7200, "the trainer: long ago"))
    texts = [problem["text"] for problem in (await now(busy.api))["problems"]]
    assert texts == ["they differ by 1e-1", "2 min ago the trainer was lost: rank 0 died"]
    key = await new_user(busy.api, "alice")
    speak_as(busy.api, key)
    told = await now(busy.api)
    assert told["problems"] == []
    (replica,) = told["replicas"]
    assert (replica["address"], replica["host"], replica["state"]) == (None, None, "serving")


@ON_BOTH
async def test_parked_models_are_counted_and_named_with_the_reason(world: World) -> None:
    async def park(name: str | None, cause: str) -> str:
        session = await world.ok("create_session", {"sdk_version": "0.38.0", "display_name": name})
        model = await world.model(session["session_id"])
        row = await journal.model_of(world.store, ModelId(model))
        reason = f"model {model} is parked: {cause}; its last checkpoint is tinker://{model}/weights/7"
        state = partial(model_records.set_state, key=row.key, state=ModelState.PARKED, reason=reason)
        await world.store.write(state)
        return model

    async def told() -> list[str]:
        lines = status_lines(await now(world))
        return [line.removeprefix("warning   models: ") for line in lines if line.startswith("warning   mod")]

    assert await told() == []
    for name in ("a", "b", "c", "d"):
        await park(name, f"its base, of {name}, is away; it is kept")
    why = "the first of them because its base, of d, is away; it is kept"
    assert await told() == [f"4 models of {BASE} are parked (d, c, b and 1 more), {why}"]
    root = await new_user(world, "root", admin=True)
    speak_as(world, await new_user(world, "alice"))
    assert await told() == []
    model = await park(None, "it is damaged")
    assert await told() == [f"1 model of {BASE} is parked ({model}) because it is damaged"]
    speak_as(world, root)
    (all_,) = await told()
    assert all_.startswith(f"5 models of {BASE} are parked ({model}, d, c and 2 more), the first of them bec")


@pytest.mark.parametrize("short", [False, True])
async def test_where_files_lie_is_told_to_who_sees_all(world: World, short: bool) -> None:
    place, why = str(world.settings.root), "GB are free at" if short else "Input/output error"
    if short:
        world.patch.setattr(world.services.room, "least_bytes", math.inf)
    else:
        await world.set_engine("failed", f"{place}/database: {why}")

    async def told() -> list[str]:
        asked = [await world.http.get(url) for url in ("console/now", "http://api/readyz")]
        assert all(why in each.text for each in asked)
        return [place in each.text for each in asked]

    assert await told() == [True, True], "there are no keys"
    root = await new_user(world, "root", admin=True)
    speak_as(world, await new_user(world, "alice"))
    assert await told() == [False, False]
    speak_as(world, root)
    assert await told() == [True, False], "the second wants no key"


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
async def test_an_incident_is_as_old_as_the_database_says(
    ahead_s: float, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose clock is that of all times which are told beside it."""
    skew(monkeypatch, ahead_s)
    async with waiting(settings) as busy:
        busy.trainer.broken = "rank 0 died"
        busy.driver.wake()
        await until(lambda: busy.trainer.restarts)
        problems = (await now(busy.api))["problems"]
        (text,) = [each["text"] for each in problems if each["subject"] == "processes"]
        assert re.fullmatch(r"\d+ s ago the trainer was lost: rank 0 died", text)


async def test_processes_are_those_that_serve_has_written_down(world: World) -> None:
    own, before = psutil.Process(), time.time()
    directories = Directories(world.settings)
    directories.run_dir.mkdir(parents=True, exist_ok=True)
    write_pid_file(directories.pid_file, identities([own]))
    told = await now(world)
    (row,) = told["processes"]
    assert row["pid"] == os.getpid()
    assert row["rss_bytes"] > 1e6
    assert before <= own.create_time() + row["age_s"] <= time.time()
    assert (row["gpu_bytes"], told["memory"]["gpus"]) == (None, [])
    assert "GPU" not in "".join(process_lines(told))


async def test_on_gpus_their_memory_stands_beside_that_of_processes_and_host(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f"#!/bin/sh\ncase $1 in *gpu=*) echo 700, 81559 ;; *) echo {os.getpid()}, 600 ;; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    async with running(settings.model_copy(update={"device": "cuda"})) as world:
        directories = Directories(world.settings)
        directories.run_dir.mkdir(parents=True, exist_ok=True)
        write_pid_file(directories.pid_file, identities([psutil.Process()]))
        told = await now(world)
    assert [row["gpu_bytes"] for row in told["processes"]] == [600 * 2**20]
    assert told["memory"]["gpus"] == [{"used_bytes": 700 * 2**20, "total_bytes": 81559 * 2**20}]
    _, heads, row, *_, gpu = (line for line in process_lines(told | {"replicas": []}))
    assert "GPU memory" in heads
    assert "600 MiB" in row
    assert gpu == "0.7 of 85.5 GB of GPU 0 are in use"


async def test_many_who_look_cost_one_look(busy: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_value, "KEPT_S", 60.0)
    await now(busy.api)
    looks = busy.looks
    for _ in range(20):
        await get(busy.api, "console/now")
    assert busy.looks == looks


async def test_without_an_engine_the_rest_is_told(world: World) -> None:
    told = await now(world)
    assert told["trainers"] is None
    assert told["rates"] is None
    assert [problem["text"] for problem in told["problems"]] == ["the engine does not answer"]


# Runs


async def stepped(world: World, model: str, count: int) -> None:
    row = await journal.model_of(world.store, ModelId(model))

    def add(conn: Connection) -> None:
        for number in range(count):
            step_points.add(conn, row.key, number + 1, 1000.0 + number, measured(loss=float(number)))

    await world.store.write(add)


def measured(**changes: float | None) -> StepMeasures:
    values = dict.fromkeys(step_points.NAMES, 0.5) | {"tokens": 7, "datums": 2, "sampler_gap": None}
    return StepMeasures(**values | changes)


@ON_BOTH
async def test_runs_are_listed_with_their_last_step(world: World) -> None:
    first, second = await world.model(), await world.model()
    await stepped(world, first, 3)
    runs = {run["run_id"]: run for run in (await get(world, "console/runs"))["runs"]}
    assert (runs[first]["steps"], runs[first]["last"]["loss"]) == (3, 2.0)
    assert (runs[second]["steps"], runs[second]["last"]) == (0, None)
    assert (await get(world, "console/runs", limit=1))["total"] == 2


@ON_BOTH
async def test_runs_are_sorted_by_their_last_request_also_those_that_are_searched(world: World) -> None:
    runs = []
    for name in ("beta", "alpha", "beta"):
        session = {"sdk_version": "0.38.0", "display_name": name}
        runs.append(await world.model((await world.ok("create_session", session))["session_id"]))
    await world.ok("optim_step", step(runs[0], 1))

    async def page(**wanted: object) -> list[str]:
        return [run["run_id"] for run in (await get(world, "console/runs", **wanted))["runs"]]

    assert await page() == [runs[0], runs[2], runs[1]]
    assert await page(limit=1, offset=1) == [runs[2]]
    assert await page(search="beta creating") == [runs[0], runs[2]]
    assert await page(search="beta creating", limit=1, offset=1) == [runs[2]]


@ON_BOTH
async def test_all_runs_are_sorted_not_only_those_of_a_page(world: World) -> None:
    runs = []
    for name, reward, project in (("b", 0.5, "Y"), ("C", None, "x"), ("a", 0.25, None)):
        session = {"sdk_version": "0.38.0", "display_name": name, "project_id": project}
        runs.append(await world.model((await world.ok("create_session", session))["session_id"]))
        if reward is not None:
            await report(world, runs[-1], 1, reward=reward)
    await stepped(world, runs[1], 2)
    b, c, a = runs

    async def pages(sort: str, order: str) -> list[str]:
        found = [
            await get(world, "console/runs", sort=sort, order=order, limit=1, offset=at) for at in range(3)
        ]
        return [page["runs"][0]["run_id"] for page in found]

    for sort, ascending in (
        ("name", [a, b, c]),
        ("project", [c, b, a]),
        ("reward", [a, b, c]),
        ("steps", [a, b, c]),
        ("loss", [c, a, b]),
        ("last_request", [b, c, a]),
    ):
        assert await pages(sort, "ascending") == ascending, sort
    assert await pages("name", "descending") == [c, b, a]
    assert await pages("reward", "descending") == [b, a, c], "without a value last"
    for sort in ("base_model", "owner", "rank", "state"):
        assert set(await pages(sort, "descending")) == {a, b, c}
    for wrong in ({"sort": "colour"}, {"order": "up"}):
        answer = await world.http.get("console/runs", params=wrong)
        assert (answer.status_code, next(iter(wrong)) in answer.text) == (400, True)


@ON_BOTH
async def test_a_run_tells_which_ones_go_on_from_it(world: World) -> None:
    speak_as(world, await new_user(world, "alice"))
    first = await world.model()
    heirs = [await heir(world, first, f"resumed {number}", number) for number in range(7)]
    newest = [{"run_id": heirs[step], "name": f"resumed {step}", "step": step} for step in (6, 5, 4, 3, 2)]
    assert (await get(world, f"console/runs/{first}"))["continued_by"] == newest
    listed = {run["run_id"]: run["continued_by"] for run in (await get(world, "console/runs"))["runs"]}
    assert listed == {first: newest, **{run: [] for run in heirs}}
    speak_as(world, await new_user(world, "bob"))
    await heir(world, first, "of a published checkpoint", 9)
    root = await new_user(world, "root", admin=True)
    speak_as(world, root)
    told = (await get(world, f"console/runs/{first}"))["continued_by"]
    assert [each["step"] for each in told] == [9, 6, 5, 4, 3]


async def heir(world: World, parent: str, name: str, steps: int) -> str:
    session = await world.ok("create_session", {"sdk_version": "0.38.0", "display_name": name})
    run = await world.model(session["session_id"])

    def note(conn: Connection) -> None:
        model_records.note_parent(conn, model_records.by_id(conn, ModelId(run)).key, ModelId(parent), steps)

    await world.store.write(note)
    return run


@ON_BOTH
async def test_of_long_metadata_the_list_of_runs_has_the_beginning(world: World) -> None:
    metadata = {f"{'n' * 500} {number}": "v" * 5000 for number in range(40)}
    model = await world.model(user_metadata=metadata)
    (run,) = (await get(world, "console/runs"))["runs"]
    assert len(str(run)) < 5000
    assert set(run["user_metadata"].values()) == {"v" * 200}
    assert (await get(world, f"console/runs/{model}"))["user_metadata"] == metadata


@ON_BOTH
async def test_runs_are_searched_by_words_of_their_names_and_metadata(world: World) -> None:
    """Of the metadata of a run, and of its session, as ServiceClient is given it."""
    found: dict[str, str] = {}
    for name, project in (("arithmetic, 50 %", "maths"), ("Arithmetic, rank 8", None), ("sft né", "maths")):
        session: Json = {"sdk_version": "0.38.0", "display_name": name, "project_id": project}
        session["user_metadata"] = {"recipe_name": "recipe_ü" if project else "other"}
        metadata = {"renderer_name": "qwen3" if project else "né"}
        session_id = (await world.ok("create_session", session))["session_id"]
        found[await world.model(session_id, user_metadata=metadata)] = name

    async def names(search: str) -> set[str]:
        answer = await get(world, "console/runs", search=search, limit=2)
        assert answer["total"] == len(answer["runs"])
        return {found[run["run_id"]] for run in answer["runs"]}

    arithmetic = {"arithmetic, 50 %", "Arithmetic, rank 8"}
    assert await names("ARITHMETIC") == arithmetic
    assert await names("arithmetic rank") == {"Arithmetic, rank 8"}
    assert await names("50 %") == await names("maths arithmetic") == {"arithmetic, 50 %"}
    assert await names("renderer_name=né") == {"Arithmetic, rank 8"}
    assert await names("né maths") == {"sft né"}
    assert await names("recipe_name=recipe_ü") == {"arithmetic, 50 %", "sft né"}
    assert await names("RECIPE_ü sft") == {"sft né"}
    assert await names("renderer_name=other") == set(), "which is of the session"
    assert await names("creating local qwen3 tiny maths sft") == {"sft né"}
    assert await names("nothing") == set()
    answer = await world.http.get("console/runs", params={"search": "x" * 201})
    assert (answer.status_code, "search" in answer.text) == (400, True)


async def test_a_run_that_failed_says_why_and_has_no_rank(world: World) -> None:
    session = await world.session()
    creation = {"session_id": session, "model_seq_id": 1, "base_model": BASE, "lora_config": {"rank": 10**6}}
    accepted = await world.ok("create_model", creation)
    run = await get(world, f"console/runs/{accepted['model_id']}")
    assert (run["state"], run["lora_rank"], run["session_id"]) == ("failed", None, session)
    assert "lora_config.rank" in run["state_reason"]
    answer = await world.http.get("console/runs/none")
    assert (answer.status_code, answer.json()["detail"]) == (404, "not found: no training run none")


@ON_BOTH
async def test_a_run_has_the_name_of_its_session_and_the_last_loss_and_function_that_are_known(
    world: World,
) -> None:
    named = {"sdk_version": "0.38.0", "display_name": "arithmetic, rank 32", "project_id": "maths"}
    model = await world.model((await world.ok("create_session", named))["session_id"])
    row = await journal.model_of(world.store, ModelId(model))

    def add(conn: Connection) -> None:
        for number, loss in enumerate((3.0, 2.0, None)):
            last = None if loss is None else LossFunction("dro", {"beta": loss})
            measures = measured(loss=loss, learning_rate=1 / 3)
            step_points.add(conn, row.key, number + 1, 1000.0 + number, measures, last)

    await world.store.write(add)
    (run,) = (await get(world, "console/runs"))["runs"]
    assert (run["name"], run["project_id"]) == ("arithmetic, rank 32", "maths")
    assert (run["steps"], run["loss"], run["last"]["loss"]) == (3, 2.0, None)
    assert (run["loss_fn"], run["loss_fn_config"]) == ("dro", {"beta": 2.0})
    (line,) = [line for line in run_lines({"runs": [run], "total": 1}) if model in line]
    assert "base=org/tiny rank=8 lr=0.3333 datums=2 loss=dro(beta=2)" in line
    assert run["last_heartbeat_at"] <= run["created_at"]


async def report(world: World, run: str, step: object, **values: object) -> tuple[int, str]:
    answer = await world.http.post(f"console/runs/{run}/metrics", json={"step": step, "values": values})
    return answer.status_code, answer.text


@ON_BOTH
async def test_a_script_reports_numbers_that_only_it_knows(world: World) -> None:
    model = await world.model()
    for number, reward in ((1, 0.25), (2, 0.5)):
        assert (await report(world, model, number, reward=reward, length=7))[0] == 200
    assert (await report(world, model, 2, **{"test/accuracy": 0.125}))[0] == 200
    first = await get(world, f"console/runs/{model}/metrics", limit=2)
    assert [(each["step"], each["values"]) for each in first["reports"]] == [
        (1, {"reward": 0.25, "length": 7.0}),
        (2, {"reward": 0.5, "length": 7.0}),
    ]
    assert first["more"]
    rest = await get(world, f"console/runs/{model}/metrics", after=first["next"])
    assert [each["values"] for each in rest["reports"]] == [{"test/accuracy": 0.125}]
    assert not rest["more"]
    rewards = await get(world, f"console/runs/{model}/metrics", limit=2, reward_only=True)
    assert [(each["reward"], each["values"]) for each in rewards["reports"]] == [(0.25, {}), (0.5, {})]
    after = await get(world, f"console/runs/{model}/metrics", after=rewards["next"], reward_only=True)
    assert (after["reports"], after["more"]) == ([], False), "one without a reward"
    (run,) = (await get(world, "console/runs"))["runs"]
    assert (run["reward"], run["reward_report"]) == (0.5, rewards["next"])
    assert (await report(world, model, 3, reward=0.5))[0] == 200
    (later,) = (await get(world, "console/runs"))["runs"]
    assert later["reward_report"] > run["reward_report"]
    assert later | {"reward_report": run["reward_report"]} == run, "nothing else tells of it"


@pytest.mark.parametrize(
    ("values", "reward"),
    [
        ({"env/all/reward/format": 1.0, "env/all/reward/total": 0.5}, 0.5),
        ({"env/all/reward/total": 0.5, "reward": 0.75}, 0.75),
        ({"eval/reward/mean": 0.25, "loss": 1.0}, 0.25),
        ({"rewarded": 1.0}, None),
    ],
)
async def test_the_reward_of_a_report_is_known_by_its_name(
    world: World, values: dict[str, float], reward: float | None
) -> None:
    model = await world.model()
    assert (await report(world, model, 0, **values))[0] == 200
    assert (await get(world, f"console/runs/{model}"))["reward"] == reward


@pytest.mark.parametrize(
    ("step", "values", "named"),
    [
        (-1, {"reward": 1.0}, "step"),
        (1.5, {"reward": 1.0}, "step"),
        (2**63, {"reward": 1.0}, "step"),
        (1, {}, "values"),
        (1, {"reward": "high"}, "values.reward"),
        (1, {"reward": True}, "values.reward"),
        (1, {"reward": None}, "values.reward"),
        (1, {"reward": 10**400}, "number is infinity"),
        (2**64, {"reward": 1}, "step: Input should be less than or equal to 9223372036854775807, found 184"),
        (1, {"": 1.0}, "values"),
        (1, {"n" * 129: 1.0}, "values"),
        (1, {"a\0": 1.0}, "values"),
        (1, {str(number): 1.0 for number in range(65)}, "values"),
    ],
)
async def test_a_wrong_report_is_refused_by_name(
    world: World, step: object, values: dict[str, object], named: str
) -> None:
    model = await world.model()
    status, text = await report(world, model, step, **values)
    assert status == 400
    assert named in text
    assert (await get(world, f"console/runs/{model}/metrics"))["reports"] == []


async def test_a_report_of_no_run_or_on_a_full_disk_is_refused(world: World) -> None:
    status, text = await report(world, "none", 1, reward=1.0)
    assert status == 404
    assert "no training run none" in text
    model = await world.model()
    world.patch.setattr(disk_room, "LOOK_S", 0.0)
    world.services.room.least_bytes = float("inf")
    assert (await report(world, model, 1, reward=1.0))[0] == 503


async def test_points_come_in_pages_and_go_on_where_they_ended(world: World) -> None:
    model = await world.model()
    await stepped(world, model, 5)
    first = await get(world, f"console/runs/{model}/points", limit=3)
    assert first["columns"]["step"] == [1, 2, 3]
    assert first["columns"]["loss"] == [0.0, 1.0, 2.0]
    assert first["columns"]["sampler_gap"] == [None] * 3
    assert first["more"]
    rest = await get(world, f"console/runs/{model}/points", limit=3, after=first["next"])
    assert rest["columns"]["step"] == [4, 5]
    assert not rest["more"]
    assert (await get(world, f"console/runs/{model}/points", after=rest["next"]))["columns"]["step"] == []


async def test_a_csv_has_every_point_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_curve, "PAGE", 2)
    model = await world.model()
    await stepped(world, model, 4)
    answer = await world.http.get(f"console/runs/{model}/points.csv")
    assert answer.headers["content-type"].startswith("text/csv")
    rows = list(csv.DictReader(answer.text.splitlines()))
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    assert [float(row["loss"]) for row in rows] == [0.0, 1.0, 2.0, 3.0]
    assert {row["sampler_gap"] for row in rows} == {""}


async def test_a_step_that_the_engine_takes_is_a_point(busy: Waiting) -> None:
    model = await ready_model(busy.api)
    body = protobuf(model, 1, datum([1, 2, 3], [1.0, 0.0, 1.0]))
    assert (await post_pass(busy.api, body)).is_success
    request = await submit(busy.api, "optim_step", step(model, 2, learning_rate=0.25))
    assert (await busy.api.result(request)).status_code == 200
    columns = (await get(busy.api, f"console/runs/{model}/points"))["columns"]
    assert columns["step"] == [1]
    assert columns["learning_rate"] == [0.25]
    assert (columns["tokens"], columns["datums"]) == ([3], [1])
