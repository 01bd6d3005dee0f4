"""Channels between the processes of several hosts: frames of JSON and bytes, between holders of one token.

Both ends prove the token before anything else is read: each sends a nonce, then the connector an
HMAC-SHA256 of both nonces under the token, then the listener one of its own. Keys of the frames in either
direction come from the same nonces, so that nothing can be injected, repeated or reflected. What is said is
not hidden: a channel proves who speaks, it does not encrypt (RFC 2104 for the MAC).
"""

import hashlib
import hmac
import json
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from cost_model.errors import InputError

Address = tuple[str, int]
"""A host, by name or number, and a port."""

MOST_JSON_BYTES = 64 * 2**20
MOST_BLOB_BYTES = 64 * 2**20
"""What is longer is sent in pieces, by who sends it."""
PROOF_S = 10.0
"""So long may a peer take to prove the token."""
MOST_UNPROVEN = 64
"""So many connections may be proving at a time; one more, and the oldest of them is closed."""
UNTAKEN_S = 60.0
"""So long may what was sent stay unacknowledged."""
AGAIN_S = 0.25
_MAGIC = b"hetpipe\x01"
_NONCE_BYTES = 32
_REFUSED = bytes(hashlib.sha256().digest_size)  # in place of the listener's proof
_HEADER = struct.Struct("!IIQ")  # bytes of JSON and of the blob, number of the frame


def address_text(address: Address) -> str:
    """Return an address as it is written: a number of IPv6 in brackets, which keep it from the port.

    >>> address_text(("10.0.0.1", 29500)), address_text(("fd00::1", 1))
    ('10.0.0.1:29500', '[fd00::1]:1')
    """
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class ChannelError(RuntimeError):
    """A peer that is gone, silent, or does not hold the token; its message names it."""


class _DroppedError(ChannelError):
    """A peer that went before it said whether it holds the token: it may answer another time."""


