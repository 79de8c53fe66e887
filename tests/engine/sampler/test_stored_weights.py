"""Samples of weights in object storage, of which this host has a cache."""

import shutil
from pathlib import Path
from typing import Any, cast

from skyrl_tinker.domain.ids import VersionId
from skyrl_tinker.domain.manifest import write_listing
from skyrl_tinker.domain.values import WeightVersion
from skyrl_tinker.engine.sampler.adapter_cache import AdapterLimits
from skyrl_tinker.engine.sampler.fleet import Fleet
from skyrl_tinker.engine.sampler.samplers import Samplers
from skyrl_tinker.engine.telemetry.engine_metrics import Metrics
from skyrl_tinker.inference.client.remote_client import RemoteInferenceClient
from skyrl_tinker.storage.checkpoint_storage import CheckpointStorage
from tests.engine.sampler.test_adapter_turns import Batch, ask
from tests.engine.sampler.test_sampler_driver import FACTS


async def test_weights_that_were_deleted_from_the_cache_are_fetched_again(tmp_path: Path) -> None:
    """At once, though they had counted as here."""
    storage = CheckpointStorage(tmp_path / "local", f"file://{tmp_path}/bucket")
    directory = tmp_path / "local" / "v1"
    directory.mkdir(parents=True)
    (directory / "adapter_model.safetensors").write_bytes(b"weights")
    write_listing(directory)
    storage.store(directory)
    client = RemoteInferenceClient("http://replica", ("http://replica",))
    client.data.http = client.control.http = cast(Any, Batch())
    samplers = Samplers(
        Fleet(cast(Any, None), client), cast(Any, None), FACTS, AdapterLimits(4, 1), Metrics(), storage
    )
    version = WeightVersion(VersionId(1), "lora", str(directory))
    await samplers.sample(version, ask(1))
    await samplers.unload(version)
    shutil.rmtree(directory)
    await samplers.sample(version, ask(1))
    assert directory.exists()
