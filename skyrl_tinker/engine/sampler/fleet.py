"""The sampler replicas as one: current members, changes to all of them, their loss and return."""

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar
from urllib.parse import urlsplit

from skyrl_tinker.domain.values import Way
from skyrl_tinker.engine.colocation.placement import SEPARATE, AwakeLock, Placement
from skyrl_tinker.errors import SamplerError, TrainerError
from skyrl_tinker.inference.client.remote_client import RemoteInferenceClient
from skyrl_tinker.inference.client.replica_metrics import Replicas
from skyrl_tinker.inference.servers.health_checks import CoreWatch, Loss
from skyrl_tinker.inference.servers.router import Router
from skyrl_tinker.protocol.queue_views import INCIDENTS, Incident, ReplicaView
from skyrl_tinker.system.interfaces import is_here

ATTEMPTS = 5
NOTICED_WITHIN_S = 4.0  # from a failed request to the death that explains it: a death is noticed after 2 s
RETRY_S = 5.0
ADAPTERS_BY: tuple[Way, Way] = ("shared memory", "pull")
"""Ways of adapters to replicas on this host, and on other hosts."""
_URL = re.compile(
    r"(?P<server>https?://(?:\[[^\]\s]*\]|[\w.-]+)(?P<port>:\d+)?)(?P<path>(?:/[^\s:'\",;()]*)?)"
)
T = TypeVar("T")
Equip = Callable[[RemoteInferenceClient], Awaitable[None]]
Report = Callable[[], Awaitable[None]]
_log = logging.getLogger(__name__)


class Servers(Protocol):
    """Processes of the replicas: ServerGroup or ExternalServers of inference.servers."""

    async def wait_lost(self, index: int) -> Loss: ...
    def suspect(self) -> None: ...
    async def end(self, index: int) -> bool: ...
    async def replace(self, index: int) -> str: ...


