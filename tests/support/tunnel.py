"""WireGuard between two hosts of namespaces, by the configuration in docs/security.md."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.support.hosts import NETWORK, Host
from tests.support.pages import block

PORT = 51820
_PROGRAMS = ("wg", "wg-quick", "wireguard-go")
_GATEWAY = f"{NETWORK}.254"


def why_no_tunnel() -> str | None:
    """Return why no tunnel can be made here; None where one can."""
    if os.geteuid() != 0:
        return "a tunnel needs root"
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    return f"no {', '.join(missing)}: apt-get install wireguard-tools wireguard-go" if missing else None


def look_outwards(host: Host) -> None:
    """Let all that finds its own address by the default route, or by the host's name, find that of `eth0`."""
    host.run("ip", "route", "add", "default", "via", _GATEWAY, "dev", "eth0")
    names = Path(host.home) / "names"
    name = os.uname().nodename
    lines = f"127.0.0.1 localhost\n{host.address} {name}\n"
    host.run("sh", "-c", f'printf "%s" "$0" > {names} && mount --bind {names} /etc/hosts', lines)


def join_by_tunnel(first: Host, second: Host) -> None:
    """Make the tunnel; the addresses of the hosts are then those in it."""
    Path("/run/wireguard").mkdir(exist_ok=True)
    private = [_output("wg", "genkey"), _output("wg", "genkey")]
    public = [_output("wg", "pubkey", given=key) for key in private]
    configuration = block("docs/security.md: [Interface]").text
    inside = re.findall(r"10\.0\.0\.\d", configuration)
    for host, peer, mine, theirs in ((first, second, 0, 1), (second, first, 1, 0)):
        values = {
            "PRIVATE_KEY_OF_HOST_1": private[mine],
            "PUBLIC_KEY_OF_HOST_2": public[theirs],
            "192.0.2.2": peer.address,
            inside[0]: inside[mine],
            inside[1]: inside[theirs],
        }
        _raise_interface(host, _replaced(configuration, values))
    first.address, second.address = inside


def _replaced(text: str, values: Mapping[str, str]) -> str:
    """Replace all at once: a value may contain what another one replaces."""
    return re.sub("|".join(map(re.escape, values)), lambda found: values[found[0]], text)


def _raise_interface(host: Host, configuration: str) -> None:
    file = Path(host.home) / "wg0.conf"
    host.run("mount", "-t", "tmpfs", "tmpfs", "/run/wireguard")
    host.run("sh", "-c", f'umask 077 && printf %s "$0" > {file}', configuration)
    host.run("wg-quick", "up", file, stderr=subprocess.PIPE)


def _output(*command: str, given: str | None = None) -> str:
    return subprocess.run(command, input=given, capture_output=True, text=True, check=True).stdout.strip()
