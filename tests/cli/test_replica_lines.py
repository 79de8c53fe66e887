"""Replicas and base models as `status`, `ps` and `bases` show them."""

import re
from typing import Any

from skyrl_tinker.cli.server_tables import base_lines, process_lines, status_lines


def replica(host: str | None, weights_by: str | None, adapters_by: str | None) -> dict[str, Any]:
    ways = {"weights_by": weights_by, "adapters_by": adapters_by}
    return {
        "base_model": "org/tiny",
        **ways,
        "host": host,
        "address": host and f"http://{host}:8100",
        "state": "serving" if host else "replaced",
        "weights": [],
    }


def served(base_model: str, context_length: int, sampler: str, **others: Any) -> dict[str, Any]:
    given = {"base_model": base_model, "context_length": context_length, "sampler": sampler}
    return {"trainable": True, "sampleable": True, "state": "ready", "detail": "", **given, **others}


NOW: dict[str, Any] = {
    "state": "ready",
    "detail": "",
    "server": {
        "device": "cpu",
        "base_models": [
            served("org/tiny", 64, "Plain"),
            served(
                "org/teacher",
                32,
                "Other",
                trainable=False,
                state="stopped",
                detail="it starts when asked for",
            ),
            served("org/other", 16, "Plain", sampleable=False),
        ],
    },
    "problems": [],
    "queue": [],
    **dict.fromkeys(("trainers", "samplers", "rates", "processes", "memory")),
    "replicas": [
        replica("10.0.0.1", "shared memory", "shared memory"),
        replica("10.0.0.2", "gloo", "pull"),
        replica("10.0.0.3", "gloo", "pull"),
        replica(None, None, None),
    ],
}


def test_status_counts_the_replicas_of_each_way() -> None:
    assert list(status_lines(NOW))[-1] == "weights   by shared memory to 1 replica, by gloo to 2 replicas"
    assert not any(line.startswith("weights") for line in status_lines(NOW | {"replicas": []}))


def test_status_names_the_sampling_engine_and_what_it_lacks() -> None:
    student = {"base_model": "org/tiny", "in_flight": 3, "waiting": 2}
    teacher = {"base_model": "org/teacher", "in_flight": 1, "waiting": 0}
    assert "samplers  Plain: 3 in flight, 2 waiting" in status_lines(NOW | {"samplers": [student]})
    lines = list(status_lines(NOW | {"samplers": [student, teacher]}))
    assert "samplers  Plain of org/tiny: 3 in flight, 2 waiting" in lines
    assert "samplers  Other of org/teacher: 1 in flight, 0 waiting" in lines


def test_status_has_a_line_for_each_base_model() -> None:
    first, second, third, *_ = status_lines(NOW)
    assert first == "ready     org/tiny on cpu, 64 tokens"
    assert second == "stopped   org/teacher on cpu, 32 tokens, sampling only: it starts when asked for"
    assert third == "ready     org/other on cpu, 16 tokens, training only"


def test_status_has_a_line_for_each_trainer() -> None:
    idle = {"running": None, "following": None}
    trainers = [{"base_model": "org/tiny", **idle}, {"base_model": "org/teacher", **idle}]
    lines = list(status_lines(NOW | {"trainers": trainers}))
    assert "trainer   of org/tiny: waits for work" in lines
    assert "trainer   of org/teacher: waits for work" in lines
    assert "trainer   waits for work" in status_lines(NOW | {"trainers": trainers[:1]})


def test_ps_shows_the_last_weights_of_a_replica_and_how_many_more_it_has() -> None:
    for names, told in ((["a", "b", "c"], "a b c"), (["a", "b", "c", "d", "e"], "c d e and 2 more")):
        shown = replica("10.0.0.1", "gloo", "pull") | {"weights": names}
        *_, line = process_lines(NOW | {"replicas": [shown]})
        assert re.split(r"  +", line)[4] == told


def test_ps_shows_host_and_ways_of_each_replica() -> None:
    _, heads, near, far, _, replaced = process_lines(NOW)
    assert heads.endswith("weights by     adapters by")
    assert near.split()[:5] == ["org/tiny", "http://10.0.0.1:8100", "10.0.0.1", "serving", "base"]
    assert near.endswith("shared memory  shared memory")
    assert far.split() == ["org/tiny", "http://10.0.0.2:8100", "10.0.0.2", "serving", "base", "gloo", "pull"]
    assert replaced.split() == ["org/tiny", "replaced", "base"]


def test_base_models_are_listed_with_their_uses_states_and_idle_times() -> None:
    given = NOW["server"]["base_models"]
    more = {"trainer_ranks": 1, "replicas": 2, "start": "always", "since": None, "idle_s": None}
    more |= {"rss_bytes": None, "gpu_bytes": None}
    on_demand = {**more, "trainer_ranks": 0, "start": "on_demand", "idle_s": 65}
    on_demand["since"] = "2020-01-01T00:00:00Z"
    first, second, third = list(base_lines([given[0] | more, given[1] | on_demand, given[2] | more]))[-3:]
    assert first.split() == ["org/tiny", "train,sample", "always", "ready", "1", "2"]
    assert second.split()[:4] == ["org/teacher", "sample", "on_demand", "stopped"]
    assert second.split()[-8:] == ["s", "0", "2", "it", "starts", "when", "asked", "for"]
    assert third.split() == ["org/other", "train", "always", "ready", "1", "0"]


def test_base_models_are_listed_with_the_memory_of_ranks_and_samplers() -> None:
    more = {"trainer_ranks": 1, "replicas": 2, "start": "always", "since": None, "idle_s": None}
    given = {**NOW["server"]["base_models"][0], **more, "rss_bytes": 3 << 20, "gpu_bytes": None}
    *_, heads, row = base_lines([given])
    assert (heads.split()[-2:], row.split()[-2:]) == (["memory", "detail"], ["3", "MiB"])
    *_, heads, row = base_lines([given | {"gpu_bytes": 5 << 20}])
    assert heads.split()[-4:] == ["memory", "GPU", "memory", "detail"]
    assert row.split()[-4:] == ["3", "MiB", "5", "MiB"]
