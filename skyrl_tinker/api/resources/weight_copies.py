"""Copies of checkpoints (copy_weights): hard links and rows of their own, independent of the original."""

import shutil
from functools import partial
from pathlib import Path
from uuid import NAMESPACE_URL, uuid4, uuid5

from sqlalchemy import Connection

from skyrl_tinker.api.requests.model_requests import find_checkpoint
from skyrl_tinker.api.security.tokens import Caller
from skyrl_tinker.api.services import Services
from skyrl_tinker.domain import tinker_path
from skyrl_tinker.domain.ids import OwnerId, SessionId
from skyrl_tinker.domain.tinker_path import TinkerPath
from skyrl_tinker.errors import NotFoundError, SkyrlTinkerError, StorageError, UserError
from skyrl_tinker.protocol.schemas.runs import CopyWeightsRequest
from skyrl_tinker.protocol.validation.steps import refuse_access_token, validate_ttl
from skyrl_tinker.store import checkpoint_copies
from skyrl_tinker.store.checkpoint_copies import Destination, NewCopy
from skyrl_tinker.store.checkpoint_records import CheckpointRow
from skyrl_tinker.store.reports import holdings
from skyrl_tinker.system.atomic_directory import atomic_directory, link
from skyrl_tinker.system.off_loop import in_load_thread, in_load_turn, in_transfer_thread

_SESSIONS = uuid5(NAMESPACE_URL, "copy_weights")


async def copy_weights(
    services: Services,
    caller: Caller,
    request: CopyWeightsRequest,
    digest: bytes,
    key: str | None,
    token: str | None,
) -> TinkerPath:
    """Return the path of the copy; a request repeated with its idempotency `key` gets the same one.

    `digest`: of the request.

    Raises UserError, NotFoundError (source, session), GoneError, SeqIdReusedError, StorageError.
    """
    owner = caller.owner
    refuse_access_token(request.weights_access_token or token)
    source, ttl = tinker_path.parse(request.source_path), validate_ttl(request.ttl_seconds)
    if ttl is None:
        ttl = services.settings.retention.checkpoints_s
    destination = _destination(request, owner, key)
    path = TinkerPath(destination.model_id, source.kind, source.name)

    def find(conn: Connection) -> CheckpointRow | None:
        if checkpoint_copies.is_copied(conn, owner, destination, digest):
            return None
        row = find_checkpoint(conn, owner, request.source_path)
        caller.limits.require_stored(holdings.stored_bytes(conn, owner), row.size_bytes)
        return row

    if (row := await services.store.read(find)) is None:
        return path
    root = services.settings.checkpoint_root / f"copy-{uuid4().hex}"
    await _add(services, owner, root, NewCopy(row, str(_inside(root, row)), destination, ttl, digest))
    return path


def _destination(request: CopyWeightsRequest, owner: OwnerId | None, key: str | None) -> Destination:
    """Return where the copy goes. Raises UserError unless it is named in exactly one of the two ways."""
    project, session, number = request.destination_project_id, request.session_id, request.model_seq_id
    if project and session is None and number is None:
        session_id = uuid4() if key is None else uuid5(_SESSIONS, f"{owner} {key}")
        return Destination(SessionId(str(session_id)), 0, project)
    if project is None and session is not None and number is not None:
        return Destination(SessionId(session), number, None)
    raise UserError(
        "expected either destination_project_id, or session_id and model_seq_id; "
        f"found destination_project_id={project!r}, session_id={session!r}, model_seq_id={number!r}"
    )


async def _add(services: Services, owner: OwnerId | None, root: Path, new: NewCopy) -> None:
    """Copy the files, then add the rows, which thus name a complete directory.

    Where nobody knows whether the rows were added, the files stay: an engine removes them if they were not.
    """
    kept = False
    try:
        for work in (
            partial(services.storage.fetch, Path(new.source.directory)),
            partial(_copy_files, new.source, root),
            partial(services.storage.store, Path(new.directory)),
        ):
            await in_load_turn(owner, partial(in_load_thread, work))
        kept = True  # a write that is cancelled, or that breaks off, may be committed all the same
        kept = await services.store.write(lambda conn: checkpoint_copies.add(conn, owner, new))
    except SkyrlTinkerError as error:
        kept = kept and error.category != "user"
        raise
    finally:
        if not kept:  # it failed, or the same request was added meanwhile
            await in_transfer_thread(services.storage.discard, Path(new.directory))
            await in_transfer_thread(shutil.rmtree, root, ignore_errors=True)


def _copy_files(source: CheckpointRow, root: Path) -> None:
    try:
        with atomic_directory(root) as staging:
            shutil.copytree(source.directory, _inside(staging, source), copy_function=link)
    except OSError as error:  # one error for many files, without a number
        if not Path(source.directory).exists():
            raise NotFoundError(f"source_path: {source.path} was deleted while it was copied") from error
        raise StorageError(f"{source.path} could not be copied to {root}: {error}") from error


def _inside(root: Path, source: CheckpointRow) -> Path:
    return root / source.kind / source.name
