"""Each request to vLLM has a lease of its own, which leaves nothing held however it ends."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

from skyrl_tinker.domain.ids import ModelKey, VersionId
from skyrl_tinker.domain.samples import SampleRequest, SamplingParams
from skyrl_tinker.domain.values import WeightVersion
from skyrl_tinker.engine.sampler.adapter_cache import AdapterLimits
from skyrl_tinker.engine.sampler.inflight_targets import InflightTarget
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.errors import NotFoundError, StateLostError, UserError
from skyrl_tinker.inference.client.http_connection import HttpAnswer
from skyrl_tinker.inference.client.sample_parts import PART_TOKENS
from tests.engine.sampler.test_sampler_driver import FACTS
from tests.support.sampler_clients import opened_fleet, vllm_client

REQUEST = SampleRequest((1, 2), 1, SamplingParams(max_tokens=4, stop=()))


class Replica:
    """Answers each request with the next script: an error, or a finish reason for two tokens."""

    def __init__(self, *script: Exception | str, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.script = list(script)
        self.meanwhile = meanwhile
        self.models: list[str] = []
        self.priorities: list[int] = []
        self.loads: list[str] = []
        self.salts: list[str | None] = []

    async def request(self, method: str, url: str, *, json: Any = None, **options: object) -> HttpAnswer:
        if url.endswith("load_lora_adapter"):
            self.loads.append(json["lora_name"])
            return HttpAnswer(None, {})
        self.models.append(json["model"])
        self.priorities.append(json["priority"])
        self.salts.append(json.get("cache_salt"))
        await asyncio.sleep(0)
        self.meanwhile()
        answer = self.script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        logprobs = {"content": [{"logprob": -1.0}] * 2}
        choice = {"index": 0, "token_ids": [7, 8], "logprobs": logprobs, "finish_reason": answer}
        return HttpAnswer({"model": json["model"], "usage": {}, "choices": [choice]}, {})


def samplers_of(replica: Replica, *, keep_cache: bool = False, running: int = 8) -> Samplers:
    """`running`: adapters at once."""
    client = vllm_client("http://replica", ("http://replica",))
    client.data.http = client.control.http = cast(Any, replica)
    fleet, limits = opened_fleet(client), AdapterLimits(8, running)
    return Samplers(fleet, cast(Any, None), FACTS, limits, Metrics(), keep_cache=keep_cache)


def adapter(number: int, directory: Path) -> WeightVersion:
    return WeightVersion(VersionId(number), "lora", str(directory))


def assert_nothing_held(samplers: Samplers, version: WeightVersion) -> None:
    assert not samplers.in_use(version)
    assert samplers._full_weights._inside == 0


async def test_an_aborted_sequence_goes_on_with_the_weights_of_its_source_by_then(tmp_path: Path) -> None:
    target, new = InflightTarget(ModelKey(1), adapter(1, tmp_path)), adapter(2, tmp_path)
    replica = Replica("abort", "stop", meanwhile=lambda: setattr(target, "version", new))
    samplers = samplers_of(replica)
    (sequence,) = (await samplers.sample(target, REQUEST)).sequences
    assert (replica.models, sequence.tokens) == (["v1", "v2"], (7, 8, 7, 8))
    assert [(span.version, span.start, span.end) for span in sequence.versions] == [
        ("v1", 0, 2),
        ("v2", 2, 4),
    ]
    assert_nothing_held(samplers, new)


@pytest.mark.parametrize("keep_cache", [False, True])
async def test_what_is_cached_under_weights_is_found_under_them_alone_if_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_cache: bool
) -> None:
    replica = Replica(*["stop"] * 5)
    samplers = samplers_of(replica, keep_cache=keep_cache)
    monkeypatch.setattr(samplers.swaps, "swap", AsyncMock())
    full = WeightVersion(VersionId(1), "full", str(tmp_path))
    for source in (None, full, full, adapter(2, tmp_path), None):
        await samplers.sample(source, REQUEST)
    base, first, second, under_adapter, again = replica.salts
    assert (first, under_adapter) == (second, again)
    assert len({base, first, again}) == (3 if keep_cache else 1)
    assert (base is None) is not keep_cache


async def test_parts_of_a_large_sample_have_priorities_by_their_tokens(tmp_path: Path) -> None:
    replica = Replica(*["stop"] * 3)
    large = replace(REQUEST, num_samples=3, params=replace(REQUEST.params, max_tokens=PART_TOKENS))
    await samplers_of(replica).sample(None, large)
    size = len(REQUEST.prompt) + PART_TOKENS
    assert replica.priorities == [0, size, 2 * size]


async def test_an_adapter_that_a_sampler_has_lost_is_loaded_again(tmp_path: Path) -> None:
    replica, version = Replica(NotFoundError("v1"), "stop"), adapter(1, tmp_path)
    samplers = samplers_of(replica)
    await samplers.sample(version, REQUEST)
    assert (replica.loads, replica.models) == (["v1", "v1"], ["v1", "v1"])
    assert_nothing_held(samplers, version)


async def test_a_save_does_not_wait_for_a_change_of_all_samplers(tmp_path: Path) -> None:
    replica, version = Replica("stop"), adapter(1, tmp_path)
    samplers = samplers_of(replica)
    async with samplers._adapters._fleet.changing.hold():
        await asyncio.wait_for(samplers.load(version), 60)
    assert replica.loads == []
    await samplers.sample(version, REQUEST)
    assert replica.loads == ["v1"]


async def test_a_lease_that_fails_releases_what_it_had(tmp_path: Path) -> None:
    samplers, version = samplers_of(Replica()), adapter(1, tmp_path / "gone")
    with pytest.raises(StateLostError, match="are gone from"):
        await samplers.sample(version, REQUEST)
    assert_nothing_held(samplers, version)


async def test_weights_without_files_are_waited_for_while_a_replay_may_bring_them(tmp_path: Path) -> None:
    replica, restored, lost = Replica("stop", "stop"), tmp_path / "v1", adapter(2, tmp_path / "v2")
    samplers = samplers_of(replica)
    samplers.await_replay()
    waiting = [
        asyncio.create_task(samplers.sample(version, REQUEST)) for version in (adapter(1, restored), lost)
    ]
    await samplers.sample(adapter(3, tmp_path), REQUEST)  # whose files are there
    assert (replica.models, [task.done() for task in waiting]) == (["v3"], [False, False])
    restored.mkdir()
    samplers.replay_ended()
    await waiting[0]
    with pytest.raises(StateLostError, match="save them again"):
        await waiting[1]
    assert replica.models == ["v3", "v1"]


async def test_adapters_are_refused_where_samplers_take_none(tmp_path: Path) -> None:
    samplers = samplers_of(replica := Replica(), running=0)
    await samplers.load(adapter(1, tmp_path))
    with pytest.raises(UserError, match=r"no adapter .* setting max_lora_rank is 0"):
        await samplers.sample(adapter(1, tmp_path), REQUEST)
    assert replica.loads == []


def test_weights_under_which_adapters_run_are_not_dropped() -> None:
    assert samplers_of(Replica(), running=0).drop_weights()
    assert not samplers_of(Replica()).drop_weights()
