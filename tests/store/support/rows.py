"""Rows in one line each."""

from skyrl_tinker.domain.ids import (
    ModelKey,
    OwnerId,
    RequestId,
    RequestKind,
    SamplingSessionId,
    SessionId,
    VersionId,
)
from skyrl_tinker.domain.values import LoraSpec
from skyrl_tinker.store import model_records, sampling_sessions, session_records, weight_versions
from skyrl_tinker.store.futures import outcomes, queue, record, sample_submission, training_submission
from skyrl_tinker.store.futures.sample_submission import NewSample
from skyrl_tinker.store.futures.training_submission import Creation, Submission
from skyrl_tinker.store.model_records import ModelRow, NewModel
from skyrl_tinker.store.store import Store
from tests.support.reads import reading

SPEC = LoraSpec(rank=8, seed=2**62, train_unembed=False)


async def new_session(store: Store, owner: OwnerId | None = None) -> SessionId:
    return await store.write(
        lambda conn: session_records.create(
            conn, owner=owner, tags=["a"], user_metadata={"k": [1, None]}, sdk_version="0.38.0"
        )
    )


async def finish_session(store: Store, session: SessionId) -> None:
    await store.write(lambda conn: session_records.finish(conn, session, "done", None))


async def submit_create(
    store: Store, session: SessionId, seq_id: int = 0, digest: bytes = b"create"
) -> record.Accepted:
    new = NewModel(session, seq_id, "tiny", SPEC, {"betas": [0.9]}, {"run": "x"})
    return await store.write(
        lambda conn: training_submission.submit_create(
            conn, Creation(RequestKind.CREATE_MODEL, new, digest, b"create"), owner=None
        )
    )


async def create(store: Store, session: SessionId, seq_id: int = 0) -> ModelRow:
    accepted = await submit_create(store, session, seq_id)
    assert accepted.model_id is not None
    with reading(store) as conn:
        row = model_records.by_id(conn, accepted.model_id)
    assert row is not None
    return row


async def base_sampler(store: Store, session: SessionId, seq_id: int = 0) -> SamplingSessionId:
    return await store.write(
        lambda conn: sampling_sessions.create(
            conn, session, seq_id, base_model="tiny", model_path=None, version_id=None
        )
    )


async def step(
    store: Store, model: ModelRow, seq_id: int, body: bytes = b"step", digest: bytes = b"digest"
) -> record.Accepted:
    return await store.write(
        lambda conn: training_submission.submit_training(
            conn, Submission(RequestKind.OPTIM_STEP, model.model_id, seq_id, digest, body), owner=None
        )
    )


async def sample(
    store: Store, sampler: SamplingSessionId, seq_id: int, digest: bytes = b"digest", num_samples: int = 2
) -> record.Accepted:
    return await store.write(
        lambda conn: sample_submission.submit_sample(
            conn, NewSample(sampler, seq_id, digest, b"sample", num_samples, 1, 1), None
        )
    )


async def queued(store: Store, cursor: int = 0) -> list[queue.QueuedRow]:
    with reading(store) as conn:
        return queue.queued_after(conn, cursor)


async def outcome(store: Store, request_id: RequestId) -> outcomes.Outcome:
    with reading(store) as conn:
        found = outcomes.find(conn, request_id)
    assert found is not None
    return found


async def ephemeral(
    store: Store,
    model: ModelKey,
    directory: str = "/ram/v",
    *,
    inflight: bool = False,
    steps: int | None = None,
) -> VersionId:
    version = await store.write(
        lambda conn: weight_versions.insert_version(conn, model, "lora", durable=False, inflight=inflight)
    )
    await store.write(lambda conn: weight_versions.publish_version(conn, version, directory, 1, steps))
    return version
