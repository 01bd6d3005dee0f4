"""Do messages that meet on a real link take turns, or share it? See README.md. As root."""

import argparse
import json
import socket
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from main import machine, three_hosts

PORT = 9000
RATES = {"12mbit": 12e6, "200mbit": 200e6}
LATER = 0.02  # of a message's own seconds: when the second one begins
PAUSE_S = 0.3


def main() -> None:
    if sys.argv[1:2] == ["receive"]:
        _receive(sys.argv[2], *map(int, sys.argv[3:]))
    elif sys.argv[1:2] == ["send"]:
        _send(sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]))
    else:
        _table(_options())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", nargs="+", default=list(RATES), choices=RATES)
    parser.add_argument("--bytes", nargs="+", type=int, default=[1 << power for power in range(15, 23)])
    parser.add_argument("--burst", default="6kb", help="what a link passes at once after a pause")
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


def _table(options: argparse.Namespace) -> None:
    heads = "links", "message", "alone", "one host: first", "second", "two hosts: first", "second"
    print(f"| {' | '.join(heads)} |\n" + "|---" * len(heads) + "|")
    for rate in options.rates:
        with three_hosts((rate,) * 3, burst=options.burst) as (hosts, folder):
            for size in options.bytes:
                own_s = 8 * size / RATES[rate]
                taken = [
                    _taken_s(senders, hosts[2], folder, size, own_s, options.rounds)
                    for senders in (hosts[:1], (hosts[0],) * 2, hosts[:2])
                ]
                cells = (f"{seconds / own_s:.2f}" for each in taken for seconds in each)
                print(f"| {rate} | {size / 1e3:.0f} kB | {' | '.join(cells)} |", flush=True)
    print(f"\n{machine()}")


def _taken_s(
    senders: Sequence[Any], receiver: Any, folder: Path, size: int, own_s: float, rounds: int
) -> list[float]:
    """Return the median seconds from when each sender begins to send until all is there."""
    code = [sys.executable, __file__]
    common = receiver.address, str(size)
    listening = receiver.start(*code, "receive", *common, str(len(senders)), str(rounds), folder=folder)
    assert listening.stdout.readline()  # it listens
    first_s = time.monotonic() + 1.5
    starts_s = [first_s + number * (3 * own_s + PAUSE_S) for number in range(rounds)]
    sending = [
        host.start(
            *code,
            "send",
            *common,
            json.dumps([each + place * LATER * own_s for each in starts_s]),
            folder=folder,
        )
        for place, host in enumerate(senders)
    ]
    begun = [json.loads(process.communicate()[0]) for process in sending]
    ended = json.loads(listening.communicate()[0])
    return [
        statistics.median(end_s - begin_s for begin_s, end_s in zip(begins_s, ended[sender], strict=True))
        for sender, begins_s in begun
    ]


def _receive(address: str, size: int, senders: int, rounds: int) -> None:
    """Print when each message of each sender, by its address, was there."""
    ended: dict[str, list[float]] = {}

    def take(connection: socket.socket, ends_s: list[float]) -> None:
        for _ in range(rounds):
            left = size
            while left:
                left -= len(connection.recv(min(left, 1 << 20)))
            ends_s.append(time.monotonic())
            connection.sendall(b"k")

    with socket.create_server((address, PORT)) as server:
        print("listening", flush=True)
        threads = []
        for _ in range(senders):
            connection, (host, port) = server.accept()
            threads.append(
                threading.Thread(target=take, args=(connection, ended.setdefault(f"{host}:{port}", [])))
            )
            threads[-1].start()
        for thread in threads:
            thread.join()
    print(json.dumps(ended))


def _send(address: str, size: int, starts_s: Sequence[float]) -> None:
    """Send a message at each of these times, and print the own address and when each began."""
    begun, data = [], bytes(size)
    with socket.create_connection((address, PORT)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start_s in starts_s:
            time.sleep(max(0.0, start_s - time.monotonic()))
            begun.append(time.monotonic())
            connection.sendall(data)
            connection.recv(1)
        print(json.dumps(["{}:{}".format(*connection.getsockname()), begun]))


if __name__ == "__main__":
    main()
