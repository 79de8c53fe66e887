"""Weights for use elsewhere, by signed URLs of exports and archives of adapters; and from elsewhere."""

from email.utils import formatdate

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse

from skyrl_tinker.api.requests.model_requests import find_own_checkpoint
from skyrl_tinker.api.resources.checkpoint_archive import require_archivable
from skyrl_tinker.api.resources.checkpoint_files import CheckpointFiles
from skyrl_tinker.api.security.signing import expiry
from skyrl_tinker.api.services import Deps, Reached, Services
from skyrl_tinker.domain.ids import CheckpointKind, Reach
from skyrl_tinker.errors import NotSupportedError, UserError
from skyrl_tinker.protocol.schemas.base import utc
from skyrl_tinker.protocol.schemas.runs import ExternalWeightsUrlsResponse
from skyrl_tinker.store.checkpoint_records import CheckpointRow

router = APIRouter(tags=["downloads"])
_CHECKPOINT = "/training_runs/{run}/checkpoints/{checkpoint_id:path}"


@router.get(f"{_CHECKPOINT}/external_weights_urls", summary="Signed URLs of an export's files")
async def external_weights_urls(
    run: str, checkpoint_id: str, request: Request, deps: Deps, reach: Reached
) -> ExternalWeightsUrlsResponse:
    row = await _find_own(deps, reach, run, checkpoint_id)
    if row.kind is not CheckpointKind.EXTERNAL_WEIGHTS:
        raise UserError(f"{row.path} is of kind {row.kind}, expected one made by save_weights_external")
    manifest = await CheckpointFiles(deps.storage, row).manifest()
    expires = expiry(row.expires_at)
    urls = {
        name: deps.signer.url(request, f"/download/checkpoint/{row.id}/{name}", expires)
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
    run: str, checkpoint_id: str, request: Request, deps: Deps, reach: Reached
) -> RedirectResponse:
    """SDKs do not follow the redirect: they read Location and Expires."""
    row = await _find_own(deps, reach, run, checkpoint_id)
    require_archivable(row)
    expires = expiry(row.expires_at)
    url = deps.signer.url(request, f"/download/archive/{row.id}/{row.name}.tar", expires)
    return RedirectResponse(url, 302, {"Expires": formatdate(expires, usegmt=True)})


@router.post("/external_weights_upload_start", summary="Refused: adapters are imported on the server's host")
@router.post("/external_weights_upload_finish", summary="Refused, as its start")
async def upload_external_weights() -> dict[str, str]:
    """Experimental in SDK 0.39, where servers may decline."""
    raise NotSupportedError(
        "this server takes no uploads of weights: import a PEFT adapter with `skyrl-tinker import-adapter` "
        "on its machine"
    )


async def _find_own(deps: Services, reach: Reach, run: str, checkpoint_id: str) -> CheckpointRow:
    return await deps.store.read(lambda conn: find_own_checkpoint(conn, reach, run, checkpoint_id))
