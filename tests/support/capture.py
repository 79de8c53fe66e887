"""Frames that pass a network interface, by protocol and ports; runs on a host of tests.support.hosts."""

import json
import select
import socket
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.hosts import NETWORK, Host

_ALL_PROTOCOLS, _SOL_PACKET, _PACKET_STATISTICS, _SO_RCVBUFFORCE = 3, 263, 6, 33
_BUFFER_BYTES = 1 << 28
_HEADERS_BYTES = 128
_NAMES = {1: "icmp", 6: "tcp", 17: "udp", 58: "icmp6"}


@dataclass
class Captured:
    """Bytes by protocol and ports, as `arp` and `udp 51820 > 51820`; complete when the block ends.

    `elsewhere`: to and from others than hosts, such as the metadata service of a cloud, which Ray looks for.
    """

    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def ports(self) -> set[int]:
        return {int(word) for each in self.sizes for word in each.split() if word.isdecimal()}


@contextmanager
def captured(host: Host, interface: str) -> Iterator[Captured]:
    """Capture all that a host sends and receives on an interface while the block runs."""
    command = (sys.executable, "-m", "tests.support.capture", interface)
    process = host.popen(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "listening\n"
    found = Captured()
    try:
        yield found
    finally:
        output, _ = process.communicate()  # it ends when its input does
    seen = json.loads(output)
    assert seen["dropped"] == 0, "too slow to see all"
    found.sizes = seen["sizes"]


def _capture(interface: str) -> dict[str, Any]:
    sizes: Counter[str] = Counter()
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as frames:
        frames.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
        frames.bind((interface, _ALL_PROTOCOLS))
        print("listening", flush=True)
        while True:
            ready, _, _ = select.select([frames, sys.stdin], [], [])
            if frames not in ready:
                break
            headers = bytearray(_HEADERS_BYTES)
            size = frames.recv_into(headers, flags=socket.MSG_TRUNC)
            sizes[_name(bytes(headers))] += size
        statistics = frames.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8)
    return {"sizes": sizes, "dropped": struct.unpack("II", statistics)[1]}


def _name(frame: bytes) -> str:
    (kind,) = struct.unpack_from("!H", frame, 12)
    if kind == 0x0800:
        if not all(socket.inet_ntoa(frame[at : at + 4]).startswith(f"{NETWORK}.") for at in (26, 30)):
            return "elsewhere"
        return _of_ip(frame[23], frame[14 + 4 * (frame[14] & 15) :])
    if kind == 0x86DD and frame[20] == 0:  # hop-by-hop options, as a listener of a multicast group has them
        return _of_ip(frame[54], frame[62:])
    if kind == 0x86DD:
        return _of_ip(frame[20], frame[54:])
    return "arp" if kind == 0x0806 else f"ethernet {kind:#06x}"


def _of_ip(protocol: int, content: bytes) -> str:
    name = _NAMES.get(protocol, f"protocol-{protocol}")
    if protocol not in (6, 17):
        return name
    source, target = struct.unpack_from("!HH", content)
    return f"{name} {source} > {target}"


if __name__ == "__main__":
    print(json.dumps(_capture(sys.argv[1])))
