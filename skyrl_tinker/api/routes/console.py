"""Routes of the dashboard and of `skyrl-tinker status`."""

from fastapi import APIRouter

from skyrl_tinker.api.resources.now_view import NowView
from skyrl_tinker.api.services import CallerDep, Deps
from skyrl_tinker.protocol.schemas.console import NowResponse

router = APIRouter(tags=["console"], prefix="/console")


@router.get("/now", summary="The server now: problems, queues, rates, trainer, samplers, processes")
async def now(deps: Deps, caller: CallerDep) -> NowResponse:
    """Show the caller's own work, and that of all with an admin key or on a server without keys.

    It is at most a second old, however many ask.
    """
    return NowView(deps, await deps.snapshots.read(), caller).message()
