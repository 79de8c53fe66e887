"""What the requests of a pass refer to is found, and whoever refers in vain fails alone. Workers are real."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from sqlalchemy import select

from skyrl_tinker.domain.ids import ModelId, ModelKey, SessionId
from skyrl_tinker.domain.values import Failure, LoraSpec, PassItem, PassOutput, ProvenanceSpan
from skyrl_tinker.engine.scheduling.planner import Pass
from skyrl_tinker.engine.trainer.pass_preparation import PassCoordinator, ReadyPass
from skyrl_tinker.server.base_models.tiny_model import make_model
from skyrl_tinker.store.database.tables import StabilityRecord
from skyrl_tinker.store.futures.finish import FutureResult
from skyrl_tinker.store.futures.queue import QueuedRow
from skyrl_tinker.store.stability_records import RoutingRecord, SequenceRecord
from skyrl_tinker.store.store import Store
from skyrl_tinker.training.trainer_group import PassResult, PreparedPass, TrainerGroup, TrainerSpec
from tests.engine.support import journal, recorded
from tests.engine.support.recorded import Example
from tests.training.losses.support.uploads import upload

SAMPLED = (10, 11, 12, 13)
PROMPT = (1, 2, 3)


@pytest.fixture(scope="module")
def group(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerGroup]:
    directory = tmp_path_factory.mktemp("model")
    make_model(directory, hidden=64)
    launched = TrainerGroup.launch(TrainerSpec(str(directory), 1, "cpu", "float32", 1, token_budget=64))
    asyncio.run(launched.ready())
    yield launched
    asyncio.run(launched.shutdown())


@dataclass(frozen=True)
class World:
    """A session and its model, which the workers have too."""

    store: Store
    group: TrainerGroup
    session: SessionId
    model: ModelId
    key: ModelKey
    router_replay: bool = False

    @classmethod
    async def make(cls, store: Store, group: TrainerGroup) -> "World":
        session = await journal.new_session(store)
        accepted = await journal.submit_create(store, session)
        assert accepted.model_id is not None
        key = await journal.key_of(store, accepted.model_id)
        await group.create_model(key, LoraSpec(4, 1))
        return cls(store, group, session, accepted.model_id, key)

    async def row(self, seq_id: int, *data: Example, loss_fn: str = "stable_reinforce") -> QueuedRow:
        body = recorded.request(self.model, seq_id, loss_fn, *data)
        return await recorded.row_of(self.store, self.model, seq_id, body)

    @property
    def coordinator(self) -> PassCoordinator:
        return PassCoordinator(self.store, self.group, router_replay=self.router_replay)

    async def prepare(self, *rows: QueuedRow) -> ReadyPass:
        return await self.coordinator.prepare(Pass(rows, full=False))

    async def run(self, *rows: QueuedRow) -> list[PassOutput | Failure]:
        return (await self.coordinator.execute(await self.prepare(*rows))).outputs

    async def refusal(self, *spans: ProvenanceSpan, tokens: Sequence[int] = (*PROMPT, *SAMPLED)) -> Failure:
        """Of a datum with these spans, which follows one without a fault in the same request."""
        fine = await recorded.sampled(self.store, self.session, SAMPLED, len(PROMPT), number=99)
        row = await self.row(1, turn(fine.sequence_id), Example(tuple(tokens), spans))
        (failure,) = await self.run(row)
        assert isinstance(failure, Failure)
        return failure


@pytest.fixture
async def world(store: Store, group: TrainerGroup) -> AsyncIterator[World]:
    made = await World.make(store, group)
    yield made
    await group.release(made.key)


@pytest.fixture
async def neighbour(store: Store, group: TrainerGroup, world: World) -> AsyncIterator[World]:
    made = await World.make(store, group)
    yield made
    await group.release(made.key)


def turn(sequence_id: str, *, inputs: bool = False) -> Example:
    """PROMPT and what was sampled for it; `inputs`: with spans of these, too."""
    of_inputs = prompt(sequence_id, 0, 3), sample(sequence_id, 0, 3)
    of_targets = prompt(sequence_id, 1, 2), sample(sequence_id, 0, 4)
    return Example((*PROMPT, *SAMPLED), of_targets, input_spans=of_inputs if inputs else ())


def prompt(sequence_id: str, offset: int, length: int) -> ProvenanceSpan:
    return ProvenanceSpan(sequence_id, offset, length, sampled=False)


def sample(sequence_id: str, offset: int, length: int) -> ProvenanceSpan:
    return ProvenanceSpan(sequence_id, offset, length, sampled=True)


def batch_of(ready: ReadyPass) -> PreparedPass:
    assert ready.batch is not None
    return ready.batch


async def test_sampled_tokens_carry_what_was_recorded_and_prompts_nothing(world: World) -> None:
    """Two turns in one datum: prompt, sampled, more prompt, the second part of what was sampled next."""
    first = await recorded.sampled(world.store, world.session, SAMPLED, 3, number=1)
    second = await recorded.sampled(world.store, world.session, (20, 21, 22), 9, number=2)
    spans = (
        prompt(first.sequence_id, 1, 2),
        sample(first.sequence_id, 0, 4),
        prompt(second.sequence_id, 7, 2),
        sample(second.sequence_id, 1, 2),
    )
    row = await world.row(1, Example((*PROMPT, *SAMPLED, 5, 6, 21, 22), spans))
    batch = batch_of(await world.prepare(row)).batch
    expected = [0, 0, *first.logprobs, 0, 0, *second.logprobs[1:]]
    np.testing.assert_array_equal(batch.inputs["sampling_logprobs"], np.array(expected, np.float32))
    np.testing.assert_array_equal(batch.inputs["sampled"], [0, 0, 1, 1, 1, 1, 0, 0, 1, 1])
    assert batch.requests[0].seq_id == 1
    (output,) = await world.run(row)
    assert isinstance(output, PassOutput)


UNKNOWN = "which is unknown, expected one that was sampled in the session of this model"


async def _unknown(world: World, _: World) -> str:
    return "no-such-sequence"


async def _foreign(_: World, other: World) -> str:
    return (await recorded.sampled(other.store, other.session, SAMPLED, 3)).sequence_id


async def _foreign_pending(_: World, other: World) -> str:
    return (await recorded.submit_sample(other.store, other.session)).sequence_ids[0]


async def _pending(world: World, _: World) -> str:
    return (await recorded.submit_sample(world.store, world.session)).sequence_ids[0]


async def _failed(world: World, _: World) -> str:
    accepted = await recorded.submit_sample(world.store, world.session)
    return await recorded.finish_sample(world.store, accepted, Failure("no", "server"))


async def _unrecorded(world: World, _: World) -> str:
    accepted = await recorded.submit_sample(world.store, world.session)
    return await recorded.finish_sample(world.store, accepted, FutureResult("application/json", b"{}"))


@pytest.mark.parametrize(
    ("named", "why"),
    [
        (_unknown, UNKNOWN),
        (_foreign, UNKNOWN),
        (_foreign_pending, UNKNOWN),
        (_pending, "which is not sampled yet, expected one whose sample is done"),
        (_failed, "whose sample failed, expected one that was sampled"),
        (_unrecorded, "which has no record, expected one that was sampled with record_stability_info and"),
    ],
)
@pytest.mark.parametrize("of", [prompt, sample])
async def test_a_span_of_a_sequence_without_a_record_is_refused_by_name(
    world: World,
    neighbour: World,
    named: Callable[[World, World], Awaitable[str]],
    why: str,
    of: Callable[[str, int, int], ProvenanceSpan],
) -> None:
    good = await recorded.sampled(world.store, world.session, SAMPLED, 3, number=7)
    sequence_id = await named(world, neighbour)
    failure = await world.refusal(
        prompt(good.sequence_id, 1, 2), of(sequence_id, 0, 1), sample(good.sequence_id, 1, 3)
    )
    assert failure.category == "user"
    expected = f"datum 1: loss_fn_input_spans[1] names sequence {sequence_id!r}, {why}"
    assert failure.message.startswith(expected)


async def test_spans_beyond_their_sequence_are_refused_with_its_length(world: World) -> None:
    good = (await recorded.sampled(world.store, world.session, SAMPLED, 3)).sequence_id
    beyond_sampled = await world.refusal(prompt(good, 1, 2), sample(good, 1, 4))
    assert beyond_sampled.message == (
        f"datum 1: loss_fn_input_spans[1] covers tokens [1, 5) of what was sampled as sequence {good!r}, "
        "expected at most its 4 tokens"
    )


async def test_spans_beyond_a_prompt_are_refused_with_its_length(world: World) -> None:
    good = (await recorded.sampled(world.store, world.session, SAMPLED, 3)).sequence_id
    failure = await world.refusal(prompt(good, 2, 2), sample(good, 0, 4))
    assert failure.category == "user"
    assert failure.message == (
        f"datum 1: loss_fn_input_spans[0] covers tokens [2, 4) of the prompt of sequence {good!r}, "
        "expected at most its 3 tokens"
    )


async def test_the_first_target_that_was_not_sampled_is_named(world: World) -> None:
    good = (await recorded.sampled(world.store, world.session, SAMPLED, 3)).sequence_id
    spans = prompt(good, 1, 2), sample(good, 0, 1), sample(good, 1, 3)
    failure = await world.refusal(*spans, tokens=(*PROMPT, 10, 11, 99, 98))
    assert failure.category == "user"
    assert failure.message == (
        f"datum 1: loss_fn_input_spans[2]: target_tokens[4] is 99, expected 12, "
        f"which was sampled as token 2 of sequence {good!r}"
    )


async def test_an_advantage_on_a_prompt_is_refused(world: World) -> None:
    good = turn((await recorded.sampled(world.store, world.session, SAMPLED, 3)).sequence_id)
    (failure,) = await world.run(await world.row(1, good, replace(good, loud=True)))
    assert isinstance(failure, Failure)
    assert failure.message == (
        "datum 1: loss_fn_input_spans[0] is of a prompt: advantages[0] is 1.0, expected 0"
    )


async def test_a_long_name_is_cut_in_the_message(world: World) -> None:
    failure = await world.refusal(prompt("x" * 5000, 1, 2), sample("x", 0, 4))
    assert failure.message.startswith("datum 1: loss_fn_input_spans[0] names sequence 'xxx")
    assert len(failure.message) < 400


async def test_who_refers_in_vain_fails_alone(world: World, neighbour: World) -> None:
    """His own other requests and his neighbour's run, in order."""
    good = (await recorded.sampled(world.store, world.session, SAMPLED, 3)).sequence_id
    theirs = (await recorded.sampled(neighbour.store, neighbour.session, SAMPLED, 3)).sequence_id
    rows = [
        await world.row(1, turn(theirs)),
        await neighbour.row(1, turn(theirs)),
        await world.row(2, turn(good)),
    ]
    refused, other, own = await world.run(*rows)
    assert isinstance(refused, Failure)
    assert [output.request_id for output in (other, own) if isinstance(output, PassOutput)] == [
        row.request_id for row in rows[1:]
    ]


