"""State of the whole server at one moment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from sqlalchemy import Connection

from skyrl_tinker.api.process_table import ProcessTable
from skyrl_tinker.api.waiting.engine_client import EngineState, engine_state
from skyrl_tinker.api.waiting.engine_queues import EngineQueues
from skyrl_tinker.domain.ids import OwnerId, SessionId, is_openai, owner_of_openai
from skyrl_tinker.protocol.queue_views import QueuesView
from skyrl_tinker.protocol.schemas.now import ProcessUse
from skyrl_tinker.store import owners, server_state
from skyrl_tinker.store.console.parked_models import ParkedModel, parked_models
from skyrl_tinker.store.console.pending import NamedModel, PendingGroup, named_models, pending_groups
from skyrl_tinker.store.database.rows import database_time
from skyrl_tinker.store.store import Store
from skyrl_tinker.system.gpu_memory import GpuMemory, gpu_memory
from skyrl_tinker.system.off_loop import in_transfer_thread
from skyrl_tinker.system.processes import Identity


@dataclass(frozen=True, slots=True)
class Guest:
    """Owner of an OpenAI client's session."""

    owner_id: OwnerId | None
    owner: str


@dataclass(frozen=True, slots=True)
class ServerSnapshot:
    """State at `at`, in UTC seconds by the database's clock. `queues` None: the engine does not answer.

    `started_at`: by the clock of the server's host, to be shown and not compared with `at`.
    `models`: by key. `guests`: owners of the sessions of OpenAI clients that wait, which the store does not
    know yet.
    """

    at: float
    engine: EngineState
    started_at: float | None
    warning: str | None
    queues: QueuesView | None
    pending: Sequence[PendingGroup]
    models: Mapping[int, NamedModel]
    parked: Sequence[ParkedModel]
    guests: Mapping[str, Guest]
    processes: Sequence[ProcessUse]
    gpus: GpuMemory


class SnapshotReader:
    def __init__(self, store: Store, queues: EngineQueues, processes: ProcessTable, *, gpus: bool) -> None:
        """`gpus`: the server is on them."""
        self._store = store
        self._queues = queues
        self._processes = processes
        self._gpus = gpus

    async def read(self) -> ServerSnapshot:
        """Read it; one call at a time."""
        queues = await self._queues.view()
        gpus = await in_transfer_thread(gpu_memory) if self._gpus else GpuMemory()
        return await self._store.fetch(partial(self._build, queues=queues, gpus=gpus))

    def _build(self, conn: Connection, queues: QueuesView | None, gpus: GpuMemory) -> ServerSnapshot:
        server = server_state.get(conn, server_state.SERVER)
        identity = server and Identity(server["pid"], server["started_at"])
        return ServerSnapshot(
            database_time(conn),
            engine_state(conn),
            server and server["started_at"],
            server_state.get(conn, server_state.WARNING),
            queues,
            pending_groups(conn),
            named_models(conn, _models(queues)),
            parked_models(conn),
            _guests(conn, queues),
            self._processes.rows(identity, gpus.by_pid, _base_models(queues)),
            gpus,
        )


def _guests(conn: Connection, queues: QueuesView | None) -> dict[str, Guest]:
    views = () if queues is None else queues.sampling.values()
    sessions = (session for view in views for session in view.queued)
    waiting = {session: owner_of_openai(SessionId(session)) for session in sessions if is_openai(session)}
    return {session: Guest(owner, owners.name_of(conn, owner)) for session, owner in waiting.items()}


def _base_models(queues: QueuesView | None) -> dict[int, str]:
    return {} if queues is None else {pid: name for name, pids in queues.pids.items() for pid in pids}


def _models(queues: QueuesView | None) -> set[int]:
    views = () if queues is None else queues.training.values()
    return {model for view in views for model in (*view.running, *view.next_models)}
