"""What the other hosts of a run are told, and how they end with who started them."""

from hetpipe.hosts.ssh import STARTS_NONE, launch_words

PLACE = ["--rendezvous", "tcp://a:1", "--node", "b", "--token-file", "-"]


def test_what_starts_hosts_here_is_not_said_there():
    given = ["run", "job.toml", "--hosts", "--ssh-config", "config", "--node=a", "--json", "-q"]
    assert launch_words(given, "b", "tcp://a:1", "-") == ["run", "job.toml", "-q", *PLACE]


def test_what_a_run_file_says_is_taken_back_last():
    words = launch_words(["run", "job.toml", "--print-launch"], "b", "tcp://a:1", "-", [STARTS_NONE])
    assert words == ["run", "job.toml", *PLACE, "--no-hosts"]
