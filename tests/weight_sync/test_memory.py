"""Capturing weights holds one copy of a rank's share, writing them none more, sending them two chunks."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from skyrl_tinker.domain.ids import ModelKey
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.server.base_models.tiny_model import make_model
from skyrl_tinker.training.trainer_group import TrainerGroup, TrainerSpec
from skyrl_tinker.weight_sync.gloo import GlooSender

pytestmark = pytest.mark.long

MODEL = ModelKey(1)
MiB = 1 << 20
CHUNK = 8 * MiB
SLACK = 4 * MiB  # of the process itself: code that is run for the first time, stacks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 million parameters, 120 MB, of which no tensor takes more than 7."""
    directory = tmp_path_factory.mktemp("model")
    make_model(directory, hidden=384, layers=16, vocab=4096)
    return directory


@pytest.fixture(scope="module", params=[1, 2])
def group(request: pytest.FixtureRequest, ray_cluster: None, model: Path) -> Iterator[TrainerGroup]:
    spec = TrainerSpec(str(model), request.param, "cpu", "float32", 1, token_budget=64, timeout_s=60.0)
    group = TrainerGroup.launch(spec)
    asyncio.run(group.ready())
    yield group
    asyncio.run(group.shutdown())


def sizes(directory: Path) -> tuple[int, int]:
    """Bytes of all tensors, and of the largest."""
    each = [array.nbytes for array in load_file(directory / "model.safetensors").values()]
    return sum(each), max(each)


def watched_sender() -> Callable[[int], Any]:
    """Made here, so that it travels whole: the ranks cannot import tests."""

    class Watched(GlooSender):
        def begin(self) -> int:
            """Resident bytes, after the process gave back what it had kept; the peak starts anew."""
            from skyrl_tinker.training.memory.allocator import give_back

            give_back()
            Path("/proc/self/clear_refs").write_text("5")
            return self._status("VmRSS")

        def peak(self) -> int:
            return self._status("VmHWM")

        def _status(self, name: str) -> int:
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

    return Watched


async def growth(group: TrainerGroup, work: Callable[[], Any]) -> list[int]:
    """Return by rank how many bytes the resident memory grew at most while `work` ran."""
    before = await group.sender_call("begin")
    await work()
    return [peak - start for peak, start in zip(await group.sender_call("peak"), before, strict=True)]


async def test_capturing_holds_the_own_share_and_one_parameter_at_a_time(
    group: TrainerGroup, model: Path, tmp_path: Path
) -> None:
    await group.create_model(MODEL, LoraSpec(0, 0))
    await group.open_sender(watched_sender())
    captured = []

    async def capture() -> None:
        captured.append((await group.capture_weights({MODEL: False}))[MODEL])

    whole, _ = sizes(model)
    waste = whole / 2  # a few tensors, and what the heap wastes
    grown = await growth(group, capture)
    assert max(grown) < whole / group.spec.ranks + waste, [g / MiB for g in grown]
    grown = await growth(group, lambda: group.persist_state(captured[0], str(tmp_path / "v1")))
    assert max(grown) < 3 * SLACK, [g / MiB for g in grown]
    await captured[0].drop()
    await group.release(MODEL)


@pytest.mark.parametrize("captured", [False, True], ids=["files", "captured"])
async def test_sending_holds_two_chunks(group: TrainerGroup, model: Path, captured: bool) -> None:
    await group.open_sender(watched_sender())
    if captured:
        await group.create_model(MODEL, LoraSpec(0, 0))
        held = (await group.capture_weights({MODEL: False}))[MODEL]
    read = group.sender_call if captured else group.root_call

    async def load_all() -> None:
        if captured:
            (chunks, _), *_ = await held.open_in_senders(CHUNK)
        else:
            chunks, _ = await group.root_call("open", str(model), CHUNK)
        for index in range(len(chunks)):
            await read("load", index)
        await group.sender_call("close")

    grown = await growth(group, load_all)
    whole, largest = sizes(model)
    assert largest < CHUNK
    assert max(grown) < 2 * CHUNK + SLACK < whole / 4, [g / MiB for g in grown]
    if captured:
        await held.drop()
        await group.release(MODEL)
