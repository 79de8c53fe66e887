"""Weights captured on one and two real trainer ranks reach one and two real replicas; who fails is lost."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import psutil
import pytest
import torch

from skyrl_tinker.domain.ids import ModelKey, RequestId
from skyrl_tinker.domain.values import AdamParams, BaseModelFacts, LoraSpec, StepItem
from skyrl_tinker.errors import SamplerError, TrainerError
from skyrl_tinker.inference.client.remote_client import RemoteInferenceClient
from skyrl_tinker.inference.servers.server_group import ServerGroup
from skyrl_tinker.inference.vllm.vllm_dialect import VllmControl
from skyrl_tinker.training.trainer_group import TrainerGroup
from skyrl_tinker.weight_sync.factory import make_transport
from skyrl_tinker.weight_sync.gloo import TIMEOUT, GlooReceiver, GlooSender
from skyrl_tinker.weight_sync.sync import PARTIAL, sync_weights
from skyrl_tinker.weight_sync.transport import Message, WeightSyncError, WeightTransport
from tests.inference.support.samplers import (
    Served,
    ask,
    prompt_of,
    reference,
    sample,
    spec_of,
    target_logprobs,
    write_model,
)
from tests.support.sampler_clients import vllm_client
from tests.training.support.passes import make_data, make_item
from tests.training.support.saves import publish_weights, read_weights
from tests.weight_sync.conftest import CHUNK_BYTES, launch_trainer

MODEL = ModelKey(1)
PROMPT = prompt_of(20)


@pytest.fixture(scope="module")
def facts(servers: dict[str, Served]) -> BaseModelFacts:
    return servers["tied"].facts


@pytest.fixture(scope="module")
def partner(facts: BaseModelFacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerGroup]:
    """A replica that the last test of this module kills."""
    group = ServerGroup.launch(spec_of(facts, tmp_path_factory.mktemp("logs")))
    asyncio.run(group.ready())
    yield group
    asyncio.run(group.shutdown())


@pytest.fixture(scope="module")
def both(servers: dict[str, Served], partner: ServerGroup) -> tuple[str, str]:
    """URLs of two replicas of one model."""
    return servers["tied"].group.urls[0], partner.urls[0]


@pytest.fixture
async def pair(both: tuple[str, str], facts: BaseModelFacts) -> AsyncIterator[tuple[str, str]]:
    """The same, which serve the base again after each test."""
    yield both
    await back_to_base(facts, *both)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same shape."""
    directory = tmp_path_factory.mktemp("models") / "other"
    write_model(directory, tied=True, seed=5)
    return directory


@pytest.fixture(scope="module")
def two_ranks(servers: dict[str, Served]) -> Iterator[TrainerGroup]:
    group = launch_trainer(servers["tied"].facts, 2)
    yield group
    asyncio.run(group.shutdown())


@pytest.fixture
def ranks(request: pytest.FixtureRequest, trainer: TrainerGroup) -> TrainerGroup:
    group: TrainerGroup = trainer if request.param == 1 else request.getfixturevalue("two_ranks")
    return group


def client_of(*urls: str) -> RemoteInferenceClient:
    return vllm_client(urls[0], urls)


async def capture(group: TrainerGroup, facts: BaseModelFacts, directory: Path) -> Path:
    """The weights after a real step; beside them a config, so that Hugging Face can load them too."""
    await group.create_model(MODEL, LoraSpec(0, 0))
    await train(group)
    await publish_weights(group, MODEL, directory)
    await group.release(MODEL)
    shutil.copy(Path(facts.directory) / "config.json", directory)
    return directory


async def train(group: TrainerGroup) -> None:
    await group.run_pass(group.prepare([make_item(MODEL, make_data((40, 30), 1))]))
    await group.optim_step([StepItem(RequestId("s"), MODEL, AdamParams(0.05))])


async def assert_served(version: str, directory: str | Path, *urls: str) -> None:
    """Check that each of these replicas serves the version, exactly."""
    for client in map(client_of, urls):
        assert await client.control.weight_version() == version
        (sequence,) = (await sample(client, "base", ask(PROMPT, max_tokens=32))).sequences
        expected = target_logprobs(reference(directory), PROMPT + sequence.tokens)[len(PROMPT) - 1 :]
        np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-4, rtol=0)
        await client.close()


