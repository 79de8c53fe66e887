"""Network interfaces of this host."""

import psutil


def interface_of(address: str) -> str:
    """Return the name of the interface that has an IP address. Raises LookupError if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    raise LookupError(f"no network interface of this host has the address {address}")
