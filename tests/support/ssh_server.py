"""A real sshd on each of some hosts, with keys of its own, and a configuration for ssh that knows them."""

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from three_hosts import Host

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
IS_HERE = Path(SSHD).exists() and all(map(shutil.which, ("ssh", "ssh-keygen")))
_AT_HOME = 'mount --bind "$0" "$1" && shift && exec "$@"'


@contextlib.contextmanager
def ssh_servers(folder: Path, *hosts: Host, home: Path | None = None, more: str = "") -> Iterator[Path]:
    """Run one on each host that lets this user in by a key; gives the configuration file for ssh.

    home: what is the folder of that name there, on hosts of their own, each time another: the one beside it
    that is called as the host. So the same path is another folder on each. more: lines of its configuration.
    """
    folder.mkdir(mode=0o700)
    for name in ("host", "user"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
    (folder / "authorized").write_text((folder / "user.pub").read_text())
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where it leaves its privileges
    with contextlib.ExitStack() as ends:
        for host in hosts:
            ends.enter_context(_server(folder, host, home, more))
        yield folder / "ssh_config"


@contextlib.contextmanager
def _server(folder: Path, host: Host, home: Path | None, more: str) -> Iterator[None]:
    port, address = _free_port(host), host.address
    own = folder / f"sshd_config-{host.name}"
    own.write_text(
        f"Port {port}\nListenAddress {address}\nHostKey {folder / 'host'}\nPidFile {own}.pid\n"
        f"AuthorizedKeysFile {folder / 'authorized'}\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
        f"PermitRootLogin yes\n{more}\n"
    )
    kind, key = (folder / "host.pub").read_text().split()[:2]
    with open(folder / "known", "a") as known:
        known.write(f"[{address}]:{port} {kind} {key}\n")
    with open(folder / "ssh_config", "a") as config:
        config.write(
            f"Host {address}\nPort {port}\nIdentityFile {folder / 'user'}\nIdentitiesOnly yes\n"
            f"UserKnownHostsFile {folder / 'known'}\n"
        )
    command = [SSHD, "-D", "-e", "-f", str(own)]
    if host.namespace is not None and home is not None:
        command = ["sh", "-c", _AT_HOME, str(home.with_name(host.name)), str(home), *command]
    server = host.start(*command, folder=folder, stdout=subprocess.DEVNULL)
    try:
        _wait_until_open(server)
        yield
    finally:
        server.terminate()
        server.communicate()


def _free_port(host: Host) -> int:
    if host.namespace is not None:
        return 2222
    with socket.socket() as free:
        free.bind((host.address, 0))
        return int(free.getsockname()[1])


def _wait_until_open(server: "subprocess.Popen[str]") -> None:
    assert server.stderr is not None
    said = []
    for line in server.stderr:
        said.append(line)
        if "Server listening" in line:
            return
    raise AssertionError("".join(said))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
