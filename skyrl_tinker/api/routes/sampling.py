"""Sampling sessions and samples. An invalid request is refused at once, not stored as a failed future."""

from fastapi import APIRouter, Request
from sqlalchemy import Connection

from skyrl_tinker.api.middleware.fast_routes import FastRoute
from skyrl_tinker.api.openapi.documents import takes
from skyrl_tinker.api.requests.model_requests import find_checkpoint
from skyrl_tinker.api.requests.request_body import json_object, read_model
from skyrl_tinker.api.requests.submission import announce
from skyrl_tinker.api.security.tokens import Caller
from skyrl_tinker.api.services import Deps, Owner, Reached, Services, caller_of
from skyrl_tinker.domain.bases import Bases
from skyrl_tinker.domain.ids import OwnerId, SamplingSessionId, SessionId, VersionId
from skyrl_tinker.domain.values import BaseModelFacts
from skyrl_tinker.errors import NotSupportedError, UserError
from skyrl_tinker.protocol.schemas.base import parse
from skyrl_tinker.protocol.schemas.futures import AcceptedFuture
from skyrl_tinker.protocol.schemas.sampling import (
    AsampleRequest,
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    GetSamplerResponse,
    JoinSamplingSessionRequest,
    JoinSamplingSessionResponse,
)
from skyrl_tinker.protocol.stored_requests import body_digest, sample_body
from skyrl_tinker.protocol.validation.sampling import stop_bytes, validate_sample
from skyrl_tinker.store import checkpoint_records, owners, sampling_sessions
from skyrl_tinker.store.futures.sample_submission import NewSample, submit_sample
from skyrl_tinker.system.off_loop import off_loop

router = APIRouter(tags=["sampling"])
fast = APIRouter(tags=["sampling"], route_class=FastRoute)


@router.post(
    "/create_sampling_session",
    **takes("Sample from the base model or from a checkpoint", CreateSamplingSessionRequest),
)
async def create_sampling_session(
    request: Request, deps: Deps, owner: Owner
) -> CreateSamplingSessionResponse:
    message = await read_model(request, CreateSamplingSessionRequest)

    def create(conn: Connection) -> SamplingSessionId:
        session_id, number = SessionId(message.session_id), message.sampling_session_seq_id
        owners.require_session(conn, owner, session_id)
        path = message.model_path
        if path is not None and (first := sampling_sessions.find_for_path(conn, session_id, number, path)):
            return first
        facts, version_id = _target(conn, owner, message, deps.bases)
        deps.bases.require_sampleable(facts)
        return sampling_sessions.create(
            conn, session_id, number, base_model=facts.name, model_path=path, version_id=version_id
        )

    return CreateSamplingSessionResponse(sampling_session_id=await deps.store.write(create))


def _target(
    conn: Connection, owner: OwnerId | None, message: CreateSamplingSessionRequest, bases: Bases
) -> tuple[BaseModelFacts, VersionId | None]:
    """Return base model and weight version. A checkpoint must be of `base_model`, if that is given."""
    named = None if message.base_model is None else bases.require_sampled(message.base_model)
    if message.model_path is not None:
        row = find_checkpoint(conn, owner, message.model_path)
        facts = checkpoint_records.require_base(row, bases if named is None else Bases((named,)))
        if row.version_id is None:
            raise checkpoint_records.no_sampler_weights(row.path)
        return facts, row.version_id
    if named is None:
        raise UserError("base_model and model_path are missing: expected one of them")
    return named, None


@router.get("/samplers/{sampler_id}", summary="Describe a sampling session: base model and checkpoint path")
async def get_sampler(sampler_id: str, deps: Deps, reach: Reached) -> GetSamplerResponse:
    row = await deps.store.read(
        lambda conn: sampling_sessions.require(conn, reach, SamplingSessionId(sampler_id))
    )
    return GetSamplerResponse(
        sampler_id=row.sampling_session_id, base_model=row.base_model, model_path=row.model_path
    )


@router.post(
    "/join_sampling_session",
    **takes("A number for one more client of a sampling session", JoinSamplingSessionRequest),
)
async def join_sampling_session(request: Request, deps: Deps, owner: Owner) -> JoinSamplingSessionResponse:
    """Assign a number; the client's seq_ids begin at it times 10^9, so that no other client uses them."""
    message = await read_model(request, JoinSamplingSessionRequest)
    session_id = SamplingSessionId(message.sampling_session_id)
    counter = await deps.store.write(lambda conn: sampling_sessions.add_client(conn, owner, session_id))
    return JoinSamplingSessionResponse(client_counter=counter)


@fast.post("/asample", **takes("Sample from one prompt; a 400 names the invalid field", AsampleRequest))
async def asample(request: Request, deps: Deps) -> AcceptedFuture:
    caller = caller_of(request)
    sample, base_model = await _read_sample(await request.body(), deps, caller)
    refusal = deps.queues.full(base_model) or await deps.backlogs.full(caller)
    owner = caller.owner
    if refusal is not None:  # but not of a sample that was accepted before, and its answer lost
        accepted = await deps.store.fetch(lambda conn: submit_sample(conn, sample, owner, refusal).value())
    else:
        accepted = await deps.store.write(
            lambda conn: submit_sample(conn, sample, owner), deps.wake_engine, len(sample.body)
        )
    if accepted.created:
        deps.queues.accepted(base_model)
    return announce(deps, owner, accepted, pending=True)


async def _read_sample(body: bytes, deps: Services, caller: Caller) -> tuple[NewSample, str]:
    """Decode, check, and convert to the stored form, in threads when the body is large.

    Returns the sample and the name of its base model.
    """
    message = await off_loop(len(body), lambda: parse(AsampleRequest, json_object(body)))
    if message.sampling_session_id is None or message.seq_id is None:
        raise NotSupportedError("sampling_session_id or seq_id is missing: expected both")
    session, seq_id = SamplingSessionId(message.sampling_session_id), message.seq_id
    limits = await deps.limits.of_sampling_session(session, caller.owner)

    def check() -> NewSample:
        caller.limits.require_stop(stop_bytes(message.sampling_params.stop))
        sample = validate_sample(message, limits)
        stored = sample_body(sample)
        return NewSample(
            session,
            seq_id,
            body_digest(stored),
            stored,
            sample.num_samples,
            sample.tokens(limits.context_length),
            sample.places,
        )

    return await off_loop(len(body), check), limits.base_model


router.include_router(fast)
