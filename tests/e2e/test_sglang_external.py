"""`serve --sampler-urls`: a real SGLang server that somebody else started."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tinker
from transformers import AutoTokenizer

from skyrl_tinker.inference.client.remote_client import RemoteInferenceClient
from skyrl_tinker.inference.sglang.sglang_dialect import SGLANG
from tests.e2e.support.client import Client, logprobs_of, prompt, random_tokens, train
from tests.e2e.support.policies import ATOL
from tests.inference.support.samplers import CONTEXT, spec_of, write_model
from tests.support.sglang_cpu.sglang_server import interpreter, sampling, serving

pytestmark = pytest.mark.long

TOKENS = random_tokens(12, seed=1)
CHAT: Any = [{"role": "user", "content": "Which letter?"}]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The server's URL, and the directory of its model, for whose name SGLang has a chat template."""
    root = tmp_path_factory.mktemp("running")
    facts = write_model(root / "vicuna", tied=False)
    with serving(spec_of(facts, root), interpreter()) as url:
        yield url, root / "vicuna"


@pytest.fixture(params=["recompute", "keep"])
def client(request: pytest.FixtureRequest, running: tuple[str, Path], tmp_path: Path) -> Iterator[Client]:
    """Of one server after the other: SGLang stays, and keeps nothing of the first for the second."""
    url, directory = running
    options = ["--base-model", str(directory), "--model-name", "mine", "--max-lora-rank", "16"]
    options += ["--context-length", str(CONTEXT), "--sampler-urls", f"{url}/"]
    with (
        sampling(tmp_path / "home", *options, INFLIGHT_CACHE=request.param) as server,
        tinker.ServiceClient(base_url=server.url) as service,
    ):
        yield Client(server.url, service, "mine")


async def test_chats_have_the_template_of_the_tokenizer(running: tuple[str, Path]) -> None:
    url, directory = running
    client = RemoteInferenceClient(url, (url,), dialect=SGLANG)
    found = await client.data.tokenize({"messages": CHAT})
    await client.close()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert found == tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)


def test_it_serves_what_is_trained_here_and_stays_when_this_server_ends(client: Client) -> None:
    base = client.base_sampler()
    before = base.compute_logprobs(prompt(TOKENS)).result()
    for rank in (8, 0):
        training = client.new_lora(rank=rank)
        train(training, TOKENS, learning_rate=1e-3)
        sampler = training.save_weights_and_get_sampling_client().result()
        found = sampler.compute_logprobs(prompt(TOKENS)).result()
        np.testing.assert_allclose(found[1:], logprobs_of(training, TOKENS), atol=ATOL)
    np.testing.assert_allclose(base.compute_logprobs(prompt(TOKENS)).result()[1:], before[1:], atol=ATOL)
    with openai.OpenAI(base_url=f"{client.url}/oai/api/v1", api_key="any", max_retries=0) as oai:
        answer = oai.chat.completions.create(model="mine", messages=CHAT, max_tokens=4)
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 4
