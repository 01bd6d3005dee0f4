import queue
import socket
import struct
import threading
import time
from contextlib import suppress

import pytest

from cost_model.errors import InputError
from hetpipe.trust import channel as channel_module
from hetpipe.trust.channel import Channel, ChannelError, Listener, connect, listening_socket

TOKEN = b"0123456789abcdef0123456789abcdef"


@pytest.fixture
def opened():
    """A listener, and the channels that it has taken."""
    taken: queue.Queue[Channel] = queue.Queue()
    ends: list[Channel] = []

    def take(channel: Channel) -> None:
        ends.append(channel)
        taken.put(channel)

    def connected(token: bytes = TOKEN, name: str = "") -> Channel:
        ends.append(connect(listener.address, token, 5.0, name))
        return ends[-1]

    listener = Listener(listening_socket(("127.0.0.1", 0)), TOKEN, take)
    yield listener, taken, connected
    listener.close()
    for channel in ends:
        channel.close()


def test_messages_and_bytes_arrive_in_order_both_ways(opened):
    _, taken, connected = opened
    mine = connected()
    theirs = taken.get(timeout=5)
    for number in range(20):
        mine.send({"number": number, "text": "ä\x00"}, bytes([number]) * 100_000)
    for number in range(20):
        assert theirs.receive(5.0) == ({"number": number, "text": "ä\x00"}, bytes([number]) * 100_000)
    theirs.send({"answer": None})
    assert mine.receive(5.0) == ({"answer": None}, b"")
    assert mine.own_address == theirs.peer_address == "127.0.0.1"


def test_threads_send_side_by_side(opened):
    _, taken, connected = opened
    mine = connected()
    theirs = taken.get(timeout=5)
    threads = [
        threading.Thread(target=lambda: [mine.send({}, b"x" * 10_000) for _ in range(50)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    assert [theirs.receive(5.0) for _ in range(200)] == [({}, b"x" * 10_000)] * 200
    for thread in threads:
        thread.join()


def test_another_token_gets_nothing_and_disturbs_nobody(opened):
    _, taken, connected = opened
    with pytest.raises(ChannelError, match="another token"):
        connected(b"f" * 32)
    assert taken.empty()
    connected().send({"still": "here"})
    assert taken.get(timeout=5).receive(5.0)[0] == {"still": "here"}


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"hetpipe\x01" + b"\x00" * 64, b"\xff" * 10_000])
def test_garbage_is_not_parsed(opened, said: bytes):
    listener, taken, _ = opened
    with socket.create_connection(listener.address) as other:
        other.sendall(said)
        other.settimeout(5)
        heard = b""
        try:
            while piece := other.recv(1000):
                heard += piece
        except ConnectionResetError:
            pass
        assert len(heard) <= 40 or heard[40:] == bytes(32)  # a nonce and a no: no proof to try tokens on
    assert taken.empty()


def test_who_says_nothing_is_let_go(opened, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channel_module, "PROOF_S", 0.2)
    listener, _, _ = opened
    with socket.create_connection(listener.address) as other:
        other.settimeout(5)
        assert len(other.recv(40)) == 40
        assert other.recv(1) == b""


def is_open(connection: socket.socket) -> bool:
    """Return whether the other end of a connection has not closed it."""
    connection.setblocking(False)
    try:
        while connection.recv(1000):
            pass
    except BlockingIOError:
        return True
    except ConnectionResetError:
        pass
    return False


def test_many_who_say_nothing_or_little_keep_nobody_out(opened):
    """More than may prove the token at a time, each with a byte now and then."""
    listener, taken, connected = opened
    slow = [socket.create_connection(listener.address) for _ in range(2 * channel_module.MOST_UNPROVEN)]
    for sign in channel_module._MAGIC[:3]:
        for other in slow:
            with suppress(OSError):  # the oldest have been let go
                other.sendall(bytes([sign]))
    begun_s = time.monotonic()
    connected().send({"still": "here"})
    assert taken.get(timeout=5).receive(5.0)[0] == {"still": "here"}
    assert time.monotonic() - begun_s < channel_module.PROOF_S / 2
    assert sum(map(is_open, slow)) <= channel_module.MOST_UNPROVEN
    for other in slow:
        other.close()


def test_who_is_dropped_before_an_answer_tries_again():
    listening = listening_socket(("127.0.0.1", 0))
    taken: queue.Queue[Channel] = queue.Queue()
    waiting: queue.Queue[Channel | ChannelError] = queue.Queue()

    def reach() -> None:
        try:
            waiting.put(connect(listening.getsockname(), TOKEN, 20.0))
        except ChannelError as error:
            waiting.put(error)

    thread = threading.Thread(target=reach)
    thread.start()
    for said in (b"", channel_module._MAGIC + b"n" * 32):
        peer, _ = listening.accept()
        peer.sendall(said)
        peer.close()
    listener = Listener(listening, TOKEN, taken.put)
    found = waiting.get(timeout=30)
    assert isinstance(found, Channel)
    thread.join()
    listener.close()
    found.close()
    taken.get(timeout=5).close()


def test_a_listener_without_the_token_is_found_out():
    """It may not even reflect what it is told."""
    listening = listening_socket(("127.0.0.1", 0))

    def reflect() -> None:
        peer, _ = listening.accept()
        with peer:
            while said := peer.recv(4096):
                peer.sendall(said)

    thread = threading.Thread(target=reflect)
    thread.start()
    with pytest.raises(ChannelError, match="does not hold the token"):
        connect(listening.getsockname(), TOKEN, 5.0)
    thread.join()
    listening.close()


@pytest.mark.parametrize("spoil", ["text", "length", "again"])
def test_a_frame_that_is_not_the_peers_is_refused(opened, spoil: str):
    _, taken, connected = opened
    mine = connected()
    theirs = taken.get(timeout=5)
    mine.send({"pay": 1})
    assert theirs.receive(5.0)[0] == {"pay": 1}
    raw = mine._socket
    if spoil == "length":
        raw.sendall(struct.pack("!IIQ", 2**31, 0, 1))
    elif spoil == "text":
        raw.sendall(struct.pack("!IIQ", 9, 0, 1) + b'{"pay":2}' + b"\x00" * 32)
    else:
        mine._sent = 0
        mine.send({"pay": 1})
    with pytest.raises(ChannelError):
        theirs.receive(5.0)


def test_silence_and_loss_are_named(opened):
    _, taken, connected = opened
    mine = connected(name="node big")
    theirs = taken.get(timeout=5)
    with pytest.raises(ChannelError, match=r"node big .*silent"):
        mine.receive(0.1)
    theirs.close()
    with pytest.raises(ChannelError, match=r"node big .*closed"):
        mine.receive(5.0)


def test_nobody_there_is_one_line():
    free = listening_socket(("127.0.0.1", 0))
    address = free.getsockname()
    free.close()
    begun_s = time.monotonic()
    with pytest.raises(ChannelError, match=r"did not answer within 0.5 s \(Connection refused\)"):
        connect(address, TOKEN, 0.5)
    assert time.monotonic() - begun_s < 5


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_only_one_address_of_this_host_is_listened_on(host: str):
    with pytest.raises(InputError):
        listening_socket((host, 0))
