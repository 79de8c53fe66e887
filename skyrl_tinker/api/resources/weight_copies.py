"""copy_weights: hard links to the files, and rows of their own. Whichever goes first, the other stays."""

import asyncio
import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid4, uuid5

from sqlalchemy import Connection

from skyrl_tinker.api.requests.model_requests import find_checkpoint
from skyrl_tinker.api.services import Services
from skyrl_tinker.domain import tinker_path
from skyrl_tinker.domain.ids import OwnerId, RequestKind, SessionId
from skyrl_tinker.domain.tinker_path import TinkerPath
from skyrl_tinker.errors import NotFoundError, StorageError, UserError
from skyrl_tinker.protocol.schemas import parse
from skyrl_tinker.protocol.schemas.runs import CopyWeightsRequest
from skyrl_tinker.protocol.stored_requests import payload_digest
from skyrl_tinker.protocol.validation import refuse_access_token, validate_ttl
from skyrl_tinker.store import checkpoint_copies
from skyrl_tinker.store.checkpoint_copies import Destination, NewCopy
from skyrl_tinker.store.checkpoint_records import CheckpointRow

_SESSIONS = uuid5(NAMESPACE_URL, "copy_weights")
_NO_LINKS = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS})
"""The file system cannot link these: it copies."""


async def copy_weights(
    services: Services, owner: OwnerId | None, payload: Mapping[str, Any], key: str | None, token: str | None
) -> TinkerPath:
    """The path of the copy. The same request with the same idempotency `key` gives the same one.

    UserError, NotFoundError (source, session), GoneError, SeqIdReusedError, StorageError.
    """
    wanted = parse(CopyWeightsRequest, payload)
    refuse_access_token(wanted.weights_access_token or token)
    source, ttl = tinker_path.parse(wanted.source_path), validate_ttl(wanted.ttl_seconds)
    where = _destination(wanted, owner, key)
    digest = payload_digest(RequestKind.COPY_WEIGHTS, payload)
    path = TinkerPath(where.model_id, source.kind, source.name)
    with services.store.read() as conn:
        if checkpoint_copies.is_copied(conn, owner, where, digest):
            return path
        row = find_checkpoint(conn, owner, wanted.source_path)
    root = services.settings.checkpoint_root / f"copy-{uuid4().hex}"
    await _add(services, owner, root, NewCopy(row, str(_inside(root, row)), where, ttl, digest))
    return path


def _destination(wanted: CopyWeightsRequest, owner: OwnerId | None, key: str | None) -> Destination:
    """UserError unless it is named in one of the two ways."""
    project, session, number = wanted.destination_project_id, wanted.session_id, wanted.model_seq_id
    if project and session is None and number is None:
        made = uuid4() if key is None else uuid5(_SESSIONS, f"{owner} {key}")
        return Destination(SessionId(str(made)), 0, project)
    if project is None and session is not None and number is not None:
        return Destination(SessionId(session), number, None)
    raise UserError(
        "expected either destination_project_id, or session_id and model_seq_id; "
        f"found destination_project_id={project!r}, session_id={session!r}, model_seq_id={number!r}"
    )


async def _add(services: Services, owner: OwnerId | None, root: Path, new: NewCopy) -> None:
    """Files first: rows name a directory that is complete."""
    added = False

    def op(conn: Connection) -> bool:
        return checkpoint_copies.add(conn, owner, new)

    try:
        await asyncio.to_thread(_copy_files, new.source, root)
        added = await services.store.write(op)
    finally:
        if not added:  # it failed, or another got there first
            await asyncio.to_thread(shutil.rmtree, root, ignore_errors=True)


def _copy_files(source: CheckpointRow, root: Path) -> None:
    """`root` appears when it is complete; what is left of a copy that broke off, the engine sweeps."""
    unfinished = root.with_name(f".{root.name}.tmp")
    try:
        copied = Path(shutil.copytree(source.directory, _inside(unfinished, source), copy_function=_link))
        for path in (
            *(each for each in copied.rglob("*") if each.is_dir()),
            copied,
            copied.parent,
            unfinished,
        ):
            _flush(path)
        unfinished.rename(root)
        _flush(root.parent)
    except OSError as error:  # of many files it is one error, without a number
        shutil.rmtree(unfinished, ignore_errors=True)
        if not Path(source.directory).exists():
            raise NotFoundError(f"source_path: {source.path} was deleted while it was copied") from error
        raise StorageError(f"{source.path} could not be copied to {root}: {error}") from error


def _inside(root: Path, source: CheckpointRow) -> Path:
    return root / source.kind / source.name


def _link(source: str, target: str) -> None:
    """A file of a checkpoint is never written again, so two may share it."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(source, target)
        _flush(Path(target))


def _flush(path: Path) -> None:
    """To the disk, so that an entry that is committed is there after a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
