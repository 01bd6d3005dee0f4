"""What the other hosts of a run are told, and how they end with who started them."""

import signal
import subprocess
import sys

import pytest

from hetpipe.hosts.ssh import STARTS_NONE, launch_words
from places import ROOT

PLACE = ["--rendezvous", "tcp://a:1", "--node", "b", "--token-file", "-"]


def test_what_starts_hosts_here_is_not_said_there():
    given = ["run", "job.toml", "--hosts", "--ssh-config", "config", "--node=a", "--json", "-q"]
    assert launch_words(given, "b", "tcp://a:1", "-") == ["run", "job.toml", "-q", *PLACE]


def test_what_a_run_file_says_is_taken_back_last():
    words = launch_words(["run", "job.toml", "--print-launch"], "b", "tcp://a:1", "-", [STARTS_NONE])
    assert words == ["run", "job.toml", *PLACE, "--no-hosts"]


STARTED = """
import signal, sys, time
from hetpipe.hosts.ssh import end_with_input
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup leaves it, also to an sshd
assert sys.stdin.readline() == "token\\n"
end_with_input()
print("here", flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize(("own_s", "code"), [("0.3", 0), ("60", -signal.SIGHUP)])
def test_a_process_ends_by_itself_in_silence_and_with_its_input(own_s: str, code: int):
    """A thread waits for input meanwhile, which does not disturb the end of Python."""
    with subprocess.Popen(
        [sys.executable, "-c", STARTED, own_s], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.write("token\n")
        process.stdin.flush()
        assert process.stdout.readline() == "here\n"
        if code:
            process.stdin.close()
        assert process.wait(20.0) == code
        assert process.stderr.read() == ""
