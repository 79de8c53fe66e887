"""Traps that make an SDK hang, spin or crash (protocol, section 12), where no other test holds them."""

import time
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest
import zstandard
from pydantic import ValidationError

from skyrl_tinker.config import Bodies, Settings
from skyrl_tinker.errors import SkyrlTinkerError
from skyrl_tinker.protocol.protobuf import pass_results, sample_results
from skyrl_tinker.protocol.schemas.base import Message
from skyrl_tinker.protocol.schemas.losses import CreateCustomLossResult
from skyrl_tinker.protocol.schemas.training import (
    CreateModelResult,
    LoadWeightsResult,
    OptimStepResult,
    SaveExternalResult,
    SaveSamplerResult,
    SaveWeightsResult,
    UnloadModelResult,
)
from skyrl_tinker.store import usage_records
from skyrl_tinker.store.retention import row_purges
from tests.api.support.base_facts import VOCABULARY
from tests.api.support.passes import datum, old_json, post_pass, protobuf
from tests.api.support.world import World, pass_output, running, sample, sample_output, step

PAUSES_FOR_AN_HOUR, RETRIED_FOR_MINUTES = 402, 409
RESULTS = [
    CreateModelResult(model_id="m"),
    LoadWeightsResult(path="p", model_id="m"),
    OptimStepResult(metrics={"grad_norm": 1.0}),
    SaveWeightsResult(path="p"),
    SaveSamplerResult(path="p"),
    SaveExternalResult(path="p", size_bytes=1),
    CreateCustomLossResult(loss_id="l"),
    UnloadModelResult(model_id="m"),
]


def kinds(error: type[SkyrlTinkerError] = SkyrlTinkerError) -> Iterator[type[SkyrlTinkerError]]:
    yield error
    for kind in error.__subclasses__():
        yield from kinds(kind)


def test_no_error_of_ours_is_402_or_409() -> None:
    """Traps 7 and 8: the SDK pauses silently, or repeats what cannot succeed."""
    assert not {PAUSES_FOR_AN_HOUR, RETRIED_FOR_MINUTES} & {kind.status for kind in kinds()}


def test_every_error_has_a_category_that_the_sdk_knows() -> None:
    """Trap 24: it compares case by case."""
    assert {kind.category for kind in kinds()} <= {"user", "server", "unknown"}


@pytest.mark.parametrize("seconds", [45, 60, 0])
def test_a_long_poll_beyond_the_patience_of_old_sdks_cannot_be_set(seconds: float) -> None:
    """Trap 14."""
    with pytest.raises(ValidationError, match=r"timeouts\.long_poll_s"):
        Settings(timeouts={"long_poll_s": seconds})


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: type(result).__name__)
def test_no_result_has_a_key_that_means_something_else_to_the_sdk(result: Message) -> None:
    """Trap 21: `error`, even null; and what says that the result is not there yet."""
    fields = result.model_dump()
    assert not {"error", "status"} & set(fields)
    assert fields.get("type") != "try_again"


@pytest.mark.parametrize(
    "fields",
    [
        pass_results.forward_backward_output_json(pass_output([-1.0])),
        sample_results.sample_response_json(sample_output([1])),
    ],
)
def test_no_converted_result_has_one_either(fields: dict[str, object]) -> None:
    assert not {"error", "status"} & set(fields)
    assert fields.get("type") != "try_again"


async def test_a_sample_whose_result_expired_is_sent_again_and_lives(world: World) -> None:
    """Trap 6: the SDK answers 410 with the same sample under a new seq_id, for ever."""
    session = await world.sampler()
    kind = {"X-Tinker-Request-Type": "Sample"}
    first = (await world.ok("asample", sample(session, 0)))["request_id"]
    await world.succeed(first, "application/x-protobuf", sample_output([7]))
    await world.store.write(usage_records.roll_up)
    await world.store.write(lambda conn: row_purges.purge_results(conn, time.time() + 1))
    assert (await world.retrieve(first, **kind)).status_code == 410
    second = (await world.ok("asample", sample(session, 1)))["request_id"]
    await world.succeed(second, "application/x-protobuf", sample_output([7]))
    assert second != first
    assert (await world.retrieve(second, **kind)).status_code == 200


async def test_a_wrong_request_of_any_kind_takes_its_seq_id(world: World) -> None:
    """Trap 2: the SDK goes on with the next one, so the number is taken as soon as it can be read."""
    model = await world.model()
    nonsense = {"model_id": model, "seq_id": 1, "forward_backward_input": "nonsense"}
    for path, body in (
        ("forward_backward", nonsense),
        ("forward", {**nonsense, "seq_id": 2}),
        ("optim_step", {"model_id": model, "seq_id": 3, "adam_params": [1]}),
        ("save_weights", {"model_id": model, "seq_id": 4}),
        ("save_weights_for_sampler", {"model_id": model, "seq_id": 5, "path": "../x"}),
        ("save_weights_external", {"model_id": model, "seq_id": 6, "path": 7}),
        ("load_weights", {"model_id": model, "seq_id": 7, "path": "nowhere"}),
    ):
        await world.failure((await world.ok(path, body))["request_id"])
    assert [row.seq_id for row in await world.queued()] == list(range(8))
    await world.ok("optim_step", step(model, 8))


async def test_an_old_pass_that_cannot_be_a_protobuf_takes_its_seq_id(world: World) -> None:
    model = await world.model()
    wrong = old_json(model, 1)
    wrong["forward_backward_input"]["data"] = [{"model_input": 3}]
    told = await world.failure((await world.ok("forward_backward", wrong))["request_id"])
    assert "forward_backward_input.data.0.model_input: expected an object, found 3" in told
    await world.ok("forward_backward", old_json(model, 2))


@pytest.mark.parametrize("how", ["large", "in pieces", "compressed, large", "compressed, grows", "cut off"])
async def test_a_pass_that_cannot_be_read_whole_takes_its_seq_id(settings: Settings, how: str) -> None:
    """Trap 2: a 4xx would leave a gap in the numbers, for which all later requests wait."""
    small = settings.model_copy(update={"bodies": Bodies(wire_mb=1, expanded_mb=2, held_mb=4)})
    async with running(small) as world:
        model = await world.model()
        tokens = np.random.default_rng(0).integers(0, VOCABULARY, 60).tolist()
        count = 1 if how == "cut off" else 60_000 if how == "compressed, large" else 8000
        whole = protobuf(model, 1, *[datum(tokens)] * count)
        headers = {"Content-Encoding": "zstd"} if how.startswith("compressed") else {}
        body = zstandard.ZstdCompressor(level=1 if how.endswith("grows") else -100).compress(whole)
        sent = {"compressed, grows": body, "compressed, large": body, "cut off": whole[:-1]}.get(how, whole)
        for again in range(2):
            answer = await post_pass(world, pieces(sent) if how == "in pieces" else sent, **headers)
            assert answer.status_code == 200, (again, answer.text)
        failure = await world.failure(answer.json()["request_id"])
        assert ("not a ForwardBackwardRequest" if how == "cut off" else "expected at most") in failure or (
            "the cap" in failure
        )
        following = await post_pass(world, protobuf(model, 2))
        assert following.status_code == 200
        assert [row.seq_id for row in await world.queued()] == [0, 1, 2]


async def pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 1 << 16):
        yield body[start : start + (1 << 16)]
