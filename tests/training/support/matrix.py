"""The schedules of `naive` on real trainers: through journal, lanes, planner and passes to the ranks'
processes, and back as stored bytes.
"""

import asyncio
import random
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from skyrl_tinker.domain.ids import FutureStatus, ModelId, ModelKey, ModelState, RequestKind
from skyrl_tinker.domain.values import AdamParams, Datum, LoraSpec, OptimizerFamily, StepItem
from skyrl_tinker.protocol.protobuf import pass_requests
from skyrl_tinker.protocol.protobuf.pass_results import forward_backward_output_json
from skyrl_tinker.store import model_records
from skyrl_tinker.store.database.migrate import migrate
from skyrl_tinker.store.doorbell import SocketBell
from skyrl_tinker.store.futures.record import Accepted
from skyrl_tinker.store.store import Store
from skyrl_tinker.training.trainer_group import TrainerGroup, TrainerSpec
from tests.engine.support import journal
from tests.engine.support.world import World
from tests.support.waiting import end
from tests.training.support.naive import TENANTS, Pass, Trained, schedule
from tests.training.support.saves import published_weights

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
        for model in models:
            self.weights.setdefault(model, []).append(await published_weights(self, model))

    async def set_budget(self, tokens: int) -> None:
        """Change the launched group: starting processes for each budget takes most of a minute."""
        self.spec = replace(self.spec, token_budget=tokens)
        await self._on_all_ranks("__setattr__", "spec", self.spec)


@dataclass(frozen=True)
class Combination:
    tenants: int
    unit_tokens: int
    token_budget: int


Results = dict[int, Trained]  # by tenant


class Bench:
    """A store, and a trainer for each number of ranks that is asked for, on one event loop."""

    def __init__(self, home: Path, directory: str) -> None:
        """`directory`: of the base model."""
        self._home, self._directory = home, directory
        self._runner = asyncio.Runner()
        self._known: dict[tuple[int, Combination], Results] = {}
        url = f"sqlite:///{home / 'store.db'}"
        migrate(url)
        self._groups: dict[int, Watched] = {}
        self._store = self.run(self._open(url))

    async def _open(self, url: str) -> Store:
        return Store.open(url)

    async def _group(self, ranks: int) -> Watched:
        if ranks not in self._groups:
            self._groups[ranks] = self._launch(ranks)
            await self._groups[ranks].ready()
        return self._groups[ranks]

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
        group = await self._group(ranks)
        await group.set_budget(combination.token_budget)
        chosen = list(TENANTS)[: combination.tenants]
        models = {tenant: await self._create(tenant) for tenant in chosen}
        accepted = await self._submit(models)
        await self._work(group, combination.unit_tokens, list(chain(*accepted.values())))
        return {tenant: await self._result(group, models[tenant], accepted[tenant]) for tenant in chosen}

    async def _work(self, group: Watched, unit_tokens: int, wanted: Sequence[Accepted]) -> None:
        """Wait until all is answered."""
        bell = SocketBell.bind(self._home, "engine")
        world = World(self._store, bell, self._home / "checkpoints", group, unit_tokens)
        async with asyncio.timeout(200):
            for each in wanted:
                while (await journal.outcome(self._store, each)).status is FutureStatus.PENDING:
                    assert not world.running.done()
                    await asyncio.sleep(0.01)
        await end(world.running)
        bell.close()

    async def _create(self, tenant: int) -> ModelId:
        session = await journal.new_session(self._store)
        model = (await journal.submit_create(self._store, session, spec=TENANTS[tenant])).model_id
        assert model is not None
        return model

    async def _submit(self, models: dict[int, ModelId]) -> dict[int, list[Accepted]]:
        """Send in a random order of arrival."""
        arriving = [(tenant, at) for tenant in models for at in range(len(schedule(tenant)))]
        random.Random(len(models)).shuffle(arriving)
        accepted = {each: await self._ask(models[each[0]], *each) for each in arriving}
        return {tenant: [accepted[tenant, at] for at in range(len(schedule(tenant)))] for tenant in models}

    async def _ask(self, model: ModelId, tenant: int, at: int) -> Accepted:
        asked = schedule(tenant)[at]
        if isinstance(asked, AdamParams):
            return await journal.submit_step(self._store, model, at + 1, asked)
        kind = RequestKind.FORWARD_BACKWARD if asked.backward else RequestKind.FORWARD
        return await journal.submit(self._store, model, at + 1, kind, body(asked, model, at + 1))

    async def _result(self, group: Watched, model: ModelId, accepted: Sequence[Accepted]) -> Trained:
        key = await journal.key_of(self._store, model)
        await group.release(key)  # and no later engine brings it back
        await self._store.write(lambda conn: model_records.set_state(conn, key, ModelState.RELEASED, None))
        trained = Trained(weights=[*group.weights.pop(key)])
        for each in accepted:
            outcome = await journal.outcome(self._store, each)
            assert outcome.status is FutureStatus.DONE, outcome
            if outcome.kind is not RequestKind.OPTIM_STEP and outcome.body is not None:
                read(outcome.body, trained)
        return trained


def body(asked: Pass, model: ModelId, seq_id: int) -> bytes:
    """Stored form."""
    field = "forward_backward_input" if asked.backward else "forward_input"
    data = [_json(datum) for datum in asked.data]
    payload = {"model_id": model, "seq_id": seq_id, field: {"data": data, "loss_fn": asked.loss_fn}}
    return pass_requests.canonical(pass_requests.decode_forward_backward_json(payload))


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
