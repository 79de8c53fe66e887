"""The setting inflight_cache reaches all that it asks something of: samplers, their servers, each sync."""

from pathlib import Path
from typing import Any

import pytest

from skyrl_tinker import config
from skyrl_tinker.directories import Directories
from skyrl_tinker.domain.ids import VersionId
from skyrl_tinker.domain.values import WeightVersion
from skyrl_tinker.engine.compose import make_samplers, sampler_spec
from skyrl_tinker.engine.sampler import weight_swaps
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.storage.storage_port import LOCAL_DISK
from skyrl_tinker.weight_sync.sync import Synced
from tests.engine.sampler.test_sampler_driver import FACTS
from tests.support.sampler_clients import opened_fleet, vllm_client


@pytest.mark.parametrize(("value", "kept"), [("recompute", False), ("keep", True)])
async def test_a_kept_cache_is_kept_in_each_sync_and_told_apart_by_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, kept: bool
) -> None:
    settings = config.load(home=tmp_path, inflight_cache=value)
    fleet = opened_fleet(vllm_client("http://replica", ("http://replica",)))
    asked: list[bool] = []

    async def sync(*_: Any, keep_cache: bool, **__: Any) -> Synced:
        asked.append(keep_cache)
        return Synced(0, 0.0, 0.0, {})

    monkeypatch.setattr(weight_swaps, "sync_weights", sync)
    samplers = make_samplers(settings, FACTS, None, fleet, Metrics(), LOCAL_DISK)
    version = WeightVersion(VersionId(1), "full", str(tmp_path))
    async with samplers.leases.open(version):
        assert ("cache_salt" in samplers.leases.cache_fields()) is kept
    assert asked == [kept]
    assert sampler_spec(settings, Directories(settings), FACTS, 0).keeps_cache is kept
