"""A student, and a teacher of another family and vocabulary, on one server and in one `ServiceClient`."""

import re
from collections.abc import Iterator

import httpx
import numpy as np
import openai
import psutil
import pytest
import tinker
from tinker import types

from tests.e2e.support.client import Client, prompt, random_tokens, train
from tests.e2e.test_exactness import hugging_face_logprobs
from tests.support.pages import block
from tests.support.processes import command, vllm_servers
from tests.support.serve import HEAL_S, Serve, serving
from tests.support.tiny_models import write_tiny

pytestmark = pytest.mark.long

VOCABULARY, MORE = 512, 1024
CONTEXT = 128
"""Of the teacher; the student has 64."""
TOKENS = random_tokens(40, seed=4)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    directory = tmp_path_factory.mktemp("models")
    student, teacher = directory / "student", directory / "teacher"
    write_tiny(student, vocab=VOCABULARY)
    write_tiny(teacher, arch="llama", vocab=MORE, seed=1)
    return str(student), str(teacher)


@pytest.fixture(scope="module")
def server(models: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    student, teacher = models
    home = tmp_path_factory.mktemp("bases") / "home"
    settings = f'[bases."{teacher}"]\nroles = ["sample"]\ncontext_length = {CONTEXT}\n'
    with serving(home, "--base-model", student, "--context-length", "64", settings=settings) as served:
        yield served


@pytest.fixture(scope="module")
def service(server: Serve) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=server.url, api_key="tml-local") as made:
        yield made


@pytest.fixture(scope="module")
def samplers(
    service: tinker.ServiceClient, models: tuple[str, str]
) -> tuple[tinker.SamplingClient, tinker.SamplingClient]:
    student, teacher = (service.create_sampling_client(base_model=name).result() for name in models)
    return student, teacher


def test_each_scores_as_its_own_model_does(
    samplers: tuple[tinker.SamplingClient, tinker.SamplingClient], models: tuple[str, str]
) -> None:
    pending = [sampler.compute_logprobs(prompt(TOKENS)) for sampler in samplers]
    for scores, directory in zip(pending, models, strict=True):
        expected = hugging_face_logprobs(directory, TOKENS)
        np.testing.assert_allclose(scores.result()[1:], expected, atol=1e-3)


def test_the_teacher_stays_as_it_is_while_the_student_learns(
    service: tinker.ServiceClient,
    samplers: tuple[tinker.SamplingClient, tinker.SamplingClient],
    models: tuple[str, str],
) -> None:
    """And it scores the student's samples, made with the student's adapter."""
    student = Client("", service, models[0]).new_lora()
    train(student, TOKENS)
    learnt = student.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=12, stop=[])
    answer = learnt.sample(prompt(TOKENS[:8]), 1, params).result().sequences[0]
    tokens = TOKENS[:8] + answer.tokens
    scores = samplers[1].compute_logprobs(prompt(tokens)).result()
    np.testing.assert_allclose(scores[1:], hugging_face_logprobs(models[1], tokens), atol=1e-3)
    own = learnt.compute_logprobs(prompt(tokens)).result()
    np.testing.assert_allclose(own[8:], answer.logprobs, atol=1e-3)


def test_each_request_is_checked_by_its_own_model(
    samplers: tuple[tinker.SamplingClient, tinker.SamplingClient],
) -> None:
    student, teacher = samplers
    beyond, long = prompt([5, VOCABULARY + 3]), prompt(random_tokens(100, seed=5))
    params = types.SamplingParams(max_tokens=2, stop=[])
    assert len(teacher.sample(beyond, 1, params).result().sequences[0].tokens) == 2
    assert len(teacher.sample(long, 1, params).result().sequences[0].tokens) == 2
    with pytest.raises(tinker.BadRequestError, match=re.escape(f"[0, {VOCABULARY})")):
        student.sample(beyond, 1, params).result()
    with pytest.raises(tinker.BadRequestError, match=r"max_tokens > 64 \(the setting"):
        student.sample(long, 1, params).result()
    with pytest.raises(tinker.BadRequestError, match=re.escape(f"[0, {MORE})")):
        teacher.sample(prompt([MORE]), 1, params).result()


