"""Number of full-parameter models: memory reserved for one is not given to the next."""

import re
from collections.abc import Callable

import pytest

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.errors import UserError
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.memory import allocator
from skyrl_tinker.training.memory.memory_budget import bytes_held
from skyrl_tinker.training.worker import Worker
from tests.training.conftest import MakeWorker
from tests.training.support.passes import make_data, make_item, run_one, step

FULL = LoraSpec(0, 0)
ADAMW, DIMUON = 16, 12  # bytes per parameter: weight, gradient and moments
Make = Callable[[float], tuple[Worker, int]]


@pytest.fixture
def with_room(untied_model: str, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A worker with room for the base and so many bytes for each of its parameters, and their number."""

    def make(bytes_per_parameter: float) -> tuple[Worker, int]:
        worker = make_worker(untied_model, 64)
        size = sum(parameter.numel() for parameter in worker._base.parameters())

        def free_bytes(_: Ranks) -> float:
            held = sum(bytes_held(model.tensors()) for model in worker._models.values())
            return bytes_per_parameter * size - held

        monkeypatch.setattr(allocator, "free_bytes", free_bytes)
        return worker, size

    return make


def test_as_many_as_fit_trained_or_not(with_room: Make) -> None:
    worker, _ = with_room(ADAMW + ADAMW + 0.5)
    for trained in (False, True):
        for key in (1, 2):
            if trained:
                run_one(worker, make_item(key, make_data((20, 30), key)))
                step(worker, key)
                run_one(worker, make_item(key, make_data((20, 30), key)))
            else:
                worker.create_model(ModelKey(key), FULL)
        with pytest.raises(UserError, match="reserved for full-parameter models"):
            worker.create_model(ModelKey(3), FULL)
    worker.release(ModelKey(1))
    worker.create_model(ModelKey(3), FULL)
    run_one(worker, make_item(3, make_data((20, 30), 3)))


def test_what_a_model_has_not_asked_for_yet_is_kept_for_it(with_room: Make) -> None:
    worker, size = with_room(30.0)
    worker.create_model(ModelKey(1), FULL)
    with pytest.raises(UserError) as refused:
        worker.create_model(ModelKey(2), FULL)
    found = [float(number) for number in re.findall(r"([\d.e-]+) GB", str(refused.value))]
    parameters = size / 1e9
    assert found == pytest.approx([16 * parameters, 26 * parameters, 12 * parameters], rel=0.01)
    assert f"{size:,} parameters with adamw" in str(refused.value)


def test_dimuon_needs_one_moment_less(with_room: Make) -> None:
    worker, _ = with_room(DIMUON + 0.5)
    with pytest.raises(UserError, match="with adamw needs"):
        worker.create_model(ModelKey(1), FULL, "adamw")
    worker.create_model(ModelKey(1), FULL, "dimuon")


def test_adapters_count_too(with_room: Make) -> None:
    worker, _ = with_room(ADAMW + 0.5)
    for key in range(2):
        worker.create_model(ModelKey(key), LoraSpec(64, 0))
    with pytest.raises(UserError, match="needs"):
        worker.create_model(ModelKey(9), FULL)
    for key in range(2):
        worker.release(ModelKey(key))
    worker.create_model(ModelKey(9), FULL)
