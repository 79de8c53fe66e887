"""Real limits: the rank's process may not grow beyond what it is given, as far as its allocator can tell."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_tinker.domain.ids import ModelKey, RequestId
from skyrl_tinker.domain.values import AdamParams, Failure, LoraSpec, PassItem, PassOutput, StepItem
from skyrl_tinker.errors import ExhaustedError
from skyrl_tinker.training.shortage import is_out_of_memory
from skyrl_tinker.training.trainer_group import TrainerGroup
from skyrl_tinker.training.trainer_spec import TrainerSpec
from tests.training.conftest import MakeWorker
from tests.training.support.passes import make_data, make_item, run_pass
from tests.training.support.saves import published_weights

BUDGET = 16384
MIB = 1 << 20
ROOM = {1: 168 * MIB, 2: 145 * MIB, 3: 196 * MIB}
"""By model: three quarters of what a row of BUDGET tokens takes."""
ROOM_FOR_LESS = 60 * MIB
SPECS = {1: LoraSpec(8, 1), 2: LoraSpec(4, 2, train_mlp=False), 3: LoraSpec(0, 0)}
TWINS = {model: model + 10 for model in SPECS}  # made alike; they never meet a limit


def make_limit() -> type:
    """Made here, so that it travels whole: the ranks cannot import tests."""
    import ctypes
    import resource
    from pathlib import Path

    class Limit:
        def __init__(self, rank: int) -> None:
            """Undo memory.keep_freed: what a tensor gives back counts at once."""
            self.rank = rank
            for option in (-1, -2, -3):  # M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD
                ctypes.CDLL(None).mallopt(option, 0 if option == -2 else 1 << 16)

        def grow_at_most(self, size: int, rank: int) -> None:
            """Bytes from now on, where this is that rank."""
            if self.rank == rank:
                lines = Path("/proc/self/status").read_text().splitlines()
                used = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
                self._set(used + size)

        def lift(self) -> None:
            self._set(resource.RLIM_INFINITY)

        def _set(self, soft: int) -> None:
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    return Limit


@contextmanager
def _launched(directory: str, ranks: int) -> Iterator[TrainerGroup]:
    group = TrainerGroup.launch(TrainerSpec(directory, ranks, "cpu", "float32", 1, BUDGET, timeout_s=60.0))
    asyncio.run(group.ready())
    asyncio.run(group.open_sender(make_limit()))
    yield group
    asyncio.run(group.shutdown())


@pytest.fixture(scope="module")
def whole_group(ray_cluster: None, untied_model: str) -> Iterator[TrainerGroup]:
    with _launched(untied_model, 1) as group:
        yield group


@pytest.fixture(scope="module")
def two(ray_cluster: None, untied_model: str) -> Iterator[TrainerGroup]:
    with _launched(untied_model, 2) as group:
        yield group


@pytest.fixture
async def group(whole_group: TrainerGroup) -> AsyncIterator[TrainerGroup]:
    for model, spec in SPECS.items():
        for key in (model, TWINS[model]):
            await whole_group.create_model(ModelKey(key), spec)
    yield whole_group
    for key in (*SPECS, *TWINS.values()):
        await whole_group.release(ModelKey(key))


@asynccontextmanager
async def _room(group: TrainerGroup, size: int) -> AsyncIterator[None]:
    """Only the last rank's process is limited."""
    await group.sender_call("grow_at_most", size, group.spec.ranks - 1)
    try:
        yield
    finally:
        await group.sender_call("lift")


async def _run(group: TrainerGroup, *items: PassItem) -> list[PassOutput | Failure]:
    return (await group.run_pass(group.prepare(items))).outputs


