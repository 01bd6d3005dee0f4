"""A real sshd on a loopback address, with keys of its own, and a configuration for ssh that knows it."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
IS_HERE = Path(SSHD).exists() and all(map(shutil.which, ("ssh", "ssh-keygen")))


@contextlib.contextmanager
def ssh_server(folder: Path, host: str) -> Iterator[Path]:
    """Run one that lets this user in by a key; gives the configuration file for ssh."""
    folder.mkdir(mode=0o700)
    for name in ("host", "user"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
    (folder / "authorized").write_text((folder / "user.pub").read_text())
    with socket.socket() as free:
        free.bind((host, 0))
        port = free.getsockname()[1]
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress {host}\nHostKey {folder / 'host'}\nPidFile {folder / 'pid'}\n"
        f"AuthorizedKeysFile {folder / 'authorized'}\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
        "PermitRootLogin yes\n"
    )
    kind, key = (folder / "host.pub").read_text().split()[:2]
    (folder / "known").write_text(f"[{host}]:{port} {kind} {key}\n")
    (folder / "ssh_config").write_text(
        f"Host {host}\nPort {port}\nIdentityFile {folder / 'user'}\nIdentitiesOnly yes\n"
        f"UserKnownHostsFile {folder / 'known'}\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where it leaves its privileges
    server = subprocess.Popen(
        [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=subprocess.PIPE, text=True
    )
    try:
        _wait_until_open(host, port, server)
        yield folder / "ssh_config"
    finally:
        server.terminate()
        server.communicate()


def _wait_until_open(host: str, port: int, server: "subprocess.Popen[str]") -> None:
    end_s = time.monotonic() + 20
    while True:
        try:
            socket.create_connection((host, port), 1).close()
            return
        except OSError:
            assert server.poll() is None, server.communicate()[1]
            assert time.monotonic() < end_s
            time.sleep(0.05)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
