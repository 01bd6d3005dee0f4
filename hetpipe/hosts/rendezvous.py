"""Where the launchers of one run meet: an address that names the leader, or a file that all hosts share."""

import json
import os
import re
import socket
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from cost_model.cluster import Cluster
from cost_model.errors import InputError
from cost_model.strict_files import did_you_mean
from hetpipe.hosts.own_interface import own_addresses
from hetpipe.trust.channel import Address, address_text

_TCP = re.compile(r"tcp://(?P<host>[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>\d{1,5})")
_FILE = "file://"
_LOOK_AGAIN_S = 0.2
_EXAMPLES = "give tcp://HOST:PORT, such as tcp://big:29500, or file:///FOLDER/NAME of a folder that all share"


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where hosts meet: an address, or a file. One of the two is None."""

    address: Address | None = None
    file: Path | None = None

    def __str__(self) -> str:
        return f"tcp://{address_text(self.address)}" if self.address else f"{_FILE}{self.file}"


def parse_rendezvous(text: str) -> Rendezvous:
    """Return the meeting place of a --rendezvous.

    >>> parse_rendezvous("tcp://big:29500").address
    ('big', 29500)

    Raises: InputError if it is neither an address nor a file.
    """
    if text.startswith(f"{_FILE}/"):
        return Rendezvous(file=Path(text.removeprefix(_FILE)))
    match = _TCP.fullmatch(text)
    if match is None or not 0 < int(match["port"]) < 2**16:
        raise InputError(f"--rendezvous is {text!r}; {_EXAMPLES}")
    return Rendezvous((match["host"].strip("[]"), int(match["port"])))


def numbers_of(host: str) -> list[str]:
    """Return the addresses, by number, that a host's name stands for; [] for an unknown one."""
    try:
        return list(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(host, None)))
    except OSError:
        return []


def is_own(number: str) -> bool:
    """Return whether an address is one of this host's."""
    family = socket.AF_INET6 if ":" in number else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((number, 0))
        except OSError:
            return False
    return True


def leads(address: Address, cluster: Cluster, node: str) -> bool:
    """Return whether this host, the node of that name, is the one that an address names.

    That is the node that has its name or host; where none has, the host that has the address.

    Raises: InputError for an unknown name, or an address that every host has.
    """
    host = address[0]
    for entry in cluster.nodes:
        if host in (entry.name, entry.host):
            return entry.name == node
    numbers = numbers_of(host)
    if not numbers:
        raise InputError(f"--rendezvous names {host!r}, whom this host does not know; give an address")
    for entry in cluster.nodes:
        if entry.host is not None and set(numbers_of(entry.host)) & set(numbers):
            return entry.name == node
    if any(map(_is_loopback, numbers)) and len(cluster.nodes) > 1:
        raise InputError(
            f"--rendezvous names {host!r}, which every host has for itself; name the address by which others "
            "reach the leader"
        )
    return any(map(is_own, numbers))


def own_node(cluster: Cluster, given: str | None) -> str:
    """Return the name of the node that this host is: the one given, else by the host's name, or its address.

    Raises: InputError if there is no such node, or name and address are that of none or of several.
    """
    names = [node.name for node in cluster.nodes]
    if given is not None:
        if given not in names:
            raise InputError(f"--node {given!r}: the cluster has no such node; {did_you_mean(given, names)}")
        return given
    here = socket.gethostname()
    known = {here, here.partition(".")[0]}
    found = [node.name for node in cluster.nodes if known & {node.name, node.host}]
    if not found:
        found = [node.name for node in cluster.nodes if node.host is not None and _is_here(node.host)]
    if len(found) != 1:
        which = "no node is" if not found else f"{' and '.join(found)} are"
        raise InputError(
            f"this host is called {here}, and {which} called so in the cluster file; give --node, or the "
            f"node its `host = {here!r}`"
        )
    return found[0]


def leaders_number(host: str) -> str:
    """Return which address of this host the leader is to listen on, for the name in a rendezvous.

    Raises: InputError if none is its own, or it is one that others do not reach.
    """
    own = [number for number in numbers_of(host) if is_own(number)]
    named = own[0] if own else ""
    if not own:
        raise InputError(f"{host!r} is no address of this host; let --rendezvous name one")
    if _is_loopback(named) and host != named:
        raise InputError(
            f"{host!r} is {named} on this host itself, by which no other reaches it; let --rendezvous give "
            "the leader's address as a number"
        )
    return named


def outer_number(host: str | None) -> str:
    """Return the address of this host that others reach it by: that of its name, else its only outer one.

    Raises: InputError if there is none, or there are several.
    """
    named = [number for number in numbers_of(host or socket.gethostname()) if is_own(number)]
    if outer := [number for number in named if not _is_loopback(number)]:
        return outer[0]
    if len(found := own_addresses()) != 1:
        raise InputError(
            f"this host has {'the addresses ' + ', '.join(found) if found else 'no outer address'}; say by "
            "which others reach it, with --rendezvous tcp://ADDRESS:PORT"
        )
    return found[0]


def check_trusted(number: str, *, trusts: bool) -> None:
    """Check that tensors may travel over the network of an address.

    Raises: InputError for an outer one that nobody vouches for.
    """
    if not trusts and not _is_loopback(number):
        raise InputError(
            "tensors travel by gloo and NCCL, which do not prove who sends them: give --trust-network if "
            f"only hosts that you trust reach {number}, as over WireGuard or a tunnel of ssh -w"
        )


def _is_here(host: str) -> bool:
    """Return whether a host has an address of this one; loopback is every host's."""
    return any(is_own(number) for number in numbers_of(host) if not _is_loopback(number))


def _is_loopback(number: str) -> bool:
    return ip_address(number.partition("%")[0]).is_loopback


class SharedFile:
    """A file in which the leader, who makes it, writes its address; of one run, removed at its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._made = False

    def make(self) -> bool:
        """Make the file; return whether this host did, and so leads.

        Raises: InputError if there is no such folder, or it cannot be written to.
        """
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except FileExistsError:
            return False
        except OSError as error:
            raise InputError(f"{self.path}: cannot be made ({error.strerror}); give another place") from None
        os.close(descriptor)
        self._made = True
        return True

    def write(self, address: Address) -> None:
        """Say, as the leader, where it listens.

        Raises: InputError if another run has replaced the file.
        """
        descriptor = os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps({"host": address[0], "port": address[1]}) + "\n")

    def read(self, wait_s: float, waiting: Callable[[], None] = lambda: None) -> Address:
        """Return where the leader listens, once it has said so.

        Raises: InputError if it does not in time, or the file is not one of ours.
        """
        end_s = time.monotonic() + wait_s
        while True:
            if (text := self._text()).endswith("\n"):
                return self._address(text)
            waiting()
            if time.monotonic() > end_s:
                raise InputError(
                    f"{self.path}: nobody wrote an address there within {wait_s:.3g} s; if it is left over, "
                    "remove it"
                )
            time.sleep(_LOOK_AGAIN_S)

    def remove(self) -> None:
        """Remove the file, if this host made it."""
        if self._made:
            self.path.unlink(missing_ok=True)
            self._made = False

    def _text(self) -> str:
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read ({error.strerror}); give another place") from None
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise InputError(f"{self.path}: is no file; give another place")
            return file.read(4096).decode(errors="replace")

    def _address(self, text: str) -> Address:
        try:
            found = json.loads(text)
            return str(found["host"]), int(found["port"])
        except (ValueError, TypeError, KeyError, RecursionError):
            raise InputError(
                f"{self.path}: holds no address of a leader; remove it, or give another place"
            ) from None
