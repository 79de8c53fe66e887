"""A process that is gone leaves its models behind: every unit is done as a whole, or not at all."""

import random
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_tinker.domain.ids import ModelKey, RequestId
from skyrl_tinker.domain.values import (
    AdamParams,
    DimuonParams,
    Failure,
    LoraSpec,
    OptimizerFamily,
    PassItem,
    PassOutput,
    StepItem,
    StepOutput,
)
from skyrl_tinker.training.actors import RankProcess
from skyrl_tinker.training.batching.batch import build_batch
from skyrl_tinker.training.batching.outputs import assemble
from skyrl_tinker.training.distributed import Ranks
from skyrl_tinker.training.models.trainable_model import Part
from skyrl_tinker.training.state_ledger import StateLedger
from skyrl_tinker.training.trainer_spec import TrainerSpec
from tests.training.support.passes import make_data, make_item
from tests.training.support.saves import save

FULL = 7
TENANTS = range(8)
PARAMS = {"adamw": AdamParams(1e-2, grad_clip_norm=0.5), "dimuon": DimuonParams(1e-2)}


def _family(tenant: int) -> OptimizerFamily:
    return "dimuon" if tenant % 3 == 0 else "adamw"


def _lora(tenant: int) -> LoraSpec:
    return LoraSpec(0 if tenant == FULL else (2, 4, 8)[tenant % 3], tenant)


@dataclass
class Lives:
    """One process after the other, of which each goes on with the files of those before."""

    spec: TrainerSpec
    ranks: Ranks
    ledger: StateLedger = field(default_factory=StateLedger)
    lost: set[ModelKey] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.process = RankProcess(self.spec, 0)
        self.worker.attach(self.ranks)
        self.lost |= self.ledger.drop_lost()
        self.process.call("restore", self.ledger.shares)

    @property
    def worker(self) -> Any:
        return self.process._worker

    def run(self, method: str, *args: Any, dies: bool = False) -> Any:
        """A unit of work; `dies`: the first process does, when it has done all of it but said nothing."""
        if dies:
            self.process.call(method, *args)
            self.begin()
        answer = self.process.call(method, *args)
        self.ledger.record([answer.changes])
        return answer.value


@pytest.fixture
def spec(untied_model: str, tmp_path: Path) -> TrainerSpec:
    (tmp_path / "state").mkdir()
    return TrainerSpec(
        untied_model, 1, "cpu", "float32", 1, 128, resident_models=3, state_dir=str(tmp_path / "state")
    )


@pytest.fixture
def lives(spec: TrainerSpec, ranks: Ranks) -> Lives:
    return Lives(spec, ranks)


def _create(lives: Lives, tenants: Iterable[int], *, dies: bool = False) -> None:
    for tenant in tenants:
        lives.run("create_model", ModelKey(tenant), _lora(tenant), _family(tenant), dies=dies)


def _pass(lives: Lives, *items: PassItem, dies: bool = False) -> list[PassOutput | Failure]:
    batch = build_batch(items)
    return assemble(batch, [lives.run("run_pass", batch, dies=dies)])


def _step(lives: Lives, tenants: Iterable[int], *, dies: bool = False) -> list[StepOutput]:
    items = [StepItem(RequestId("s"), ModelKey(each), PARAMS[_family(each)]) for each in tenants]
    outputs: list[StepOutput] = lives.run("optim_step", items, dies=dies)
    return outputs


def _state(lives: Lives, tenant: int) -> dict[str, Any]:
    model = lives.worker._model_to_read(ModelKey(tenant))
    parts = [part for part in model.parts if model.has_values(part)]
    tensors = {part: [tensor.clone() for tensor in model.local(part)] for part in parts}
    return {"step": model.step, **tensors}


def _assert_same_state(lives: Lives, other: Lives, tenant: int) -> None:
    found, expected = _state(lives, tenant), _state(other, tenant)
    assert found.keys() == expected.keys()
    assert found.pop("step") == expected.pop("step")
    for part, tensors in expected.items():
        for one, two in zip(found[part], tensors, strict=True):
            assert torch.equal(one, two), part


def _assert_same(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, PassOutput):
            assert one.metrics == other.metrics
            assert all((a == b).all() for a, b in zip(one.logprobs, other.logprobs, strict=True))
        else:
            assert one == other


