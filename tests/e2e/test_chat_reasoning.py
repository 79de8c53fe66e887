"""A server whose model thinks: template variables, reasoning apart, and logprobs of what was sampled from."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from tinker import types
from tokenizers import Tokenizer

from skyrl_tinker.server.base_models.tiny_model import make_model, make_tokenizer
from tests.e2e.support.client import (
    Client,
    datum,
    gap_of_next_step,
    logprobs_of,
    prompt,
    random_tokens,
    train,
)
from tests.inference.support.samplers import all_logprobs, reference
from tests.support.serve import serving

pytestmark = pytest.mark.long

THINKING = "<think>\n\n</think>\n\n"
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.reasoning_content is defined %}{{- '(' + message.reasoning_content + ')' }}{%- endif %}"
    "{{- message.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if reasoning_effort is defined %}{{- 'effort: ' + reasoning_effort + '\\n' }}{%- endif %}"
    "{%- if enable_thinking is defined and not enable_thinking %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
QUESTION: Any = [{"role": "user", "content": "Which letter?"}]
ASKED = "<|im_start|>user\nWhich letter?<|im_end|>\n<|im_start|>assistant\n"
MODEL = "thinker"
TOKENS = random_tokens(12, seed=3)


def write_thinker(directory: Path) -> None:
    make_model(directory, vocab=514)
    tokenizer: Tokenizer = make_tokenizer(512)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / MODEL
    write_thinker(directory)
    return directory


@pytest.fixture(scope="module")
def url(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("thinking") / "home"
    settings = 'reasoning_parser = "qwen3"\nsampled_logprobs = "processed"\n'
    with serving(home, "--base-model", str(directory), "--model-name", MODEL, settings=settings) as server:
        yield server.url


@pytest.fixture(scope="module")
def oai(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/oai/api/v1", api_key="any", max_retries=0) as made:
        yield made


def answer(oai: openai.OpenAI, messages: Any = QUESTION, **fields: Any) -> Any:
    return oai.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=6, logprobs=True, **fields
    )


def prompt_tokens(oai: openai.OpenAI, text: str) -> tuple[int, list[float]]:
    """How many tokens the text has, and the logprobs of a greedy continuation."""
    given = oai.completions.create(model=MODEL, prompt=text, temperature=0, max_tokens=6, logprobs=0)
    assert given.usage is not None
    assert given.choices[0].logprobs is not None
    return given.usage.prompt_tokens, given.choices[0].logprobs.token_logprobs  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, ASKED),
        ({"reasoning_effort": "low"}, f"{ASKED}effort: low\n"),
        ({"reasoning_effort": "none"}, f"{ASKED}effort: none\n{THINKING}"),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, f"{ASKED}{THINKING}"),
        ({"extra_body": {"chat_template_kwargs": {"unread": 1}}}, ASKED),
    ],
)
def test_the_template_writes_what_the_request_says(oai: openai.OpenAI, fields: Any, text: str) -> None:
    chat, (count, logprobs) = answer(oai, **fields), prompt_tokens(oai, text)
    assert chat.usage.prompt_tokens == count
    listed = [token.logprob for token in chat.choices[0].logprobs.content]
    np.testing.assert_allclose(listed, logprobs, atol=1e-4)


def test_reasoning_and_what_follows_it_are_fields_of_their_own(oai: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "n": 64, "max_tokens": 48, "seed": 0}
    whole = [choice.text for choice in oai.completions.create(prompt=ASKED, **asked).choices]
    apart = oai.chat.completions.create(
        messages=QUESTION, extra_body={"separate_reasoning": True}, **asked
    ).choices
    ended = 0
    for text, choice in zip(whole, apart, strict=True):
        reasoning, end, content = text.partition("</think>")
        found = choice.message.model_extra or {}
        if text.count("<think>") or text.count("</think>") > 1:
            continue
        assert (found["reasoning"] or "").strip() == reasoning.strip()
        assert found.get("reasoning_content") == found["reasoning"]
        assert (choice.message.content or "").strip() == content.strip()
        ended += bool(end)
    assert ended, "no sequence came to the end of its reasoning"


def test_streamed_reasoning_is_apart_too(oai: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 12}
    whole = oai.chat.completions.create(**asked).choices[0].message
    deltas = [chunk.choices[0].delta for chunk in oai.chat.completions.create(**asked, stream=True)]
    assert whole.model_extra is not None
    for field in ("reasoning", "reasoning_content"):
        streamed = "".join((delta.model_extra or {}).get(field) or "" for delta in deltas)
        assert streamed == whole.model_extra[field]


def test_a_dialogue_goes_on_with_the_answer_as_the_sdk_dumps_it(oai: openai.OpenAI) -> None:
    first = answer(oai).choices[0].message
    text = f"({first.model_extra['reasoning']})" if first.model_extra["reasoning"] else ""
    dialogue = [*QUESTION, first.model_dump() | {"content": "A"}, *QUESTION]
    count, _ = prompt_tokens(
        oai, f"{ASKED}{text}A<|im_end|>\n<|im_start|>user\nWhich letter?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert answer(oai, dialogue).usage.prompt_tokens == count


def test_reasoning_cannot_be_put_back_into_the_text(oai: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="reasoning_parser is qwen3") as refused:
        answer(oai, extra_body={"separate_reasoning": False})
    assert refused.value.param == "separate_reasoning"


@pytest.fixture(scope="module")
def thinker(url: str) -> Iterator[Client]:
    with Client.of(url, MODEL) as client:
        yield client


def draw(thinker: Client, directory: Path) -> tuple[types.SampledSequence, np.ndarray]:
    """A recorded sample of the base model at T = 0.5, and log_softmax(logits) of its tokens' places."""
    create = thinker.service.create_sampling_client
    sampler = create(base_model=MODEL, record_stability_info=True).result()
    asked = types.SamplingParams(max_tokens=8, temperature=0.5, stop=[])
    sequence = sampler.sample(prompt(TOKENS), 1, asked).result().sequences[0]
    rows = all_logprobs(reference(directory), (*TOKENS, *sequence.tokens))
    return sequence, rows[len(TOKENS) - 1 :].numpy()