async def test_a_body_that_cannot_be_read_fails_alone(world: World, neighbour: World) -> None:
    good = (await recorded.sampled(neighbour.store, neighbour.session, SAMPLED, 3)).sequence_id
    unreadable = await recorded.row_of(world.store, world.model, 1, b"\xff\xff")
    failure, fine = await world.run(unreadable, await neighbour.row(1, turn(good)))
    assert isinstance(failure, Failure)
    assert failure.category == "server"
    assert isinstance(fine, PassOutput)


class Choosy(TrainerGroup):
    """Cannot make a batch that has certain requests in it."""

    def __init__(self, group: TrainerGroup, unfit: set[str]) -> None:
        self._group = group
        self._unfit = unfit

    def prepare(self, items: Sequence[PassItem]) -> PreparedPass:
        if any(item.request_id in self._unfit for item in items):
            raise MemoryError("too large")
        return self._group.prepare(items)

    async def run_pass(self, prepared: PreparedPass, row_budget: int | None = None) -> PassResult:
        return await self._group.run_pass(prepared, row_budget)


async def test_what_does_not_fit_into_a_batch_is_found_and_the_others_run(
    world: World, neighbour: World
) -> None:
    good = (await recorded.sampled(world.store, world.session, SAMPLED, 3)).sequence_id
    theirs = (await recorded.sampled(neighbour.store, neighbour.session, SAMPLED, 3)).sequence_id
    rows = (
        await world.row(1, turn(good)),
        await neighbour.row(1, turn(theirs)),
        await world.row(2, turn(good)),
    )
    runner = PassCoordinator(world.store, Choosy(world.group, {rows[0].request_id}))
    failure, *fine = (await runner.execute(await runner.prepare(Pass(rows, full=False)))).outputs
    assert failure == Failure("MemoryError: too large", "server")
    assert [type(output) for output in fine] == [PassOutput, PassOutput]