def test_capabilities_tell_which_is_trained(server: Serve, models: tuple[str, str]) -> None:
    listed = tinker.RestClient(base_url=server.url).get_server_capabilities().result().supported_models
    told = [(each.model_name, each.max_context_length, each.trainable, each.sampleable) for each in listed]
    assert told == [(models[0], 64, True, True), (models[1], CONTEXT, False, True)]


def test_the_teacher_is_not_trained(service: tinker.ServiceClient, models: tuple[str, str]) -> None:
    student, teacher = models
    told = f"base_model '{teacher}' is served for sampling only (roles of base {teacher}), expected one that"
    with pytest.raises(tinker.TinkerError, match=re.escape(f"{told} trains: {student}")):
        service.create_lora_training_client(base_model=teacher, rank=8).result()
    with pytest.raises(
        tinker.TinkerError, match=f"expected one that trains: {re.escape(student)}"
    ) as refused:
        service.create_lora_training_client(base_model="org/none", rank=8).result()
    assert teacher not in str(refused.value)
    with pytest.raises(
        tinker.TinkerError, match=re.escape(f"expected one that is sampled: {student}, {teacher}")
    ):
        service.create_sampling_client(base_model="org/none").result()


def test_openai_clients_name_either(server: Serve, models: tuple[str, str]) -> None:
    with openai.OpenAI(base_url=f"{server.url}/oai/api/v1", api_key="any", max_retries=0) as client:
        assert [each.id for each in client.models.list()] == [*models]
        for model in models:
            answer = client.completions.create(model=model, prompt="2+2", max_tokens=3, temperature=0)
            assert answer.model == model
            assert answer.usage is not None
            assert answer.usage.completion_tokens >= 1
        beyond = client.completions.create(model=models[1], prompt=[MORE - 1], max_tokens=1)
        assert beyond.usage is not None
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model=models[0], prompt=[MORE - 1], max_tokens=1)
        with pytest.raises(openai.NotFoundError, match=r"expected .*/student, .*/teacher, or a tinker:"):
            client.completions.create(model="org/none", prompt="2+2", max_tokens=3)


def test_the_views_have_both(server: Serve, models: tuple[str, str]) -> None:
    now = httpx.get(f"{server.url}/api/v1/console/now", timeout=30).json()
    told = [
        (each["base_model"], each["trainer_ranks"], each["replicas"]) for each in now["server"]["base_models"]
    ]
    assert told == [(models[0], 1, 1), (models[1], 0, 1)]
    assert now["state"] == "ready"


def test_the_example_of_the_page_distills(
    server: Serve,
    models: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    example = block("docs/cookbook.md: import tinker").text
    for ours, named in zip(models, ("Qwen/Qwen3-4B", "Qwen/Qwen3-8B"), strict=True):
        assert named in example
        example = example.replace(named, ours)
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    exec(compile(example, "example", "exec"), {})
    steps = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert len(steps) == 3
    assert all(np.isfinite([float(value) for value in step]).all() for step in steps)


def test_the_death_of_the_teacher_s_sampler_is_not_the_student_s_matter(
    server: Serve, samplers: tuple[tinker.SamplingClient, tinker.SamplingClient], models: tuple[str, str]
) -> None:
    student, teacher = (_sampler_of(server, model) for model in models)
    before = [sampler.compute_logprobs(prompt(TOKENS)).result() for sampler in samplers]
    teacher.kill()
    pending = samplers[1].compute_logprobs(prompt(TOKENS))
    for _ in range(4):
        scores = samplers[0].compute_logprobs(prompt(TOKENS)).result(HEAL_S)
        assert scores[1:] == pytest.approx(before[0][1:], abs=1e-4)
    assert pending.result(HEAL_S)[1:] == pytest.approx(before[1][1:], abs=1e-4)
    assert student.is_running()
    assert _sampler_of(server, models[1]).pid != teacher.pid


def _sampler_of(server: Serve, model: str) -> psutil.Process:
    (found,) = (each for each in vllm_servers(server.process.pid) if model in " ".join(command(each)))
    return found
