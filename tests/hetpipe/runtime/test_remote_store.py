import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore

import host_mains
from hetpipe.runtime import remote_store
from hetpipe.runtime.processes import RankGroup, WorkerLostError, run_ranks
from hetpipe.runtime.remote_store import STORE, LeadersStore, RemoteStore, StoreServer
from hetpipe.trust.channel import Channel, ChannelError, Listener, connect, listening_socket
from host_mains import TOKEN
from places import ROOT, SUPPORT


@pytest.fixture
def listener() -> Iterator[Listener]:
    server = StoreServer()

    def serve(channel: Channel) -> None:
        assert channel.receive(5.0)[0] == {"purpose": STORE}
        server.serve(channel)

    opened = Listener(listening_socket(("127.0.0.1", 0)), TOKEN, serve)
    yield opened
    opened.close()
    server.close()


def test_it_answers_as_torchs_own_store(listener: Listener, tmp_path: Path):
    stores = [RemoteStore(listener.address, TOKEN, 5.0), FileStore(str(tmp_path / "store"), 1)]
    for store in stores:
        store.set("a", "b")
        store.set("empty", b"")
    for ask in (
        lambda store: store.get("a"),
        lambda store: store.get("empty"),
        lambda store: store.add("n", 3),
        lambda store: store.add("n", -1),
        lambda store: store.get("n"),
        lambda store: store.check(["a", "n"]),
        lambda store: store.check(["a", "none"]),
        lambda store: store.compare_set("a", "c", "d"),
        lambda store: store.compare_set("a", "b", "d"),
        lambda store: store.get("a"),
        lambda store: store.delete_key("a"),
        lambda store: store.check(["a"]),
    ):
        found = [ask(store) for store in stores]
        assert found[0] == found[1]
    stores[0].close()


def test_a_wait_ends_when_another_gives_the_key_and_in_time_when_none_does(listener: Listener):
    mine, other = (RemoteStore(listener.address, TOKEN, 5.0) for _ in range(2))
    timer = threading.Timer(0.3, lambda: other.set("late", "here"))
    timer.start()
    assert mine.get("late") == b"here"
    with pytest.raises(ChannelError, match="nobody gave never"):
        mine.wait(["never"], timedelta(seconds=0.3))
    timer.join()
    mine.close()
    other.close()


def test_ranks_of_two_launchers_sum_over_it(listener: Listener):
    """All of them, and the first and the last alone."""
    other = subprocess.Popen(
        [sys.executable, str(SUPPORT / "host_mains.py"), str(listener.address[1]), "proven", "1"],
        env={**os.environ, "PYTHONPATH": f"{SUPPORT}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    events: list[dict[str, Any]] = []
    run_ranks(host_mains.pair_up, (), host_mains.proven_group(listener.address[1], (0, 2, 3)), events.append)
    events += json.loads(other.communicate(timeout=60)[0])
    assert sorted((event["rank"], event["all"], event["pair"]) for event in events) == [
        (0, 10.0, 5.0), (1, 10.0, 2.0), (2, 10.0, 3.0), (3, 10.0, 5.0)
    ]  # fmt: skip


def test_ranks_without_the_token_are_refused(listener: Listener):
    store = LeadersStore(listener.address, b"another token than that of the run", 5.0)
    group = RankGroup(("a", "b"), (1, 1), local=(0,), store=store)
    with pytest.raises(WorkerLostError, match="another token"):
        run_ranks(host_mains.pair_up, (), group)
    assert "another token" not in repr(group)


def test_garbage_beside_it_disturbs_nobody(listener: Listener):
    with socket.create_connection(listener.address) as raw:
        raw.sendall(b"\xff" * 100)
    store = RemoteStore(listener.address, TOKEN, 5.0)
    store.set("a", "b")
    assert store.get("a") == b"b"
    store.close()


def test_a_question_that_is_none_ends_that_channel_alone(listener: Listener):
    store = RemoteStore(listener.address, TOKEN, 5.0)
    for said in ({}, {"do": "set", "keys": []}, {"do": "add", "keys": ["n"], "amount": "much"}):
        other = connect(listener.address, TOKEN, 5.0)
        other.send({"purpose": STORE})
        other.send(said)
        with pytest.raises(ChannelError, match="closed"):
            other.receive(5.0)
        other.close()
    store.set("a", "b")
    assert store.get("a") == b"b"
    store.close()


def test_a_full_store_takes_no_more_and_says_so(listener: Listener, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote_store, "MOST_KEYS", 2)
    store = RemoteStore(listener.address, TOKEN, 5.0)
    store.set("a", "b")
    store.add("n", 1)
    with pytest.raises(ChannelError, match="holds 2 keys"):
        store.set("c", "d")
    assert store.add("n", 1) == 2 and store.get("a") == b"b" and store.num_keys() == 2
    store.close()
