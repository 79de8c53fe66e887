"""Transport that chooses by replica: shared memory on the engine's host, gloo to those on other hosts."""

from collections.abc import Callable, Sequence

from skyrl_tinker.errors import TrainerError
from skyrl_tinker.interfaces import is_here
from skyrl_tinker.weight_sync.chunks import WeightChunk
from skyrl_tinker.weight_sync.gloo import GlooTransport
from skyrl_tinker.weight_sync.shared_memory import SharedMemoryTransport
from skyrl_tinker.weight_sync.transport import Message, WeightSource


class ByHostTransport:
    """One sync over both, with the same chunks; gloo's group has the replicas on other hosts.

    While the trainer is down and cannot send, these replicas pull the files instead.
    """

    backend = SharedMemoryTransport.backend
    staged = True
    takes_captured = False
    ways = (SharedMemoryTransport.ways[0], GlooTransport.ways[1])

    def __init__(
        self, near: SharedMemoryTransport, far: GlooTransport, is_near: Callable[[str], bool] = is_here
    ) -> None:
        self.members: tuple[str, ...] = ()
        self._near = near
        self._far = far
        self._is_near = is_near
        self._replicas: Sequence[str] = ()
        self._elsewhere: tuple[str, ...] = ()  # replicas reached by gloo

    async def open(self, source: WeightSource, replicas: Sequence[str]) -> Sequence[WeightChunk]:
        self._replicas = replicas
        self._elsewhere = await self._open_far(source)
        if self._far.members != self._elsewhere:
            self.members = ()
        return await self._near.open(source, replicas)

    async def _open_far(self, source: WeightSource) -> tuple[str, ...]:
        """Return the replicas that the trainer sends to."""
        elsewhere = tuple(replica for replica in self._replicas if not self._is_near(replica))
        if elsewhere:
            try:
                await self._far.open(source, elsewhere)
            except TrainerError:
                return ()
        return elsewhere

    async def form(self, workers: Sequence[int]) -> Sequence[Message]:
        joining = zip(self._replicas, workers, strict=True)
        far = [count for replica, count in joining if replica in self._elsewhere]
        return self._by_replica(await self._near.form(workers), await self._far.form(far) if far else ())

    async def meet(self) -> None:
        if self._elsewhere:
            await self._far.meet()
        self._far.members = self._elsewhere

    async def load(self, index: int) -> Sequence[Message]:
        far = await self._far.load(index) if self._elsewhere else ()
        return self._by_replica(await self._near.load(index), far)

    async def send(self) -> None:
        if self._elsewhere:
            await self._far.send()

    async def close(self) -> None:
        await self._near.close()
        if self._elsewhere:
            await self._far.close()

    async def leave(self) -> None:
        self.members = ()
        await self._far.leave()

    def _by_replica(self, near: Sequence[Message], far: Sequence[Message]) -> Sequence[Message]:
        """Return a message per replica: gloo's for replicas on other hosts, else that of shared memory."""
        sent = dict(zip(self._elsewhere, far, strict=True))
        return [sent.get(replica, each) for replica, each in zip(self._replicas, near, strict=True)]