async def back_to_base(facts: BaseModelFacts, *urls: str) -> None:
    client = client_of(*urls)
    transport = make_transport("shared_memory", NotNeeded(), 1 << 30)
    await sync_weights(client.control, transport, Path(facts.directory), "base")
    await client.close()


class NotNeeded:
    restarts = 0

    async def open_sender(self, factory: object) -> None:
        raise AssertionError("shared memory has no sender")

    async def sender_call(self, method: str, *args: object) -> list[object]:
        raise AssertionError("shared memory has no sender")

    async def root_call(self, method: str, *args: object) -> object:
        raise AssertionError("shared memory has no sender")


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2], indirect=True)
@pytest.mark.parametrize("name", ["shared_memory", "gloo"])
async def test_captured_weights_are_served_exactly(
    name: str,
    ranks: TrainerGroup,
    replicas: int,
    pair: tuple[str, str],
    facts: BaseModelFacts,
    tmp_path: Path,
) -> None:
    urls = pair[:replicas]
    transport = make_transport(name, ranks, CHUNK_BYTES)  # type: ignore[arg-type]
    directory = await capture(ranks, facts, tmp_path / "v1")
    client = client_of(*urls)
    await sync_weights(client.control, transport, directory, "v1")
    await assert_served("v1", directory, *urls)
    assert transport.members == urls
    await client.close()


@pytest.mark.parametrize("ranks", [1, 2], indirect=True)
async def test_weights_come_from_the_ranks_while_these_train_on_and_later_from_files(
    ranks: TrainerGroup, pair: tuple[str, str], facts: BaseModelFacts, tmp_path: Path
) -> None:
    transport, client, v1 = make_transport("gloo", ranks, CHUNK_BYTES), client_of(*pair), tmp_path / "v1"
    await ranks.create_model(MODEL, LoraSpec(0, 0))
    await train(ranks)
    captured = (await ranks.capture_weights({MODEL: False}))[MODEL]
    AfterATrainingStep.step_ended = asyncio.Event()
    training = asyncio.create_task(keep_training(ranks))
    synced = await sync_weights(sabotaged(AfterATrainingStep, *pair), transport, captured, "v1")
    training.cancel()
    await training
    await ranks.release(MODEL)
    await ranks.persist_state(captured, str(v1))
    await captured.drop()
    shutil.copy(Path(facts.directory) / "config.json", v1)
    tensors = read_weights(v1)
    assert synced.size == sum(array.nbytes for array in tensors.values())
    await assert_served("v1", v1, *pair)
    await sync_weights(client.control, transport, Path(facts.directory), "base")
    assert (await sync_weights(client.control, transport, v1, "v1")).size == synced.size
    await assert_served("v1", v1, *pair)
    await client.close()


async def keep_training(group: TrainerGroup) -> None:
    """Train until cancelled, and let the step that runs then end."""
    while True:
        try:
            await asyncio.shield(step := asyncio.ensure_future(train(group)))
        except asyncio.CancelledError:
            await step
            return
        AfterATrainingStep.step_ended.set()


class Sabotaged(VllmControl):
    """All replicas, of which the last is this one."""

    last: type[VllmControl]

    def replica(self, url: str) -> VllmControl:
        if url == self.server_urls[-1]:
            return self.last((url,), http=self.http)
        return super().replica(url)


def sabotaged(last: type[VllmControl], *urls: str) -> Sabotaged:
    control = Sabotaged(urls)
    control.last = last
    return control


class AfterATrainingStep(VllmControl):
    """Takes no chunk of weights before another step has ended."""

    step_ended: ClassVar[asyncio.Event]

    async def update_weights(self, info: Message) -> None:
        self.step_ended.clear()
        await self.step_ended.wait()
        await super().update_weights(info)


