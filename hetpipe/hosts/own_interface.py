"""The network interface of this host that has an address."""

import fcntl
import socket
import struct
from ipaddress import ip_address
from pathlib import Path

from cost_model.errors import InputError
from hetpipe.runtime.processes import LOOPBACK

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_IPV6 = Path("/proc/net/if_inet6")


def interface_of(number: str) -> str:
    """Return the name of the interface that has an address, given by number.

    Raises: InputError if none has it.
    """
    address = ip_address(number.partition("%")[0])
    if address.is_loopback:
        return LOOPBACK
    if address.version == 6:
        for line in _IPV6.read_text().splitlines():
            digits, *_, name = line.split()
            if int(digits, 16) == int(address):
                return name
    for found, name in _addresses().items():
        if found == number:
            return name
    raise InputError(
        f"no interface of this host has {number} as its first address; let --rendezvous name one"
    )


def own_addresses() -> list[str]:
    """Return the first address of each interface but loopback."""
    return [number for number in _addresses() if not ip_address(number).is_loopback]


def _addresses() -> dict[str, str]:
    """Return the interface of each IPv4 address, the first of each interface alone."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            found[socket.inet_ntoa(answer[20:24])] = name
    return found
