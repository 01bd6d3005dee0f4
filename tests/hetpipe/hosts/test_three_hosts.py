"""The hosts of the tests are what they claim to be."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from three_hosts import NAMES, has_namespaces, three_hosts

pytestmark = pytest.mark.skipif(not has_namespaces(), reason="no network namespaces can be made here")


def test_hosts_have_names_and_reach_one_another_until_a_link_is_cut(tmp_path: Path):
    with three_hosts() as hosts:
        assert tuple(host.run("hostname").strip() for host in hosts) == NAMES
        server = hosts[1].start(
            sys.executable, "-c",
            "import socket; s = socket.create_server(('h1', 7001)); [s.accept(), s.accept()]",
            folder=tmp_path,
        )  # fmt: skip
        reach = (
            sys.executable, "-c",
            "import socket, time\n"
            "for _ in range(100):\n"
            "    try: socket.create_connection(('h1', 7001), 0.5); break\n"
            "    except ConnectionRefusedError: time.sleep(0.1)",
        )  # fmt: skip
        hosts[0].run(*reach)
        hosts[1].cut()
        with pytest.raises(subprocess.CalledProcessError):
            hosts[2].run(*reach)
        hosts[1].mend()
        hosts[2].shape("1gbit")
        hosts[2].run(*reach)
        server.communicate(timeout=20)
        assert server.returncode == 0
        left = hosts[0].start("sleep", "600", folder=tmp_path)
    left.communicate(timeout=20)
    assert left.returncode == -9
    found = subprocess.run(("ip", "netns", "list"), capture_output=True, text=True, check=True).stdout
    assert f"hetpipe-test-{os.getpid()}-" not in found