async def test_a_pass_without_a_row_that_can_run_runs_nothing(world: World) -> None:
    ready = await world.prepare(await world.row(1, turn("nobody")), await world.row(2, turn("nobody")))
    assert ready.batch is None
    worked = world.group.busy_s
    outputs = (await world.coordinator.execute(ready)).outputs
    assert [type(output) for output in outputs] == [Failure, Failure]
    assert world.group.busy_s == worked


async def _last_used(store: Store, sequence_id: str) -> float:
    query = select(StabilityRecord.last_used_at).where(StabilityRecord.sequence_id == sequence_id)
    return await store.read(lambda conn: float(conn.scalar(query)))


async def test_only_records_that_trained_are_renewed(world: World) -> None:
    used = (await recorded.sampled(world.store, world.session, SAMPLED, 3)).sequence_id
    unused = (await recorded.sampled(world.store, world.session, SAMPLED, 3, number=1)).sequence_id
    before = [await _last_used(world.store, name) for name in (used, unused)]
    ready = await world.prepare(await world.row(1, turn(used)), await world.row(2, turn(unused), turn("?")))
    await world.coordinator.renew_records(ready)
    after = [await _last_used(world.store, name) for name in (used, unused)]
    assert after[0] > before[0]
    assert after[1] == before[1]