def _share(group: TrainerGroup, model: int, tokens: int, seed: int = 1) -> PassItem:
    """So many tokens on each rank."""
    return make_item(model, make_data((512,) * (tokens // 512 * group.spec.ranks), seed))


async def _trained(group: TrainerGroup, model: int) -> dict[str, np.ndarray]:
    """The weights after a step."""
    (output,) = await group.optim_step([StepItem(RequestId("s"), ModelKey(model), AdamParams(1e-2))])
    assert output.error is None
    return await published_weights(group, model)


async def _squeezed(group: TrainerGroup, model: int) -> PassOutput | Failure:
    """Shrink memory until whole rows do not fit: the memory that a process already has differs."""
    prepared = group.prepare([_share(group, model, BUDGET)])
    for tenths in range(10, 5, -1):
        before = group.exhausted_passes
        async with _room(group, ROOM[model] * tenths // 10):
            if not (await group.run_pass(prepared)).exhausted:
                await group.zero_gradients([ModelKey(model)])
                continue
            result = await group.run_pass(prepared, BUDGET // 2)
        assert group.exhausted_passes == before + 1
        return result.outputs[0]
    raise AssertionError("whole rows fitted into the least room")


@pytest.mark.long
@pytest.mark.parametrize("model", SPECS)
async def test_half_the_rows_do_what_whole_ones_could_not(
    group: TrainerGroup, tmp_path: Path, model: int
) -> None:
    output = await _squeezed(group, model)
    assert isinstance(output, PassOutput), output
    (expected,) = await _run(group, _share(group, TWINS[model], BUDGET))
    assert isinstance(expected, PassOutput)
    assert output.metrics == pytest.approx(expected.metrics, rel=1e-5)
    for found, other in zip(output.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(found, other, atol=1e-5, rtol=0)
    weights, others = [await _trained(group, key) for key in (model, TWINS[model])]
    for name, array in weights.items():
        np.testing.assert_allclose(array, others[name], atol=1e-5, rtol=0, err_msg=name)


@pytest.mark.long
async def test_a_pass_too_large_fails_alone_and_says_what_to_do(group: TrainerGroup, tmp_path: Path) -> None:
    """Everyone's earlier gradients are there to the last bit, and training goes on."""
    earlier = {model: make_data((40, 30), model) for model in SPECS}
    for model, data in earlier.items():
        for key in (model, TWINS[model]):
            await _run(group, make_item(key, data))
    async with _room(group, ROOM_FOR_LESS):
        result = await group.run_pass(group.prepare([_share(group, model, BUDGET) for model in SPECS]))
    assert result.exhausted
    outputs = result.outputs
    tokens = BUDGET * len(SPECS) * group.spec.ranks
    for output in outputs:
        assert isinstance(output, Failure), output
        assert output.category == "server"
        assert output.message.startswith(
            f"{tokens} tokens in {tokens // 512} datums did not fit into the trainer's memory in "
            "rows of 16384 tokens (token_budget is 16384); the longest datum has 512 tokens. Send shorter"
        )
    for model, data in earlier.items():
        for key in (model, TWINS[model]):
            (output,) = await _run(group, make_item(key, data[::-1]))
            assert isinstance(output, PassOutput)
        weights, others = [await _trained(group, key) for key in (model, TWINS[model])]
        assert weights.keys() == others.keys()
        for name, array in weights.items():
            np.testing.assert_array_equal(array, others[name], err_msg=name)


@pytest.mark.long
async def test_of_several_ranks_all_refuse_it_and_run_it_in_smaller_rows(two: TrainerGroup) -> None:
    await two.create_model(ModelKey(1), SPECS[1])
    prepared = two.prepare([_share(two, 1, BUDGET)])
    async with _room(two, ROOM_FOR_LESS):
        result = await two.run_pass(prepared)
    assert result.exhausted
    assert all(isinstance(output, Failure) for output in result.outputs)
    result = await two.run_pass(prepared, BUDGET // 2)
    assert isinstance(result.outputs[0], PassOutput)
    assert result.row_budget == BUDGET // 2
    assert two.restarts == 0


@pytest.mark.long
async def test_a_rank_without_memory_for_a_model_or_its_moments_costs_that_request_only(
    two: TrainerGroup,
) -> None:
    """The gradients of the refused step are those of the next one."""
    spec, keys = LoraSpec(2048, 7), (ModelKey(7), ModelKey(8))  # 25 MB each of weights, gradients, moments
    async with _room(two, 16 * MIB):
        with pytest.raises(ExhaustedError, match=r"^create_model: a trainer rank ran out of memory"):
            await two.create_model(keys[0], spec)
    for key in keys:
        await two.create_model(key, spec)
    await _run(two, *(make_item(key, make_data((20, 9, 30), 1)) for key in keys))
    steps = [StepItem(RequestId("s"), key, AdamParams(1e-2)) for key in keys]
    async with _room(two, 16 * MIB):
        outputs = await two.optim_step(steps[:1])
    outputs += await two.optim_step(steps)
    assert [output.exhausted for output in outputs] == [True, False, False]
    assert str(outputs[0].error).startswith("optim_step: a trainer rank ran out of memory")
    weights, others = [await published_weights(two, key) for key in keys]
    for name, array in weights.items():
        np.testing.assert_array_equal(array, others[name], err_msg=name)
    assert two.restarts == 0


def test_the_allocators_reports_are_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)
    with pytest.raises(MemoryError) as python:
        bytearray(1 << 60)
    assert is_out_of_memory(python.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"))  # pinned
    for other in (RuntimeError("Connection closed by peer"), ValueError("can't allocate memory")):
        assert not is_out_of_memory(other)


def test_what_is_no_lack_of_memory_is_raised_as_it_is(make_worker: MakeWorker, untied_model: str) -> None:
    worker = make_worker(untied_model)
    worker.create_model(ModelKey(1), SPECS[1])
    item: Any = make_item(1, make_data((8,), 1))
    item.data[0].tokens[0] = 100_000  # no such row in the embedding
    with pytest.raises(IndexError):
        run_pass(worker, item)