class Noted(VllmControl):
    """Notes when it joins and leaves groups."""

    notes: ClassVar[list[str]] = []

    async def init_weight_transfer_engine(self, info: Message) -> None:
        self.notes.append("joins")
        await super().init_weight_transfer_engine(info)

    async def shutdown_weight_transfer_engine(self) -> None:
        self.notes.append("leaves")
        await super().shutdown_weight_transfer_engine()


async def test_a_changed_set_of_replicas_leaves_the_former_group_and_meets_anew(
    trainer: TrainerGroup, pair: tuple[str, str], other: Path
) -> None:
    transport = make_transport("gloo", trainer, CHUNK_BYTES)
    for version, urls in (("v1", pair[:1]), ("v2", pair), ("v3", pair), ("v4", pair[1:])):
        control = sabotaged(Noted, *urls)
        await sync_weights(control, transport, other, version)
        await control.http.close()
        await assert_served(version, other, *urls)
    assert Noted.notes == ["leaves", "joins"] * 3


class OtherShapes(VllmControl):
    """Expects other tensors than those that come."""

    async def update_weights(self, info: Message) -> None:
        await super().update_weights({**info, "shapes": [[1] for _ in info.get("shapes", ())]})


async def test_no_replica_serves_an_update_that_another_refused(
    transport: WeightTransport, pair: tuple[str, str], facts: BaseModelFacts, other: Path
) -> None:
    control = sabotaged(OtherShapes, *pair)
    with pytest.raises(WeightSyncError, match=f"update failed: {pair[1]}: .* shape") as caught:
        await sync_weights(control, transport, other, "v1")
    assert caught.value.lost == ()
    await assert_served("base", facts.directory, *pair)
    await sync_weights(VllmControl(pair, control.http), transport, other, "v1")
    await assert_served("v1", other, *pair)
    await control.http.close()


class Forgetful(VllmControl):
    """Has forgotten the update when it is to finish."""

    async def finish_weight_update(self, version: str) -> None:
        with suppress(SamplerError):
            await self.update_weights({"discard": True})
        await super().finish_weight_update(version)


async def test_one_that_does_not_take_new_weights_which_others_serve_is_lost(
    transport: WeightTransport, pair: tuple[str, str], other: Path
) -> None:
    control = sabotaged(Forgetful, *pair)
    synced = await sync_weights(control, transport, other, "v1")
    assert list(synced.lost) == [pair[1]]
    assert "without a matching" in str(synced.lost[pair[1]])
    await assert_served("v1", other, pair[0])
    await control.resume()
    await control.http.close()


class Stubborn(VllmControl):
    """Never goes on."""

    async def resume(self) -> None:
        raise SamplerError("it does not go on")


async def test_one_that_does_not_go_on_after_an_update_is_lost_and_nothing_is_sent_twice(
    transport: WeightTransport, pair: tuple[str, str], other: Path
) -> None:
    control = sabotaged(Stubborn, *pair)
    synced = await sync_weights(control, transport, other, "v1")
    assert list(synced.lost) == [pair[1]]
    await control.resume()
    await assert_served("v1", other, *pair)
    await control.http.close()


class NoMember(VllmControl):
    """Refuses to join."""

    async def init_weight_transfer_engine(self, info: Message) -> None:
        raise SamplerError("no")


class NoReceiver(VllmControl):
    """Refuses an update."""

    async def update_weights(self, info: Message) -> None:
        raise SamplerError("no")


MEETINGS = pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"], ids=["file", "port"])
"""Members of one host meet at a file, those of several at a port of an address of the trainer's."""

DYING_SENDER = """
import sys
from skyrl_tinker.weight_sync.gloo import GlooSender
sender = GlooSender(0, sys.argv[1])
print(sender.prepare(), flush=True)
input()
"""


@MEETINGS
def test_who_comes_to_a_group_of_a_dead_trainer_gives_up_at_once(host: str) -> None:
    """A replica samples nothing meanwhile."""
    command = [sys.executable, "-c", DYING_SENDER, host]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        meeting = trainer.stdout.readline().strip()
        trainer.kill()
    began = time.monotonic()
    with pytest.raises(SamplerError, match="gave up the group"):
        GlooReceiver(meeting, rank=1, world=2)
    assert time.monotonic() - began < 30, "it waited for a member that is gone"
    shutil.rmtree(meeting, ignore_errors=True)