# Router replay. The model of these tests has no experts: it computes without them.


@pytest.fixture
def replaying(world: World) -> World:
    return replace(world, router_replay=True)


async def routed(
    world: World, tokens: tuple[int, ...], given: tuple[int, ...], number: int
) -> SequenceRecord:
    """Experts of 3 layers, 2 each; those of token i are all i + 100 * number."""
    numbers = np.arange(len(given) + len(tokens) - 1, dtype=np.int16) + 100 * number
    experts = np.broadcast_to(numbers[:, None, None], (len(numbers), 3, 2))
    routing = RoutingRecord(np.array(given, np.int32), experts)
    return await recorded.sampled(
        world.store, world.session, tokens, len(given), number=number, routing=routing
    )


async def replay_row(world: World, *data: Example, seq_id: int = 1) -> QueuedRow:
    """Of a loss that needs no spans."""
    return await world.row(seq_id, *data, loss_fn="importance_sampling")


async def test_tokens_of_recorded_sequences_replay_their_experts(replaying: World) -> None:
    """Of two turns: the token between them was sampled last, and given to the model in the second alone."""
    first = (await routed(replaying, SAMPLED, PROMPT, 1)).sequence_id
    history = (*PROMPT, *SAMPLED, 5, 6)
    second = (await routed(replaying, (20, 21, 22), history, 2)).sequence_id
    inputs = (prompt(first, 0, 3), sample(first, 0, 4), prompt(second, 7, 2), sample(second, 0, 2))
    bare = Example((*PROMPT, *SAMPLED), ())
    row = await replay_row(replaying, bare, Example((*history, 20, 21, 22), (), input_spans=inputs))
    ready = await replaying.prepare(row)
    ((segment, replayed),) = batch_of(ready).batch.replayed.items()
    assert segment == 1
    assert replayed.experts.dtype == np.int16
    assert replayed.experts.shape == (11, 3, 2)
    expected = [100, 101, 102, 103, 104, 105, 0, 207, 208, 209, 210]
    np.testing.assert_array_equal(
        replayed.experts, np.broadcast_to(np.array(expected)[:, None, None], (11, 3, 2))
    )
    np.testing.assert_array_equal(replayed.known, [number > 0 for number in expected])
    (output,) = await replaying.run(row)
    assert isinstance(output, PassOutput)
    assert output.metrics["replayed_tokens:sum"] == 10
    assert ready.sequences == {first, second}


async def test_datums_without_recorded_experts_run_as_before(replaying: World, neighbour: World) -> None:
    """Without spans; of unknown, foreign and unrecorded sequences; recorded without experts."""
    foreign = (await routed(neighbour, SAMPLED, PROMPT, 1)).sequence_id
    bare = (await recorded.sampled(replaying.store, replaying.session, SAMPLED, 3, number=2)).sequence_id
    names = ("nobody", foreign, await _unrecorded(replaying, neighbour), bare)
    named = [turn(name, inputs=True) for name in names]
    row = await replay_row(replaying, Example((*PROMPT, *SAMPLED), ()), *named)
    ready = await replaying.prepare(row)
    assert batch_of(ready).batch.replayed == {}
    (output,) = await replaying.run(row)
    assert isinstance(output, PassOutput)
    assert output.metrics["replayed_tokens:sum"] == 0


async def test_without_router_replay_spans_of_inputs_stay_unread(world: World) -> None:
    name = (await routed(world, SAMPLED, PROMPT, 1)).sequence_id
    wrong = Example((9, 9, 9), (), input_spans=(sample(name, 3, 9), prompt("", -1, 1)))
    row = await replay_row(world, turn(name, inputs=True), wrong)
    ready = await world.prepare(row)
    assert (batch_of(ready).batch.replayed, ready.sequences) == ({}, frozenset())
    (output,) = await world.run(row)
    assert isinstance(output, PassOutput)
    assert "replayed_tokens:sum" not in output.metrics