class Schedule:
    """Do something that a server may ask for, repeatedly; the same for the same seed."""

    def __init__(self, lives: Lives, checkpoint: Path, seed: int) -> None:
        self.lives = lives
        self.checkpoint = str(checkpoint)
        self.choice = random.Random(seed)
        self.alive = set(TENANTS)

    def act(self, *, dies: bool) -> list[Any]:
        choice = self.choice
        some = choice.sample(sorted(self.alive), min(len(self.alive), choice.randint(1, 3)))
        seed = choice.randrange(1000)
        match choice.choice(["pass", "pass", "pass", "step", "step", "zero", "load", "release"]):
            case "pass":
                items = [self._item(each, seed + each, choice.random()) for each in some]
                return list(_pass(self.lives, *items, dies=dies))
            case "step":
                return list(_step(self.lives, some, dies=dies))
            case "zero":
                self.lives.run("zero_gradients", [ModelKey(each) for each in some], dies=dies)
            case "load":
                self.lives.run("load_state", ModelKey(1), self.checkpoint, bool(seed % 2), dies=dies)
            case "release" if seed % 2:
                self._replace(choice.choice(sorted(self.alive - {1})), dies=dies)
        return []

    def _item(self, tenant: int, seed: int, chance: float) -> PassItem:
        data = make_data((5, 9), seed, "importance_sampling")
        if chance < 0.1:
            data[1].inputs["logprobs"][:] = -1e5  # not finite: the request fails, and leaves nothing
        return make_item(tenant, data, "importance_sampling", backward=chance < 0.8)

    def _replace(self, tenant: int, *, dies: bool) -> None:
        self.lives.run("release", ModelKey(tenant), dies=dies)
        _create(self.lives, [tenant], dies=dies)


@pytest.mark.parametrize("seed", range(4))
def test_whoever_dies_before_the_answer_has_done_nothing_and_his_successor_all_of_it(
    untied_model: str, spec: TrainerSpec, ranks: Ranks, tmp_path: Path, seed: int
) -> None:
    """Compare with a trainer that never died: all results, and all of every model, to the last bit."""
    plain = TrainerSpec(untied_model, 1, "cpu", "float32", 1, 128)
    both = [Lives(spec, ranks), Lives(plain, ranks)]
    for lives in both:
        _create(lives, TENANTS, dies=lives is both[0])
        _pass(lives, make_item(1, make_data((5,), 1)))
        _step(lives, [1])
    save(both[1].worker, 1, tmp_path / "checkpoint")
    deaths = random.Random(seed)
    schedules = [Schedule(lives, tmp_path / "checkpoint", seed) for lives in both]
    for _ in range(25):
        dies = deaths.random() < 0.4
        found, expected = schedules[0].act(dies=dies), schedules[1].act(dies=False)
        _assert_same(found, expected)
    for tenant in TENANTS:
        _assert_same_state(*both, tenant)


def test_a_unit_that_raises_is_not_kept(lives: Lives, untied_model: str) -> None:
    _create(lives, [1, 2])
    _pass(lives, make_item(1, make_data((20,), 1)))
    before = _state(lives, 1)
    (wrong,) = make_data((600,), 2)
    wrong.tokens[300] = 10**6  # no such row of the embedding
    with pytest.raises(IndexError):
        _pass(lives, make_item(1, make_data((20,), 3)), make_item(2, (wrong,)))
    lives.begin()
    assert torch.equal(_state(lives, 1)[Part.GRADIENT][0], before[Part.GRADIENT][0])
    assert Part.GRADIENT not in _state(lives, 2)


def test_files_are_as_many_as_are_needed_and_are_written_again(lives: Lives, spec: TrainerSpec) -> None:
    directory = Path(str(spec.state_dir))
    _create(lives, [1, 2])
    assert not list(directory.iterdir())  # nobody has trained
    for seed in range(3):
        _pass(lives, make_item(1, make_data((5,), seed)))
        _step(lives, [1])
    names = {path.name for path in directory.iterdir()}
    for seed in range(5):
        _pass(lives, make_item(1, make_data((5,), seed)))
        _step(lives, [1])
    assert {path.name for path in directory.iterdir()} == names
    lives.begin()
    assert len(list(directory.iterdir())) == 3  # weights and two moments
    lives.run("release", ModelKey(1))
    lives.begin()
    assert not list(directory.iterdir())


@contextmanager
def _largest_file(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_who_cannot_be_kept_trains_on_and_is_lost_alone(
    lives: Lives, caplog: pytest.LogCaptureFixture
) -> None:
    _create(lives, [1, 2, 5])
    with _largest_file(1 << 12):
        for seed in range(2):
            outputs = _pass(lives, *(make_item(each, make_data((5,), seed)) for each in (1, 2)))
            assert all(isinstance(output, PassOutput) for output in outputs)
    assert caplog.text.count("model 1 would be lost if this process died: no room to keep it") == 1
    _pass(lives, make_item(2, make_data((5,), 2)))  # there is room again, also for what had none
    before = _state(lives, 2)
    lives.begin()
    assert lives.lost == {1}
    assert set(lives.worker._models) == {2, 5}
    assert torch.equal(_state(lives, 2)[Part.GRADIENT][0], before[Part.GRADIENT][0])
