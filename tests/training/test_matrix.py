"""Every combination of planner, tenants and ranks trains as a naive loop does that has one tenant and one datum.

Requests go the whole way: journal, lanes, planner, passes, the ranks' processes, and back as stored bytes.
"""

import asyncio
import itertools
import random
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from skyrl_tinker.store.doorbell import Doorbell
from skyrl_tinker.store.futures import Accepted
from skyrl_tinker.store.migrate import migrate
from skyrl_tinker.store.store import Store
from skyrl_tinker.training.group import TrainerGroup, TrainerSpec
from skyrl_tinker.wire import codec
from skyrl_tinker.wire.ids import FutureStatus, ModelId, ModelKey, RequestKind
from skyrl_tinker.wire.results import forward_backward_output_json
from skyrl_tinker.wire.values import AdamParams, Datum, LoraSpec, OptimizerFamily, StepItem
from tests.engine import journal
from tests.engine.world import World
from tests.training.naive import LONGEST, TENANTS, Naive, Pass, Trained, schedule

COUNTS = (1, 2, 5)
UNIT_TOKENS = (1, 16384)
TOKEN_BUDGETS = (LONGEST, 2048)
RANKS = (1, 2, 4)
Weights = dict[str, np.ndarray]
T = TypeVar("T")


class Watched(TrainerGroup):
    """`weights`: of each model, when it is made and after each of its steps."""

    weights: dict[ModelKey, list[Weights]]

    async def create_model(
        self, model: ModelKey, spec: LoraSpec, optimizer: OptimizerFamily = "adamw"
    ) -> None:
        await super().create_model(model, spec, optimizer)
        await self._look([model])

    async def optim_step(self, steps: Sequence[StepItem]) -> Any:
        outputs = await super().optim_step(steps)
        await self._look([step.model for step in steps])
        return outputs

    async def _look(self, models: Sequence[ModelKey]) -> None:
        for model, adapter in (await self.capture_adapters(models)).items():
            self.weights.setdefault(model, []).append(dict(adapter.tensors))

    async def set_budget(self, tokens: int) -> None:
        """As if it had been launched so: starting processes for each budget takes most of a minute."""
        self.spec = replace(self.spec, token_budget=tokens)
        await self._all("__setattr__", "spec", self.spec)


@dataclass(frozen=True)
class Combination:
    tenants: int
    unit_tokens: int
    token_budget: int


COMBINATIONS = [Combination(*each) for each in itertools.product(COUNTS, UNIT_TOKENS, TOKEN_BUDGETS)]
Results = dict[int, Trained]  # by tenant; `weights` begin with those of the new model