class Channel:
    """One proven connection; any thread may send, one at a time receives."""

    def __init__(self, connection: socket.socket, peer: str, send_key: bytes, receive_key: bytes) -> None:
        self.peer = peer
        self._socket = connection
        self._keys = send_key, receive_key
        self._sent = self._received = 0
        self._sending = threading.Lock()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # a peer that takes nothing any more is gone
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNTAKEN_S))

    def fileno(self) -> int:
        """Return the descriptor, for `multiprocessing.connection.wait`: a frame is about to come."""
        return self._socket.fileno()

    @property
    def own_address(self) -> str:
        """Return the address of this end, by number: the one that reaches the peer."""
        return str(self._socket.getsockname()[0])

    @property
    def peer_address(self) -> str:
        """Return the address of the other end, by number."""
        return str(self._socket.getpeername()[0])

    def send(self, message: dict[str, Any], blob: bytes = b"") -> None:
        """Send a message and some bytes beside it.

        Raises: ChannelError if the peer is gone; ValueError for more than a frame may hold.
        """
        text = json.dumps(message, separators=(",", ":")).encode()
        if len(text) > MOST_JSON_BYTES or len(blob) > MOST_BLOB_BYTES:
            raise ValueError(f"{len(text):,} bytes of JSON and {len(blob):,} beside it are too much at once")
        with self._sending:
            head = _HEADER.pack(len(text), len(blob), self._sent)
            self._sent += 1
            proof = _mac(self._keys[0], head, text, blob)
            try:
                self._socket.sendall(head + text + blob + proof)
            except OSError as error:
                raise ChannelError(f"{self.peer} is gone ({error.strerror or error})") from None

    def receive(self, timeout_s: float | None = None) -> tuple[dict[str, Any], bytes]:
        """Return the next message of the peer, and the bytes beside it.

        Raises: ChannelError if none comes in time, the peer is gone, or a frame is not the peer's.
        """
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        head = self._exactly(_HEADER.size, end_s)
        text_bytes, blob_bytes, number = _HEADER.unpack(head)
        if text_bytes > MOST_JSON_BYTES or blob_bytes > MOST_BLOB_BYTES or number != self._received:
            raise ChannelError(f"{self.peer} sent what is no frame of its channel")
        text, blob = self._exactly(text_bytes, end_s), self._exactly(blob_bytes, end_s)
        if not hmac.compare_digest(
            self._exactly(hashlib.sha256().digest_size, end_s), _mac(self._keys[1], head, text, blob)
        ):
            raise ChannelError(f"{self.peer} sent a frame that it has not proven")
        self._received += 1
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise ChannelError(f"{self.peer} sent a message that is no JSON object")
        return message, blob

    def close(self) -> None:
        """End the connection; a thread that receives on it gets a ChannelError."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, count: int, end_s: float | None) -> bytes:
        return _exactly(self._socket, count, end_s, self.peer)


class Listener:
    """Takes connections on one address, each in a thread of its own until it has proven the token."""

    def __init__(self, listening: socket.socket, token: bytes, on_channel: Callable[[Channel], None]) -> None:
        """Begin to take connections.

        listening: as of `listening_socket`. on_channel: takes each channel, in its own thread; what it
        raises of ChannelError ends that channel alone.
        """
        self._socket, self._token, self._on_channel = listening, token, on_channel
        self._unproven: dict[socket.socket, None] = {}  # the oldest first
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._accept, daemon=True, name="hetpipe listener").start()

    @property
    def address(self) -> Address:
        """Return the number and the port that it listens on."""
        host, port = self._socket.getsockname()[:2]
        return str(host), int(port)

    def close(self) -> None:
        """Take no more connections; channels stay."""
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, address = self._socket.accept()
            except OSError:
                if not self._closed:
                    time.sleep(AGAIN_S)  # out of descriptors: others will end
                continue
            self._make_room()
            with self._lock:
                self._unproven[connection] = None
            threading.Thread(target=self._prove, args=(connection, address), daemon=True).start()

    def _make_room(self) -> None:
        """Let go the oldest that has not proven the token yet, where there are many.

        Whoever holds the token proves it within a round trip; so those who say nothing keep nobody out.
        """
        with self._lock:
            if len(self._unproven) < MOST_UNPROVEN:
                return
            oldest = next(iter(self._unproven))
            del self._unproven[oldest]
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)

    def _prove(self, connection: socket.socket, address: Any) -> None:
        peer = address_text(address[:2])
        try:
            channel = _proven(connection, self._token, peer, is_listener=True, end_s=_soon())
        except (ChannelError, OSError):
            connection.close()  # whoever it was: it learns nothing, and disturbs nobody
            return
        finally:
            with self._lock:
                self._unproven.pop(connection, None)
        with suppress(ChannelError):
            self._on_channel(channel)


def listening_socket(address: Address) -> socket.socket:
    """Return a socket that listens on one address, never on all of a host's; port 0 for any free one.

    Raises: InputError if it cannot.
    """
    host, port = address
    try:
        numbers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, number = numbers[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            if number[0] in ("0.0.0.0", "::"):
                raise InputError(f"{number[0]} is every interface of this host; name the address of one")
            listening.bind(number)
            listening.listen(MOST_UNPROVEN)
        except BaseException:
            listening.close()
            raise
    except OSError as error:
        raise InputError(
            f"{address_text(address)} cannot be listened on ({error.strerror or error}); is it an address of "
            "this host, and the port free?"
        ) from None
    return listening


def connect(address: Address, token: bytes, timeout_s: float, name: str = "") -> Channel:
    """Return a channel to a listener, tried again until it answers.

    name: of the peer in messages; else its address.

    Raises: ChannelError if it does not answer in time, or does not hold the token.
    """
    peer = f"{name} ({address_text(address)})" if name else address_text(address)
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            connection = socket.create_connection(address, min(PROOF_S, max(0.01, end_s - time.monotonic())))
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            try:
                return _proven(connection, token, peer, is_listener=False, end_s=_soon())
            except _DroppedError:
                connection.close()
                reason = "it drops connections"
            except BaseException:
                connection.close()
                raise
        if time.monotonic() + AGAIN_S > end_s:
            raise ChannelError(f"{peer} did not answer within {timeout_s:.3g} s ({reason})")
        time.sleep(AGAIN_S)


def _proven(
    connection: socket.socket, token: bytes, peer: str, *, is_listener: bool, end_s: float
) -> Channel:
    """Prove the token to a peer, and let it prove it; return the channel."""
    mine = secrets.token_bytes(_NONCE_BYTES)
    connection.settimeout(None)
    _say(connection, _MAGIC + mine, peer)
    if _exactly(connection, len(_MAGIC), end_s, peer, _DroppedError) != _MAGIC:
        raise ChannelError(f"{peer} is no process of hetpipe, or of another version")
    theirs = _exactly(connection, _NONCE_BYTES, end_s, peer, _DroppedError)
    both = theirs + mine if is_listener else mine + theirs  # the connector's first
    connectors, listeners = (
        _mac(token, b"proof of the ", role, both) for role in (b"connector", b"listener")
    )
    own, awaited = (listeners, connectors) if is_listener else (connectors, listeners)
    if not is_listener:  # it proves first: who does not hold the token hears nothing to try tokens on
        _say(connection, own, peer)
    found = _exactly(connection, len(awaited), end_s, peer, _DroppedError)
    if not hmac.compare_digest(found, awaited):
        if is_listener:
            _say(connection, _REFUSED, peer)
        elif found == _REFUSED:
            raise ChannelError(f"{peer} refused: it holds another token than this host")
        raise ChannelError(f"{peer} does not hold the token of this run")
    if is_listener:
        _say(connection, own, peer)
    keys = _mac(token, b"connector sends", both), _mac(token, b"listener sends", both)
    send_key, receive_key = keys[::-1] if is_listener else keys
    return Channel(connection, peer, send_key, receive_key)


def _say(connection: socket.socket, what: bytes, peer: str) -> None:
    try:
        connection.sendall(what)
    except OSError as error:
        raise _DroppedError(f"{peer} is gone ({error.strerror or error})") from None


def _exactly(
    connection: socket.socket,
    count: int,
    end_s: float | None,
    peer: str,
    gone: type[ChannelError] = ChannelError,
) -> bytes:
    """Return so many bytes of a peer; gone: what is raised where it is no longer there."""
    content = bytearray()
    while len(content) < count:
        left_s = None if end_s is None else end_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise ChannelError(f"{peer} was silent for too long")
        try:
            if not _is_ready(connection, left_s):
                continue
            piece = connection.recv(min(count - len(content), 2**20))
        except (OSError, ValueError) as error:  # ValueError: closed here, by another thread
            if isinstance(error, ValueError):
                raise ChannelError(f"the channel to {peer} is closed") from None
            raise gone(f"{peer} is gone ({error.strerror or error})") from None
        if not piece:
            raise gone(f"{peer} closed the connection")
        content += piece
    return bytes(content)


def _is_ready(connection: socket.socket, left_s: float | None) -> bool:
    """Return whether there is something to read, in time; the socket stays blocking for who sends."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(None if left_s is None else left_s * 1000))


def _mac(key: bytes, *parts: bytes) -> bytes:
    made = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        made.update(part)
    return made.digest()


def _soon() -> float:
    return time.monotonic() + PROOF_S
