"""Router replay from a sample to the logprobs of a pass, with the real SDK and a mixture of experts."""

import io
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from transformers import AutoModelForCausalLM

from skyrl_tinker.domain.values import ReplayedExperts
from tests.e2e.support.client import Array, Client, datum, prompt, random_tokens
from tests.support.forced_experts import force_experts
from tests.support.peft_adapters import token_logprobs
from tests.support.serve import serving
from tests.support.tiny_models import write_tiny

pytestmark = pytest.mark.long

MODEL = "mixture"
PROMPT = random_tokens(140, seed=41)  # more than a block of the KV cache
LAYERS, EXPERTS, CHOSEN = 2, 8, 2


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replaying") / "home"


@pytest.fixture(scope="module")
def directory(home: Path) -> Path:
    write_tiny(home.parent / MODEL, arch="qwen3-moe", layers=LAYERS, tied=False)
    return home.parent / MODEL


@pytest.fixture(scope="module")
def replaying(home: Path, directory: Path) -> Iterator[Client]:
    options = ["--base-model", str(directory), "--model-name", MODEL]
    settings = "router_replay = true\n"
    with serving(home, *options, settings=settings) as server, Client.of(server.url, MODEL) as client:
        yield client


def _named(sequence: types.SampledSequence) -> types.Datum:
    """PROMPT and what was sampled, for importance_sampling, with the spans that the cookbook gives it."""
    name, before, count = sequence.sequence_id, len(PROMPT), len(sequence.tokens)
    return _bare(sequence).with_provenance(
        model_input=[
            types.PromptProvenanceSpan(sequence_id=name, length=before),
            types.SampledProvenanceSpan(sequence_id=name, length=count - 1),
        ],
        loss_fn_inputs=[
            types.PromptProvenanceSpan(sequence_id=name, offset=1, length=before - 1),
            types.SampledProvenanceSpan(sequence_id=name, length=count),
        ],
    )


def _bare(sequence: types.SampledSequence) -> types.Datum:
    before = len(PROMPT) - 1
    return datum(
        [*PROMPT, *sequence.tokens],
        advantages=[0.0] * before + [1.0] * len(sequence.tokens),
        logprobs=[0.0] * before + list(sequence.logprobs or []),
    )


def _pass(training: tinker.TrainingClient, data: list[types.Datum]) -> tuple[list[Array], float]:
    """Logprobs, and the tokens whose experts were replayed."""
    output = training.forward_backward(data, "importance_sampling").result()
    logprobs = [np.asarray(each["logprobs"].to_numpy()) for each in output.loss_fn_outputs]
    return logprobs, output.metrics["replayed_tokens:sum"]


def _rewrite(home: Path, sequence_id: str, seed: int) -> np.ndarray:
    """Record random experts in place of those that were sampled with."""
    with sqlite3.connect(home / "skyrl-tinker.db", timeout=30) as database:
        where = "WHERE sequence_id = ?"
        (stored,) = database.execute(
            f"SELECT experts FROM stability_records {where}", [sequence_id]
        ).fetchone()
        shape = np.load(io.BytesIO(stored)).shape
        draws = np.random.default_rng(seed).random((*shape[:2], EXPERTS))
        experts = draws.argsort(-1)[..., :CHOSEN].astype(np.uint8)
        file = io.BytesIO()
        np.save(file, experts)
        database.execute(f"UPDATE stability_records SET experts = ? {where}", [file.getvalue(), sequence_id])
    return experts


def test_sampled_sequences_are_trained_with_the_experts_on_record(
    replaying: Client, home: Path, directory: Path
) -> None:
    sampler = replaying.service.create_sampling_client(base_model=MODEL, record_stability_info=True).result()
    params = types.SamplingParams(max_tokens=12, seed=5, stop=[])
    sequences = sampler.sample(prompt(PROMPT), 2, params).result().sequences
    training = replaying.new_lora(seed=31)  # it computes what the base model does

    before, replayed = _pass(training, [_named(sequence) for sequence in sequences])
    assert replayed == 2 * (len(PROMPT) + 12 - 1)
    for sequence, logprobs in zip(sequences, before, strict=True):
        np.testing.assert_allclose(logprobs[len(PROMPT) - 1 :], sequence.logprobs, atol=1e-3)

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for number, sequence in enumerate(sequences):
        experts = _rewrite(home, sequence.sequence_id, number)
        tokens = [*PROMPT, *sequence.tokens]
        force_experts(model, ReplayedExperts(experts, np.ones(len(experts), bool)))
        with torch.no_grad():
            expected = token_logprobs(model, tokens[:-1], tokens[1:]).numpy()
        (forced, bare), replayed = _pass(training, [_named(sequence), _bare(sequence)])
        assert replayed == len(PROMPT) + 12 - 1
        np.testing.assert_allclose(forced, expected, atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(bare, before[number], atol=1e-5, rtol=1e-5)
        assert np.abs(forced - bare).max() > 0.1
    training.optim_step(types.AdamParams(learning_rate=1e-3)).result()


def test_samples_without_a_record_train_as_ever(replaying: Client) -> None:
    """The cookbook names every sample in every loss, recorded or not."""
    params = types.SamplingParams(max_tokens=6, seed=5, stop=[])
    (sequence,) = replaying.base_sampler().sample(prompt(PROMPT), 1, params).result().sequences
    (logprobs,), replayed = _pass(replaying.new_lora(seed=32), [_named(sequence)])
    assert replayed == 0
    np.testing.assert_allclose(logprobs[len(PROMPT) - 1 :], sequence.logprobs, atol=1e-3)
