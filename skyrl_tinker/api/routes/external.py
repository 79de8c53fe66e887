"""How to fetch weights for use elsewhere."""

import asyncio
from email.utils import formatdate

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse

from skyrl_tinker.api.resources.checkpoint_archive import require_archivable
from skyrl_tinker.api.security.signing import expiry
from skyrl_tinker.api.services import Deps, Owner, Services
from skyrl_tinker.domain import tinker_path
from skyrl_tinker.domain.ids import CheckpointKind, ModelId, OwnerId
from skyrl_tinker.domain.manifest import read_manifest
from skyrl_tinker.errors import UserError
from skyrl_tinker.protocol.schemas import ExternalWeightsUrlsResponse, utc
from skyrl_tinker.store import checkpoint_records
from skyrl_tinker.store.checkpoint_records import CheckpointRow

router = APIRouter(tags=["downloads"])
_CHECKPOINT = "/training_runs/{run}/checkpoints/{checkpoint_id:path}"


@router.get(f"{_CHECKPOINT}/external_weights_urls", summary="Signed URLs of the files of an export")
async def external_weights_urls(
    run: str, checkpoint_id: str, request: Request, deps: Deps, owner: Owner
) -> ExternalWeightsUrlsResponse:
    row = await _own(deps, owner, run, checkpoint_id)
    if row.kind is not CheckpointKind.EXTERNAL_WEIGHTS:
        raise UserError(f"{row.path} is of kind {row.kind}, expected one that save_weights_external made")
    manifest = await asyncio.to_thread(read_manifest, row.directory)
    expires = expiry(row.expires_at)
    urls = {
        name: await deps.signer.url(request, f"/download/checkpoint/{row.id}/{name}", expires)
        for name in manifest.files
    }
    return ExternalWeightsUrlsResponse(urls=urls, expires=utc(expires))


@router.get(
    f"{_CHECKPOINT}/archive",
    summary="Redirects to a tar of a LoRA adapter, for SDKs up to 0.35",
    status_code=302,
    response_class=RedirectResponse,
    response_model=None,
)
async def archive(
    run: str, checkpoint_id: str, request: Request, deps: Deps, owner: Owner
) -> RedirectResponse:
    """SDKs do not follow the redirect: they read Location and Expires."""
    row = await _own(deps, owner, run, checkpoint_id)
    require_archivable(row)
    expires = expiry(row.expires_at)
    url = await deps.signer.url(request, f"/download/archive/{row.id}/{row.name}.tar", expires)
    return RedirectResponse(url, 302, {"Expires": formatdate(expires, usegmt=True)})


async def _own(deps: Services, owner: OwnerId | None, run: str, checkpoint_id: str) -> CheckpointRow:
    where = tinker_path.parse_checkpoint_id(ModelId(run), checkpoint_id)
    with deps.store.read() as conn:
        return checkpoint_records.require_owned(conn, owner, where.model_id, where.kind, where.name)