def of_tokens(rows: np.ndarray, sequence: types.SampledSequence) -> np.ndarray:
    return rows[np.arange(len(rows)), list(sequence.tokens)]


def test_samples_have_the_logprobs_of_what_they_were_drawn_from(thinker: Client, directory: Path) -> None:
    sequence, rows = draw(thinker, directory)
    tempered = torch.log_softmax(torch.from_numpy(rows) / 0.5, -1).numpy()
    np.testing.assert_allclose(sequence.logprobs, of_tokens(tempered, sequence), atol=1e-3)


def test_records_of_samples_have_the_logprobs_that_the_client_got(thinker: Client, directory: Path) -> None:
    sequence, rows = draw(thinker, directory)
    before, count = len(TOKENS), len(sequence.tokens)
    name = sequence.sequence_id
    named = datum(
        [*TOKENS, *sequence.tokens], advantages=[0.0] * (before - 1) + [1.0] * count
    ).with_provenance(
        model_input=[
            types.PromptProvenanceSpan(sequence_id=name, offset=0, length=before),
            types.SampledProvenanceSpan(sequence_id=name, length=count - 1),
        ],
        loss_fn_inputs=[
            types.PromptProvenanceSpan(sequence_id=name, offset=1, length=before - 1),
            types.SampledProvenanceSpan(sequence_id=name, length=count),
        ],
    )
    metrics = thinker.new_lora().forward_backward([named], "stable_reinforce").result().metrics
    expected = float(np.sum(sequence.logprobs) - of_tokens(rows, sequence).sum())
    assert metrics["kl_sampler_policy:sum"] == pytest.approx(expected, abs=1e-2)
    assert abs(expected) > 0.02, "raw logprobs would do as well"


def test_trainer_and_samplers_are_compared_as_ever(thinker: Client, directory: Path) -> None:
    """At the start, too: else the server would not be ready."""
    training = thinker.new_lora()
    train(training, TOKENS)
    sampler = training.save_weights_and_get_sampling_client().result()
    scored = sampler.compute_logprobs(prompt(TOKENS)).result()
    np.testing.assert_allclose(scored[1:], logprobs_of(training, TOKENS), atol=1e-3)
    assert gap_of_next_step(training, TOKENS) < 1e-3