@MEETINGS
def test_who_comes_to_a_group_that_was_given_up_is_told_so(host: str) -> None:
    sender = GlooSender(0, host)
    meeting = sender.prepare()
    sender.leave()
    with pytest.raises(SamplerError, match="gave up the group"):
        GlooReceiver(meeting, rank=1, world=2)
    shutil.rmtree(meeting, ignore_errors=True)


@MEETINGS
def test_a_group_lets_nobody_in_once_all_have_met_and_goes_on(host: str) -> None:
    """gloo would listen on for ever, on ports that ask for no token."""
    sender, listening = GlooSender(0, host), set(_ports())
    meeting = sender.prepare()
    with ThreadPoolExecutor() as threads:
        joining = threads.submit(GlooReceiver, meeting, 1, 2)
        sender.meet(meeting, 2)
        receiver = joining.result()
        assert set(_ports()) <= listening
        receiving = threads.submit(
            receiver.receive, SimpleNamespace(names=["a"], dtypes=["uint8"], shapes=[[3]], sizes=[3])
        )
        sender.broadcast(torch.tensor([1, 2, 3], dtype=torch.uint8))
        assert receiving.result()["a"]().tolist() == [1, 2, 3]
    sender.leave()
    shutil.rmtree(meeting, ignore_errors=True)


def _ports() -> list[tuple[str, int]]:
    connections = psutil.Process().net_connections("tcp")
    return [(each.laddr.ip, each.laddr.port) for each in connections if each.status == psutil.CONN_LISTEN]


async def test_a_quick_refusal_is_not_waited_for_by_the_others(
    trainer: TrainerGroup, pair: tuple[str, str], other: Path
) -> None:
    transport = make_transport("gloo", trainer, CHUNK_BYTES)
    control, client = sabotaged(NoMember, *pair), client_of(*pair)
    with pytest.raises(WeightSyncError, match=f"init failed: {pair[1]}: no$") as caught:
        async with asyncio.timeout(TIMEOUT.total_seconds()):
            await sync_weights(control, transport, other, "v1")
    assert (caught.value.failed, caught.value.lost) == ((pair[1],), ())
    await sync_weights(client.control, transport, other, "v2")
    await assert_served("v2", other, *pair)
    await client.close()
    await control.http.close()


async def test_replicas_that_stand_still_for_an_update_that_fails_are_lost_and_nothing_is_waited_for(
    pair: tuple[str, str], other: Path
) -> None:
    """As with NCCL and CUDA IPC; here on a transport that is staged, but does not say so."""
    transport = make_transport("shared_memory", NotNeeded(), CHUNK_BYTES)
    transport.staged = False
    transport.send = asyncio.Event().wait  # type: ignore[method-assign, assignment]
    control = sabotaged(NoReceiver, *pair)
    async with asyncio.timeout(TIMEOUT.total_seconds() / 2):
        with pytest.raises(
            WeightSyncError, match=f"update failed: {pair[1]}: no; to be replaced: "
        ) as caught:
            await sync_weights(control, transport, other, "v1")
    assert caught.value.lost == pair
    assert await control.weight_version() == PARTIAL
    whole = VllmControl(pair, control.http)
    with pytest.raises(SamplerError, match="discarded"):
        await whole.update_weights({"discard": True})
    await whole.resume()
    await control.http.close()


def killing(transport: WeightTransport, at: int, *pids: int) -> WeightTransport:
    """The transport, under which these processes die when chunk `at` is about to be sent."""
    load = transport.load

    async def load_and_kill(index: int) -> Message:
        message = await load(index)
        if index == at:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        return message

    transport.load = load_and_kill  # type: ignore[method-assign]
    return transport