class Bench:
    """A store and groups of 1, 2 and 4 ranks, on one event loop."""

    def __init__(self, home: Path, directory: str) -> None:
        self._home, self._directory = home, directory
        self._runner = asyncio.Runner()
        self._known: dict[tuple[int, Combination], Results] = {}
        url = f"sqlite+aiosqlite:///{home / 'store.db'}"
        migrate(url)
        self._store = self.run(Store.open(url))
        self._groups = {ranks: self._launch(ranks) for ranks in RANKS}
        for group in self._groups.values():
            self.run(group.ready())

    def _launch(self, ranks: int) -> Watched:
        group = Watched.launch(TrainerSpec(self._directory, ranks, "cpu", "float32", 1, 1, timeout_s=120.0))
        assert isinstance(group, Watched)
        group.weights = {}
        return group

    def run(self, story: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(story)

    def close(self) -> None:
        with self._runner:
            for group in self._groups.values():
                self.run(group.shutdown())
            self.run(self._store.close())

    def results(self, ranks: int, combination: Combination) -> Results:
        if (ranks, combination) not in self._known:
            self._known[ranks, combination] = self.run(self._train(ranks, combination))
        return self._known[ranks, combination]

    async def _train(self, ranks: int, combination: Combination) -> Results:
        """The schedules of the first so many tenants, all of it there before the first unit of work."""
        group = self._groups[ranks]
        await group.set_budget(combination.token_budget)
        chosen = list(TENANTS)[: combination.tenants]
        models = {tenant: await self._create(tenant) for tenant in chosen}
        accepted = await self._submit(models)
        await self._work(group, combination.unit_tokens, [each for all_ in accepted.values() for each in all_])
        return {tenant: await self._result(group, models[tenant], accepted[tenant]) for tenant in chosen}

    async def _work(self, group: Watched, unit_tokens: int, wanted: Sequence[Accepted]) -> None:
        """Until all is answered."""
        bell = Doorbell.bind(self._home, "engine")
        world = World(self._store, bell, self._home / "checkpoints", group, unit_tokens)
        async with asyncio.timeout(200):
            for each in wanted:
                while (await journal.outcome(self._store, each)).status is FutureStatus.PENDING:
                    assert not world.running.done()
                    await asyncio.sleep(0.01)
        world.running.cancel()
        with suppress(asyncio.CancelledError):
            await world.running
        bell.close()

    async def _create(self, tenant: int) -> ModelId:
        session = await journal.new_session(self._store)
        model = (await journal.submit_create(self._store, session, spec=TENANTS[tenant])).model_id
        assert model is not None
        return model

    async def _submit(self, models: dict[int, ModelId]) -> dict[int, list[Accepted]]:
        """In a random order of arrival."""
        arriving = [(tenant, at) for tenant in models for at in range(len(schedule(tenant)))]
        random.Random(len(models)).shuffle(arriving)
        accepted = {each: await self._ask(models[each[0]], *each) for each in arriving}
        return {
            tenant: [accepted[tenant, at] for at in range(len(schedule(tenant)))] for tenant in models
        }

    async def _ask(self, model: ModelId, tenant: int, at: int) -> Accepted:
        asked = schedule(tenant)[at]
        if isinstance(asked, AdamParams):
            return await journal.submit_step(self._store, model, at + 1, asked)
        kind = RequestKind.FORWARD_BACKWARD if asked.backward else RequestKind.FORWARD
        return await journal.submit(self._store, model, at + 1, kind, body(asked, model, at + 1))

    async def _result(self, group: Watched, model: ModelId, accepted: Sequence[Accepted]) -> Trained:
        key = await journal.key_of(self._store, model)
        await group.release(key)
        trained = Trained(weights=group.weights.pop(key))
        for each in accepted:
            outcome = await journal.outcome(self._store, each)
            assert outcome.status is FutureStatus.DONE, outcome
            if outcome.kind is not RequestKind.OPTIM_STEP and outcome.body is not None:
                read(outcome.body, trained)
        return trained


def body(asked: Pass, model: ModelId, seq_id: int) -> bytes:
    """As it is stored."""
    field = "forward_backward_input" if asked.backward else "forward_input"
    data = [_json(datum) for datum in asked.data]
    payload = {"model_id": model, "seq_id": seq_id, field: {"data": data, "loss_fn": asked.loss_fn}}
    return codec.canonical(codec.decode_forward_backward_json(payload))


def _json(datum: Datum) -> dict[str, Any]:
    inputs = {name: _tensor(array, "float32") for name, array in datum.inputs.items()}
    return {
        "model_input": {"chunks": [{"tokens": datum.tokens.tolist()}]},
        "loss_fn_inputs": {**inputs, "target_tokens": _tensor(datum.target_tokens, "int64")},
    }


def _tensor(array: np.ndarray, dtype: str) -> dict[str, Any]:
    return {"data": array.ravel().tolist(), "dtype": dtype, "shape": list(array.shape)}


def read(stored: bytes, trained: Trained) -> None:
    """A pass's answer."""
    answer = forward_backward_output_json(stored)
    tensors = [output["logprobs"] for output in answer["loss_fn_outputs"]]
    arrays = [np.array(each["data"], np.float32).reshape(each["shape"]) for each in tensors]
    trained.logprobs.append(arrays)
    trained.losses.append(answer["metrics"]["loss:sum"])


@pytest.fixture(scope="module")
def bench(
    ray_cluster: None, tied_model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("matrix"), tied_model)
    yield made
    made.close()


@pytest.fixture(scope="module")
def alone(bench: Bench, tied_model: str) -> Results:
    """By the naive loop, from the same new models."""
    made = bench.results(1, COMBINATIONS[-1])
    return {
        tenant: Naive(tied_model, trained.weights[0]).train(schedule(tenant))
        for tenant, trained in made.items()
    }


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_every_combination_equals_the_naive_loop(
    bench: Bench, alone: Results, ranks: int, combination: Combination
) -> None:
    for tenant, trained in bench.results(ranks, combination).items():
        naive = alone[tenant]
        for loss, logprobs, *other in zip(
            trained.losses, trained.logprobs, naive.losses, naive.logprobs, strict=True
        ):
            tokens = sum(array.size for array in logprobs)
            assert loss == pytest.approx(other[0], rel=1e-5, abs=1e-5 * tokens)
            for found, expected in zip(logprobs, other[1], strict=True):
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        for adapter, expected_adapter in zip(trained.weights[1:], naive.weights, strict=True):
            assert adapter.keys() == expected_adapter.keys()
            for name, array in adapter.items():
                np.testing.assert_allclose(array, expected_adapter[name], rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("combination", COMBINATIONS[:-1], ids=str)
def test_on_one_rank_all_combinations_are_equal_to_the_last_bit(
    bench: Bench, combination: Combination
) -> None:
    last = bench.results(1, COMBINATIONS[-1])
    for tenant, trained in bench.results(1, combination).items():
        assert trained.losses == last[tenant].losses
        for found, expected in zip(trained.logprobs, last[tenant].logprobs, strict=True):
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_array_equal(one, other)
        for adapter, other_adapter in zip(trained.weights, last[tenant].weights, strict=True):
            for name, array in adapter.items():
                np.testing.assert_array_equal(array, other_adapter[name], err_msg=name)