@dataclass(eq=False)
class Fleet:
    """`client` reaches members only: replicas that are alive and have the current adapters and weights.

    Hold `changing` for every change that must reach all replicas: adapters, weights, new members. A member
    that dies is removed without it. An `equip` loads the current adapters and resident weights on one
    newcomer; it is called with `changing` held.

    Start without servers, until `open`.

    `client`: its proxy, if any, is a router that is not ours. `cores`: engine cores of each replica that
    decode, 0 if it computes prompts for others. `step_s`: a member whose core does not answer for longer
    is replaced. `clock`: of incidents.
    """

    client: RemoteInferenceClient
    _cores: Sequence[int]
    placement: Placement = SEPARATE
    step_s: float = 600.0
    clock: Callable[[], float] = time.time

    _servers: Servers = field(init=False)  # since `open`

    def __post_init__(self) -> None:
        self.changing = AwakeLock(self.placement)
        self._router: Router | None = None
        self._long_calls = 0
        self._proxy_url = self.client.proxy_url or None
        self.replicas = len(self._cores)
        self._members: dict[int, str] = {}
        self._names: dict[str, str] = {}  # by address, also of former members, whose errors may come late
        self._opened = False
        self._condemned: dict[int, Loss] = {}
        self._leaving: set[str] = set()  # former members whose processes may still run
        self._losses = 0
        self.generation = 0
        """Number of changes of the members: a newcomer knows nothing of former requests."""
        self.incidents: deque[Incident] = deque(maxlen=INCIDENTS)
        self._changed = asyncio.Event()
        self._attempts: dict[asyncio.Timeout, None] = {}  # that run, the oldest first

    @property
    def size(self) -> int:
        """Number of replicas that serve now."""
        return len(self._members)

    @property
    def endpoints(self) -> Replicas:
        """Return the replicas that serve now."""
        return self.client.control.http, self._members, self.client.dialect

    @property
    def cores(self) -> int:
        """Number of engine cores that decode now; each decodes as many sequences as any other."""
        return sum(self._cores[index] for index in self._members)

    @property
    def disaggregated(self) -> bool:
        """True if some replicas compute prompts, and others continue them."""
        return 0 in self._cores

    def view(self, ways: tuple[Way, Way]) -> tuple[ReplicaView, ...]:
        """Return all replicas, including those that are being replaced; none without servers.

        `ways`: of full parameters to replicas on this host, and on other hosts.
        """
        urls = [self._members.get(index) for index in range(self.replicas if self._opened else 0)]
        return tuple(_view(url, ways) if url else ReplicaView(None, "replaced") for url in urls)

    def open(self, servers: Servers, urls: Sequence[str], router: Router | None) -> None:
        """Begin with these servers, which are ready, and known to the router if it is ours."""
        self._servers, self._router, self._opened = servers, router, True
        if router is not None:
            self._proxy_url = router.url
        self._members = dict(enumerate(urls))
        self._retarget()

    def close(self) -> None:
        """Have no servers until `open`; requests to them are tried again then."""
        self._members, self._opened = {}, False
        self._condemned.clear()
        self._leaving.clear()
        self._losses += 1
        self._retarget()

    async def adopt(self, equip: Equip) -> None:
        """Equip external replicas: they may have weights from an earlier server."""
        async with self.changing.hold():
            for url in self.client.server_urls:
                await self._equip(url, equip)

    async def supervise(self, report: Report, equip: Equip) -> None:
        """Bring lost replicas back, indefinitely. Meanwhile training continues, and other replicas sample.

        `report`: called after every loss and return.
        """
        async with asyncio.TaskGroup() as tasks:
            for index in range(self.replicas):
                tasks.create_task(self._keep_replica(index, report, equip))
            if self._router is not None:
                tasks.create_task(self._keep_router(self._router))

    async def with_retry(self, attempt: Callable[[], Awaitable[T]], attempts: int = ATTEMPTS) -> T:
        """Make the attempt, and repeat it immediately if replicas were lost meanwhile and others serve.

        Waits while no replica serves, and for the trainer if it died while sending weights. Raises
        SamplerError if the attempt failed for another reason, or as often as there are `attempts`;
        its text is for clients.
        """
        while True:
            await self._wait_for(lambda: self.size > 0)
            losses = self._losses
            try:
                return await self._interruptible(attempt)
            except TrainerError as error:
                _log.info("tried again when the trainer is back: %s", error)
                await asyncio.sleep(RETRY_S)
            except SamplerError as error:
                attempts -= 1
                if not attempts or not await self._loss_since(losses):
                    if (told := self.without_urls(str(error))) != str(error):
                        _log.warning("a request failed: %s", error)
                        error.args = (told,)
                    raise
                _log.info("tried again after a loss: %s", error)

    def without_urls(self, text: str) -> str:
        """Name replicas in a text for clients, for whom URLs of servers are not: one of weights opens them.

        Those without a port, as of documentation, stay unless they are of a replica.
        """

        def shown(found: re.Match[str]) -> str:
            if name := self._names.get(found["server"]):
                return name + found["path"]
            return "…" if found["port"] else found[0]

        return _URL.sub(shown, text)

    def condemn(self, url: str, reason: str) -> None:
        """End and replace a member that must no longer serve. No effect if it is not a member."""
        for index, member in list(self._members.items()):
            if member == url:
                self._condemned[index] = Loss(index, url, reason, silent=True)
                self._remove(index)

    @contextmanager
    def long_calls(self) -> Iterator[None]:
        """Enclose calls that may occupy the cores of members for longer than a step."""
        self._long_calls += 1
        try:
            yield
        finally:
            self._long_calls -= 1

    async def wait_ended(self, url: str) -> None:
        """Wait until this former member's process has ended, and its memory is free."""
        await self._wait_for(lambda: url not in self._leaving)

    # Replicas

    async def _keep_replica(self, index: int, report: Report, equip: Equip) -> None:
        while True:
            loss = await self._wait_lost(index)
            _log.error("sampler %d at %s is lost and is replaced: %s", index, loss.url, loss.reason)
            self.incidents.append(
                Incident(self.clock(), f"sampler {index} at {loss.url} was lost: {loss.reason}")
            )
            self._remove(index)
            await report()
            await self._end(loss)
            self._leaving.discard(loss.url)
            self._note_change()
            await _insist(f"sampler {index} could not be replaced", partial(self._replace, index, equip))
            await report()

    async def _wait_lost(self, index: int) -> Loss:
        """Return once this member has died, is stuck or is condemned."""
        if index in self._condemned:
            return self._condemned.pop(index)
        lost = asyncio.ensure_future(self._servers.wait_lost(index))
        stuck = asyncio.ensure_future(self._wait_stuck(index))
        condemned = asyncio.ensure_future(self._wait_for(lambda: index in self._condemned))
        try:
            await asyncio.wait((lost, stuck, condemned), return_when=asyncio.FIRST_COMPLETED)
            return self._condemned.pop(index, None) or (lost if lost.done() else stuck).result()
        finally:
            for watch in (lost, stuck, condemned):
                watch.cancel()

    async def _wait_stuck(self, index: int) -> Loss:
        client = self.client
        watched = self._members[index], client.dialect.core_path, client.control.http
        watch = CoreWatch(*watched, self.step_s, lambda: self._long_calls > 0 or self.placement.asleep)
        return await watch.wait_stuck(index)

    def _remove(self, index: int) -> None:
        if index in self._members:
            self._leaving.add(self._members.pop(index))
            self._losses += 1
            self._retarget()

    async def _end(self, loss: Loss) -> None:
        """End a lost replica, and with it all requests that wait for it."""
        if self._router is not None:
            await self._router.remove(loss.url)
            self._losses += 1  # it has received requests until now
            self._note_change()
        ended = await self._servers.end(loss.index)
        if loss.silent and not ended:  # its requests are not known
            self._losses += 1  # also explains requests that began after it was dropped
            self._note_change()
            now = asyncio.get_running_loop().time()
            for attempt in self._attempts:
                if not attempt.expired():
                    attempt.reschedule(now)

    async def _replace(self, index: int, equip: Equip) -> None:
        async with self.placement.awake():  # it needs memory that the trainer has in its phases
            url = await self._servers.replace(index)
            await self._admit(index, url, equip)
        _log.info("sampler %d serves again at %s", index, url)

    async def _admit(self, index: int, url: str, equip: Equip) -> None:
        """Equip a newcomer and make it a member. Raises SamplerError if it dies before."""
        async with self.changing.hold():
            equipping = asyncio.ensure_future(self._equip(url, equip))
            lost = asyncio.ensure_future(self._servers.wait_lost(index))
            try:
                await asyncio.wait((equipping, lost), return_when=asyncio.FIRST_COMPLETED)
                if not equipping.done():
                    await self._servers.end(index)  # nothing waits for it any more
                    equipping.cancel()
                    await asyncio.wait((equipping,))  # an aborted sync must clean up before the next one
                    raise SamplerError(f"{url} was lost before it served: {lost.result().reason}")
                equipping.result()
            finally:
                equipping.cancel()
                lost.cancel()
            if self._router is not None:
                await self._add_to(self._router, url)
            self._members[index] = url
            self._retarget()

    async def _add_to(self, router: Router, url: str) -> None:
        """Add a worker; a single member serves all requests if the router has to restart for it."""
        if not router.disaggregates:
            return await router.add(url)
        self._losses += 1  # also for requests in flight in the router
        self._proxy_url = None
        self._retarget()
        try:
            await router.add(url)
        finally:
            self._proxy_url = router.url

    async def _equip(self, url: str, equip: Equip) -> None:
        client = self.client
        newcomer = RemoteInferenceClient(url, (url,), client.token, client.locate, dialect=client.dialect)
        try:
            await equip(newcomer)
        finally:
            await newcomer.close()

    def _retarget(self) -> None:
        self._names |= {_address(url): f"sampler {index}" for index, url in self._members.items()}
        if self._proxy_url:
            self._names.setdefault(_address(self._proxy_url), "the router")
        urls = tuple(url for _, url in sorted(self._members.items()))
        alone = urls[0] if urls else self.client.proxy_url
        routed = self._router is None or self._router.enough(urls)
        self.client.retarget((routed and self._proxy_url) or alone, urls)
        self.generation += 1
        self._note_change()

    # The router

    async def _keep_router(self, router: Router) -> None:
        while True:
            reason = await router.wait_died()
            _log.error("%s and is started again", reason)
            self.incidents.append(Incident(self.clock(), reason))
            self._losses += 1
            self._proxy_url = None  # one member serves all requests meanwhile
            self._retarget()
            await _insist("the router could not be started again", router.start)
            self._proxy_url = router.url
            self._retarget()

    # Requests that wait

    async def _interruptible(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Make the attempt. SamplerError if it was ended because a replica may hold it indefinitely."""
        held = asyncio.timeout(None)
        try:
            async with held:
                self._attempts[held] = None
                return await attempt()
        except TimeoutError:
            if not held.expired():  # it is the attempt's own
                raise
            raise SamplerError("a sampler that does not answer may have held the request") from None
        finally:
            self._attempts.pop(held, None)

    async def _loss_since(self, losses: int) -> bool:
        """Wait for a loss after `losses` was read; return False if there is none: the fault is elsewhere."""
        self._servers.suspect()
        try:
            async with asyncio.timeout(NOTICED_WITHIN_S):
                await self._wait_for(lambda: self._losses > losses)
        except TimeoutError:
            return False
        return True

    async def _wait_for(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _address(url: str) -> str:
    """Return a URL without its path."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


async def _insist(failure: str, work: Callable[[], Awaitable[None]]) -> None:
    """Do work until it succeeds."""
    while True:
        try:
            return await work()
        except SamplerError as error:
            _log.error("%s, trying again in %.0f s: %s", failure, RETRY_S, error)
            await asyncio.sleep(RETRY_S)


def _view(url: str, ways: tuple[Way, Way]) -> ReplicaView:
    try:
        elsewhere = not is_here(url)
    except OSError:  # its host name does not resolve now
        elsewhere = True
    return ReplicaView(url, "serving", urlsplit(url).hostname, ways[elsewhere], ADAPTERS_BY[elsewhere])
