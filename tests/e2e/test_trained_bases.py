"""Two base models that are trained on one server: each as if it were alone."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import psutil
import pytest
import tinker
from tinker import types

from tests.e2e.support.client import Client, datum, logprobs_of, prompt, random_tokens, train
from tests.e2e.support.two_bases import Models, Served, served, write_models
from tests.e2e.test_import_adapter import run_import
from tests.support.peft_adapters import save_adapter, token_logprobs
from tests.support.processes import title
from tests.support.serve import HEAL_S, KINDS, Serve
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long

STEPS, SEEDS, DEADLY = 8, (1, 2), 4
TOKENS = random_tokens(40, seed=4)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def both(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("both") / "home"
    with served(home, "--base-model", models[0], "--also", f"{models[1]}:train,sample") as found:
        yield found


@pytest.fixture(scope="module")
def alone(models: Models, tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    """The losses of each base model on a server of its own."""
    found = []
    for number, model in enumerate(models):
        home = tmp_path_factory.mktemp(f"alone{number}") / "home"
        with served(home, "--base-model", model) as (_, service):
            found += losses(trained(service, [model]))
    return found


def trained(service: tinker.ServiceClient, models: Sequence[str]) -> list[tinker.TrainingClient]:
    return [Client("", service, model).new_lora(seed=seed) for model in models for seed in SEEDS]


def losses(training: Sequence[tinker.TrainingClient], server: Serve | None = None) -> list[list[float]]:
    """By model and step; all are trained at once. With `server`, all ranks are killed meanwhile."""
    found: list[list[float]] = [[] for _ in training]
    for step in range(STEPS):
        batch = [datum(random_tokens(50, seed=10 * step + each)) for each in range(3)]
        passes = [model.forward_backward(batch, "cross_entropy") for model in training]
        steps = [model.optim_step(types.AdamParams(learning_rate=1e-2)) for model in training]
        if server is not None and step == DEADLY:
            for rank in ranks(server):
                rank.kill()
        for each, losses_of in zip(passes, found, strict=True):
            losses_of.append(each.result(HEAL_S).metrics["loss:sum"])
        for done in steps:
            done.result(HEAL_S)
    return found


def ranks(server: Serve) -> list[psutil.Process]:
    return [each for each in server.tree() if KINDS["trainer"] in title(each)]


def test_each_learns_as_if_it_were_alone(both: Served, models: Models, alone: list[list[float]]) -> None:
    server, service = both
    assert len(ranks(server)) == 2
    assert losses(trained(service, models)) == alone


def test_each_comes_back_after_the_death_of_its_ranks(
    both: Served, models: Models, alone: list[list[float]]
) -> None:
    server, service = both
    engine = server.find("engine")
    assert losses(trained(service, models), server) == alone
    assert server.find("engine") == engine


def test_the_death_of_the_ranks_of_one_is_not_the_other_s_matter(both: Served, models: Models) -> None:
    server, service = both
    training = [Client("", service, model).new_lora() for model in models]
    for each in training:
        train(each, TOKENS)
    before = [logprobs_of(each, TOKENS) for each in training]
    known = lost(server)
    ranks(server)[0].kill()
    wait_until(lambda: lost(server).total() > known.total())
    for each, expected in zip(training, before, strict=True):
        assert logprobs_of(each, TOKENS).tolist() == expected.tolist()
    assert (lost(server) - known).total() == 1


def test_one_whose_ranks_die_again_and_again_is_started_anew_by_itself(both: Served, models: Models) -> None:
    """With its samplers, which then have its clients' weights."""
    server, service = both
    engine, kept = server.find("engine"), ranks(server)[0]
    training = [Client("", service, model).new_lora() for model in models]
    for each in training:
        train(each, TOKENS)
    samplers = [each.save_weights_and_get_sampling_client().result() for each in training]
    scored = [sampler.compute_logprobs(prompt(TOKENS)).result()[1:] for sampler in samplers]
    before = [logprobs_of(each, TOKENS) for each in training]
    while "failed" not in [state(server, model) for model in models]:
        for rank in ranks(server):
            if rank != kept:
                rank.kill()
    for each, expected in zip(training, before, strict=True):
        assert logprobs_of(each, TOKENS).tolist() == expected.tolist()
    for sampler, known in zip(samplers, scored, strict=True):
        found = sampler.compute_logprobs(prompt(TOKENS)).result(HEAL_S)[1:]
        assert found == pytest.approx(known, abs=1e-3)
    assert [state(server, model) for model in models] == ["ready", "ready"]
    assert kept.is_running()
    assert server.find("engine") == engine


