"""SGLang samples all families that it serves with the trainer's logprobs: base, adapters, full parameters."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_tinker import config
from skyrl_tinker.inference.client.remote_client import RemoteInferenceClient
from skyrl_tinker.inference.sglang.sglang_dialect import SGLANG
from skyrl_tinker.inference.sglang.sglang_process import ARCHITECTURES, WITHOUT_ADAPTERS
from skyrl_tinker.server.base_models.base_model import resolve
from skyrl_tinker.server.base_models.tiny_families import FAMILIES
from skyrl_tinker.weight_sync.factory import make_transport
from tests.conformance.support.ends import ThreadSenders
from tests.inference.support.samplers import CONTEXT, Sampler, spec_of
from tests.support.sglang_cpu.sglang_server import interpreter, serving
from tests.support.tiny_models import write_tiny
from tests.training.conftest import MakeWorker, make_worker, ranks  # noqa: F401
from tests.training.test_sampled_families import assert_all_sampled
from tests.weight_sync.conftest import CHUNK_BYTES

pytestmark = [pytest.mark.servers, pytest.mark.long]

ARCHS = [name for name, family in FAMILIES.items() if family.architecture in ARCHITECTURES]
NO_WINDOW: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
}
UNTIED = ("llama", "qwen3-moe")


@pytest.mark.parametrize("arch", sorted({*ARCHS} - {"qwen3"}))  # which all other tests sample
async def test_samples_have_the_trainers_logprobs(
    make_worker: MakeWorker,  # noqa: F811
    tmp_path: Path,
    arch: str,
) -> None:
    write_tiny(tmp_path / "model", arch=arch, tied=arch not in UNTIED, **NO_WINDOW.get(arch, {}))
    adapters = FAMILIES[arch].architecture not in WITHOUT_ADAPTERS
    facts = resolve(
        config.load(
            base_model=str(tmp_path / "model"),
            model_name="tiny",
            context_length=CONTEXT,
            sampler_engine="sglang",
            max_lora_rank=16 if adapters else 0,
        )
    )
    (tmp_path / "logs").mkdir()
    spec = spec_of(facts, tmp_path / "logs")
    with serving(spec if adapters else replace(spec, max_lora_rank=0), interpreter()) as url:
        sampler = Sampler(RemoteInferenceClient(url, (url,), dialect=SGLANG), facts)
        transport = make_transport("torch_gloo", ThreadSenders(1), CHUNK_BYTES)
        await assert_all_sampled(sampler, transport, make_worker, tmp_path, adapters=adapters)
