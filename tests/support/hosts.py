"""Hosts on this machine: namespaces on a bridge, each with its own network, processes, /dev/shm and /tmp."""

import os
import pwd
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from skyrl_tinker.system.processes import die_with_parent

TOOLS = ("unshare", "nsenter", "ip")
NETWORK = "10.77.0"
_WAIT = ("sleep", "infinity")
_OWN_MOUNTS = "mount -t tmpfs shm /dev/shm && mount -t tmpfs tmp /tmp && exec sleep infinity"
_WITHIN_S = 10.0


class Host:
    """One host. Files outside of /dev/shm and /tmp are those of this machine, as on a shared file system."""

    def __init__(self, network: "_Network", number: int) -> None:
        """Use `hosts`."""
        self.number = number
        self.address = f"{NETWORK}.{number}"
        self._network = network
        own = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        self._holder = _hold(*network.enter, *own, "sh", "-c", _OWN_MOUNTS)
        self.first = _only_child(self._holder.pid)
        network.run("ip", "link", "add", self._link, "type", "veth", "peer", "eth0", "netns", str(self.first))
        network.run("ip", "link", "set", self._link, "master", "bridge", "up")
        for line in (f"addr add {self.address}/24 dev eth0", "link set eth0 up", "link set lo up"):
            self.run("ip", *line.split())
        self.run("mkdir", "-p", self.home)

    @property
    def home(self) -> str:
        """Directory that no other host sees."""
        return "/tmp/home"

    @property
    def enter(self) -> tuple[str, ...]:
        """Beginning of a command line that runs on this host."""
        return ("nsenter", "--target", str(self.first), *self._network.user, "--net", "--mount", "--pid")

    def enter_as(self, user: str) -> tuple[str, ...]:
        """Beginning of a command line that runs here as another user; for root."""
        found = pwd.getpwnam(user)
        return (*self.enter, "--setuid", str(found.pw_uid), "--setgid", str(found.pw_gid))

    def popen(self, *command: str | Path, env: Mapping[str, str] | None = None, **options: Any) -> "Process":
        """Start a process on this host."""
        own = {**os.environ, "HOME": self.home, "TMPDIR": "/tmp", **(env or {})}
        return subprocess.Popen([*self.enter, *map(str, command)], env=own, **options)

    def run(self, *command: str | Path, env: Mapping[str, str] | None = None, **options: Any) -> str:
        """Run a command on this host; return what it prints."""
        process = self.popen(*command, env=env, stdout=subprocess.PIPE, text=True, **options)
        output, _ = process.communicate()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, [str(part) for part in command], output)
        return str(output)

    def kill(self) -> None:
        """Have it vanish: every process of it is killed, and its address answers nothing."""
        self._holder.kill()
        self._holder.wait()
        _wait_for(lambda: _has_ended(self.first))

    def cut(self) -> None:
        """Take it from the network."""
        self._network.run("ip", "link", "set", self._link, "down")

    @property
    def _link(self) -> str:
        return f"host{self.number}"


Process = subprocess.Popen[Any]


@contextmanager
def hosts(count: int) -> Iterator[tuple[Host, ...]]:
    """Make hosts; all that runs on them ends with the block, and nothing of them is left.

    It takes root, or a kernel that gives others namespaces (kernel.unprivileged_userns_clone).
    """
    network = _Network()
    made: list[Host] = []
    try:
        made.extend(Host(network, number) for number in range(1, count + 1))
        yield tuple(made)
    finally:
        for host in made:
            host.kill()
        network.close()


def why_not() -> str | None:
    """Return why no hosts can be made here; None where they can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"hosts need {', '.join(missing)}: apt-get install util-linux iproute2"
    tried = subprocess.run(
        ["unshare", *_user_namespace(), "--net", "--mount", "true"], capture_output=True, text=True
    )
    return f"this machine gives no namespaces: {tried.stderr.strip()}" if tried.returncode else None


class _Network:
    """Namespace with the bridge between the hosts; it ends with this process."""

    def __init__(self) -> None:
        self._holder = _hold("unshare", *_user_namespace(), "--net", "--mount", *_WAIT)
        self.user = ("--user", "--preserve-credentials") if _user_namespace() else ()
        self.enter = ("nsenter", "--target", str(self._holder.pid), *self.user, "--net", "--mount")
        _wait_for(lambda: os.readlink(f"/proc/{self._holder.pid}/ns/net") != os.readlink("/proc/self/ns/net"))
        for line in (
            "link set lo up",
            "link add bridge type bridge",
            f"addr add {NETWORK}.254/24 dev bridge",
        ):
            self.run("ip", *line.split())
        self.run("ip", "link", "set", "bridge", "up")

    def run(self, *command: str) -> None:
        subprocess.run([*self.enter, *command], check=True)

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()


def _hold(*command: str) -> Process:
    """Start what keeps namespaces there; it ends with this process, also when that is killed."""
    return subprocess.Popen(command, preexec_fn=partial(die_with_parent, signal.SIGKILL))


def _user_namespace() -> Sequence[str]:
    return () if os.geteuid() == 0 else ("--user", "--map-root-user")


def _only_child(pid: int) -> int:
    """Return the child that `unshare --fork` makes, once it is the host's first process."""
    children = Path(f"/proc/{pid}/task/{pid}/children")

    def ready() -> bool:
        child = children.read_text().strip()
        return bool(child) and Path(f"/proc/{child}/comm").read_text().strip() == _WAIT[0]

    _wait_for(ready)
    return int(children.read_text())


def _has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _wait_for(condition: Any) -> None:
    deadline = time.monotonic() + _WITHIN_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("a host did not come up")
        time.sleep(0.01)