def state(server: Serve, model: str) -> str:
    told = httpx.get(f"{server.url}/readyz", timeout=30).json()["base_models"]
    return next(str(each["state"]) for each in told if each["base_model"] == model)


def lost(server: Serve) -> Counter[str]:
    """Count the losses of ranks by the base model."""
    problems = httpx.get(f"{server.url}/api/v1/console/now", timeout=30).json()["problems"]
    return Counter(each["subject"] for each in problems if "the trainer was lost" in each["text"])


@pytest.mark.filterwarnings("ignore:DEPRECATED. TrainingClient.load_state:FutureWarning")
def test_checkpoints_go_on_with_their_own_base_model(both: Served, models: Models) -> None:
    _, service = both
    saved = []
    for model in models:
        training = Client("", service, model).new_lora()
        train(training, TOKENS)
        path = training.save_state("half").result().path
        train(training, TOKENS)
        expected = logprobs_of(training, TOKENS)
        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        assert resumed.get_info().model_data.model_name == model
        train(resumed, TOKENS)
        assert logprobs_of(resumed, TOKENS).tolist() == expected.tolist()
        sampler = resumed.save_weights_and_get_sampling_client().result()
        scored = sampler.compute_logprobs(prompt(TOKENS)).result()
        assert scored[1:] == pytest.approx(expected.tolist(), abs=1e-3)
        saved.append((path, resumed))
    (path, _), (_, other) = saved
    told = re.escape(f"{path} is of base model …/first, expected …/second")
    with pytest.raises(tinker.TinkerError, match=told):
        other.load_state(path).result()


def test_the_views_have_both(both: Served, models: Models) -> None:
    server, _ = both
    now = httpx.get(f"{server.url}/api/v1/console/now", timeout=30).json()
    told = [(each["base_model"], each["trainer_ranks"]) for each in now["server"]["base_models"]]
    assert told == [(model, 1) for model in models]
    assert [each["base_model"] for each in now["trainers"]] == [*models]
    wait_until(server.ready)
    listed = tinker.RestClient(base_url=server.url).get_server_capabilities().result().supported_models
    assert [(each.model_name, each.trainable) for each in listed] == [(model, True) for model in models]
    metrics = httpx.get(f"{server.url}/metrics", timeout=30).text
    for model in models:
        assert f'skyrl_tinker_trainer_restarts{{base_model="{model}"}}' in metrics


def test_an_adapter_of_others_goes_on_with_the_second(both: Served, models: Models, tmp_path: Path) -> None:
    server, service = both
    peft = save_adapter(models[1], tmp_path / "elsewhere", r=4, target_modules=["q_proj", "down_proj"])
    path = run_import(server, tmp_path / "elsewhere", "--base-model", models[1]).strip()
    training = service.create_training_client_from_state(path).result()
    assert training.get_info().model_data.model_name == models[1]
    expected = token_logprobs(peft.merge_and_unload(), TOKENS[:-1], TOKENS[1:]).numpy()
    assert logprobs_of(training, TOKENS) == pytest.approx(expected, abs=1e-4)


def test_the_bill_has_each_under_its_name(both: Served, models: Models) -> None:
    server, service = both
    began = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    hours = began, began + timedelta(hours=2)
    admin = tinker.AdminClient(base_url=server.url)
    before = billed(admin, hours)
    for number, model in enumerate(models):
        client = Client("", service, model)
        train(client.new_lora(), TOKENS[: 20 + number])
        client.base_sampler().compute_logprobs(prompt(TOKENS[: 10 + number])).result()
    kinds = [("training", 19), ("sampling_prefill", 10)]
    expected = {(model, kind): count + number for number, model in enumerate(models) for kind, count in kinds}
    assert billed(admin, hours) - before == expected


def billed(admin: tinker.AdminClient, hours: tuple[datetime, datetime]) -> Counter[tuple[str, str]]:
    """Count tokens by base model and kind."""
    found: Counter[tuple[str, str]] = Counter()
    for event in admin.get_billing_usage(*hours).result().data:
        info = event.event_info
        if info.type in ("training", "sampling_prefill"):
            found[event.base_model, info.type] += info.token_count
    return found