@pytest.mark.long
async def test_a_sender_killed_between_chunks_leaves_the_old_weights(
    two_ranks: TrainerGroup, pair: tuple[str, str], facts: BaseModelFacts, other: Path
) -> None:
    await two_ranks._ranks.ping()
    transport = killing(make_transport("gloo", two_ranks, CHUNK_BYTES), 3, two_ranks.pids()[0])
    client = client_of(*pair)
    with pytest.raises(WeightSyncError, match="update failed: rank 0 died") as caught:
        await sync_weights(client.control, transport, other, "v1")
    assert (caught.value.phase, caught.value.failed, caught.value.lost) == ("update", (), ())
    with pytest.raises(WeightSyncError, match="open failed: rank 0 died"):
        await sync_weights(client.control, transport, other, "v1")
    await client.close()
    await assert_served("base", facts.directory, *pair)
    await two_ranks.restart()


@pytest.mark.long
async def test_a_rank_killed_while_its_captured_weights_are_sent_leaves_the_old_weights(
    two_ranks: TrainerGroup, pair: tuple[str, str], facts: BaseModelFacts, tmp_path: Path
) -> None:
    directory = await capture(two_ranks, facts, tmp_path / "v1")
    await two_ranks.create_model(MODEL, LoraSpec(0, 0))
    captured = (await two_ranks.capture_weights({MODEL: False}))[MODEL]
    await two_ranks._ranks.ping()
    whole = make_transport("gloo", two_ranks, CHUNK_BYTES)
    transport = killing(whole, 3, two_ranks.pids()[1])
    client = client_of(*pair)
    with pytest.raises(WeightSyncError, match="update failed: rank 1 died") as caught:
        await sync_weights(client.control, transport, captured, "v2")
    assert (caught.value.phase, caught.value.failed, caught.value.lost) == ("update", (), ())
    await assert_served("base", facts.directory, *pair)
    with pytest.raises(WeightSyncError, match=r"open failed: .*died") as caught:
        await sync_weights(client.control, make_transport("gloo", two_ranks, CHUNK_BYTES), captured, "v2")
    assert isinstance(caught.value.__cause__, TrainerError)
    await captured.drop()
    while two_ranks.broken is None:
        await two_ranks.watch(10.0)
    await two_ranks.restart()
    two_ranks.note_work()
    await sync_weights(client.control, make_transport("gloo", two_ranks, CHUNK_BYTES), directory, "v1")
    await assert_served("v1", directory, *pair)
    await client.close()


@pytest.mark.long
async def test_a_trainer_that_was_restarted_meets_the_samplers_anew(
    two_ranks: TrainerGroup, pair: tuple[str, str], facts: BaseModelFacts, other: Path
) -> None:
    transport = make_transport("gloo", two_ranks, CHUNK_BYTES)
    client = client_of(*pair)
    await sync_weights(client.control, transport, other, "v1")
    await two_ranks._ranks.ping()
    os.kill(two_ranks.pids()[0], signal.SIGKILL)
    while two_ranks.broken is None:
        await two_ranks.watch(10.0)
    await two_ranks.restart()
    await sync_weights(client.control, transport, Path(facts.directory), "base")
    await client.close()
    await assert_served("base", facts.directory, *pair)


@pytest.mark.long
async def test_a_replica_killed_between_chunks_is_named_and_the_others_keep_the_old_weights(
    trainer: TrainerGroup, partner: ServerGroup, both: tuple[str, str], facts: BaseModelFacts, other: Path
) -> None:
    (pid,) = partner.pids()
    everything = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    transport = make_transport("gloo", trainer, CHUNK_BYTES)
    client = client_of(*both)
    with pytest.raises(WeightSyncError, match=f"update failed: {both[1]}") as caught:
        await sync_weights(client.control, killing(transport, 3, *everything), other, "v1")
    assert (caught.value.phase, caught.value.failed, caught.value.lost) == ("update", (both[1],), ())
    await assert_served("base", facts.directory, both[0])
    await client.close()

    left = client_of(both[0])
    await sync_weights(left.control, make_transport("gloo", trainer, CHUNK_BYTES), other, "v2")
    await left.close()
    await assert_served("v2", other, both[0])
    await back_to_base(facts, both[0])