async def test_stable_reinforce_replays_experts_too(replaying: World) -> None:
    name = (await routed(replaying, SAMPLED, PROMPT, 1)).sequence_id
    (replayed,) = batch_of(
        await replaying.prepare(await replaying.row(1, turn(name, inputs=True)))
    ).batch.replayed.values()
    assert replayed.known.all()


@pytest.mark.parametrize(
    ("inputs", "tokens", "why"),
    [
        (lambda name: (prompt(name, 0, 3), sample(name, 0, 2)), (1, 2, 3, 10, 11, 12), None),
        (
            lambda name: (prompt(name, 0, 3), sample(name, 0, 2)),
            (1, 9, 3, 10, 11, 12),
            "[0]: model_input[1] is 9, expected 2, which is prompt token 1 of sequence",
        ),
        (
            lambda name: (prompt(name, 0, 3), sample(name, 1, 2)),
            (1, 2, 3, 10, 11, 12),
            "[1]: model_input[3] is 10, expected 11, which was sampled as token 1 of sequence",
        ),
        (
            lambda name: (prompt(name, 0, 4), sample(name, 0, 1)),
            (1, 2, 3, 10, 11, 12),
            "[0] covers tokens [0, 4) of the prompt of sequence",
        ),
        (
            lambda name: (prompt(name, 0, 3), sample(name, 0, 1)),
            (1, 2, 3, 10, 11, 12),
            " cover 4 positions, expected 5 (the length of model_input)",
        ),
    ],
)
async def test_spans_of_inputs_that_are_not_true_are_refused(
    replaying: World,
    inputs: Callable[[str], tuple[ProvenanceSpan, ...]],
    tokens: tuple[int, ...],
    why: str | None,
) -> None:
    name = (await routed(replaying, SAMPLED, PROMPT, 1)).sequence_id
    example = Example(tokens, (), input_spans=inputs(name))
    (output,) = await replaying.run(await replay_row(replaying, example))
    if why is None:
        assert isinstance(output, PassOutput)
    else:
        assert isinstance(output, Failure)
        assert output.category == "user"
        assert output.message.startswith(f"datum 0: model_input_spans{why}")


def total(logprobs: torch.Tensor, advantages: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return logprobs.sum(), {"custom/gain:sum": advantages.sum()}


TOTAL = upload(total, logprobs=1, advantages=1)


async def custom_row(world: World, seq_id: int, loss_id: str) -> QueuedRow:
    body = recorded.request(world.model, seq_id, "custom", Example(SAMPLED, ()), loss_id=loss_id)
    return await recorded.row_of(world.store, world.model, seq_id, body)


async def test_a_custom_loss_is_what_its_session_uploaded(world: World) -> None:
    loss_id = await recorded.upload(world.store, world.session, TOTAL)
    (output,) = await world.run(await custom_row(world, 1, loss_id))
    assert isinstance(output, PassOutput)
    assert output.metrics["loss:sum"] == pytest.approx(sum(each.sum() for each in output.logprobs), rel=1e-6)


async def test_a_custom_loss_of_another_session_is_as_unknown_as_none(world: World, neighbour: World) -> None:
    theirs = await recorded.upload(neighbour.store, neighbour.session, TOTAL)
    rows = [await custom_row(world, seq_id, loss_id) for seq_id, loss_id in ((1, theirs), (2, "none"))]
    *refused, fine = await world.run(*rows, await custom_row(neighbour, 1, theirs))
    for failure, loss_id in zip(refused, (theirs, "none"), strict=True):
        assert isinstance(failure, Failure)
        assert failure.category == "user"
        assert failure.message.startswith(
            f"loss_fn_config['loss_id'] is {loss_id!r}, which is unknown, or of"
        )
    assert isinstance(fine, PassOutput)


async def test_an_input_that_a_custom_loss_lacks_is_named(world: World) -> None:
    needy = replace(TOTAL, inputs=(*TOTAL.inputs, ("margin", 0)))
    loss_id = await recorded.upload(world.store, world.session, needy)
    (failure,) = await world.run(await custom_row(world, 1, loss_id))
    assert isinstance(failure, Failure)
    assert "datum 0: loss_fn_inputs lacks 'margin'" in failure.message
