"""A leader and its members on loopback, without ranks: who waits, who is told what, and how all end."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from cost_model.cluster import Device
from cost_model.errors import InfeasibleError, InputError
from hetpipe.hosts import conversation
from hetpipe.hosts.agreement import Facts
from hetpipe.hosts.conversation import Answer, Message
from hetpipe.hosts.leader import Leader
from hetpipe.hosts.member import follow
from hetpipe.runs.settings import Settings
from hetpipe.runtime.processes import WorkerLostError
from hetpipe.trust.channel import Address, connect

TOKEN = b"0123456789abcdef"
NODES = ("big", "mid", "small")
SOON_S = 20.0
DEVICES = [Device(f"{node}/0", node, "cpu", 1e9) for node in NODES]


def facts(node: str, torch: str = "2.13.0") -> Facts:
    return Facts(node, f"host-of-{node}", {"torch": torch})


class Hosts:
    """A leader in this thread, and members in threads of their own."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.told: list[str] = []
        self.leader = Leader(facts("big"), NODES, ("127.0.0.1", 0), TOKEN, self.told.append)
        self._pool = pool

    def member(
        self,
        node: str,
        answers: Mapping[str, Callable[[Message], Answer]] | None = None,
        *,
        torch: str = "2.13.0",
        address: Address | None = None,
        token: bytes = TOKEN,
    ) -> "Future[None]":
        return self._pool.submit(
            follow, address or self.leader.address, token, facts(node, torch), Settings(steps=1),
            answers or {}, wait_s=SOON_S if address is None else 0.5, tell=lambda text: None,
        )  # fmt: skip


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with ThreadPoolExecutor(3) as pool:
        yield Hosts(pool)


def error_of(member: "Future[None]") -> BaseException | None:
    return member.exception(timeout=SOON_S)


def test_the_leader_waits_says_for_whom_asks_and_ends(hosts: Hosts):
    asked: list[Message] = []

    def answer(message: Message) -> Answer:
        asked.append(message)
        return {"of": message["about"]}, b"some bytes"

    with hosts.leader as leader:
        members = [hosts.member(node, {"weather": answer}) for node in ("small", "mid")]
        leader.gather(SOON_S)
        own, answers = leader.ask("weather", ("small",), lambda: "mine", about="rain")
    assert own == "mine"
    assert {node: (reply["of"], blob) for node, (reply, blob) in answers.items()} == {
        "small": ("rain", b"some bytes")
    }
    assert len(asked) == 1
    assert [error_of(member) for member in members] == [None, None]
    assert hosts.told[0].startswith("waiting for ")
    assert hosts.told[0].endswith("of 3 nodes are here)")


def test_a_node_that_does_not_come_is_named_on_all_hosts(hosts: Hosts):
    with hosts.leader as leader:
        member = hosts.member("small")
        with pytest.raises(InputError) as caught, leader:
            leader.gather(1.0)
    assert str(caught.value).startswith("mid did not come within 1 s; start the same line there")
    assert str(error_of(member)) == str(caught.value)


def test_what_differs_ends_all_with_the_same_line(hosts: Hosts):
    members = []
    with pytest.raises(InputError) as caught, hosts.leader as leader:
        members = [hosts.member("small", torch="2.12.0"), hosts.member("mid")]
        leader.gather(SOON_S)
    assert str(caught.value).startswith("torch is 2.12.0 on small (host-of-small) and 2.13.0 on big")
    for member in members:
        error = error_of(member)
        assert isinstance(error, InputError)
        assert str(error) == str(caught.value)


@pytest.mark.parametrize("ending", [InputError("no such file"), InfeasibleError("8 bytes are missing")])
def test_an_error_of_a_member_is_that_of_all(hosts: Hosts, ending: Exception):
    def fail(message: Message) -> Answer:
        raise ending

    members = []
    with pytest.raises(type(ending), match=str(ending)), hosts.leader as leader:
        members = [hosts.member("small", {"weather": fail}), hosts.member("mid")]
        leader.gather(SOON_S)
        leader.ask("weather", ("small",), lambda: None)
    assert {type(error_of(member)) for member in members} == {type(ending)}


@pytest.mark.parametrize(
    "ending", [InputError("no such file"), KeyboardInterrupt(), SystemExit(143), ZeroDivisionError("by zero")]
)
def test_a_member_in_the_main_thread_ends_by_its_own_error_as_the_leader_does(
    hosts: Hosts, ending: BaseException
):
    """There the leader's word may interrupt it, and is not to where it waits for that word."""

    def fail(message: Message) -> Answer:
        raise ending

    def lead() -> None:
        with hosts.leader as leader:
            started.set()
            leader.gather(SOON_S)
            leader.ask("weather", ("small",), lambda: None)

    started = threading.Event()
    with ThreadPoolExecutor(1) as other:
        leading = other.submit(lead)
        assert started.wait(SOON_S)
        mid = hosts.member("mid")
        with pytest.raises(BaseException) as caught:
            follow(
                hosts.leader.address, TOKEN, facts("small"), Settings(steps=1), {"weather": fail},
                wait_s=SOON_S, tell=lambda text: None,
            )  # fmt: skip
        for found in (caught.value, error_of(mid)):
            known = leading.exception(timeout=SOON_S)
            assert (type(found), str(found)) == (type(known), str(known))
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("ending", [KeyboardInterrupt(), SystemExit(143), ZeroDivisionError("by zero")])
def test_what_ends_the_leader_ends_all_alike(hosts: Hosts, ending: BaseException):
    members = []
    with pytest.raises(type(ending)), hosts.leader as leader:
        members = [hosts.member("small"), hosts.member("mid")]
        leader.gather(SOON_S)
        raise ending
    for member in members:
        error = error_of(member)
        if isinstance(ending, ZeroDivisionError):
            assert isinstance(error, WorkerLostError)
            assert str(error) == "ZeroDivisionError: by zero"
        else:
            assert type(error) is type(ending)
            assert error.args == ending.args


def test_a_member_that_is_gone_is_named(hosts: Hosts):
    lost = r"node small \(host-of-small, 127\.0\.0\.1\) is lost: "
    with pytest.raises(WorkerLostError, match=lost), hosts.leader as leader:
        channel = connect(leader.address, TOKEN, SOON_S)
        channel.send({"purpose": "member", **facts("small").to_json()})
        threading.Timer(0.5, channel.close).start()
        leader.gather(SOON_S)


def test_a_busy_leader_hears_of_it_too(hosts: Hosts):
    begin = time.monotonic()
    with pytest.raises(WorkerLostError, match="node small"), hosts.leader as leader:
        channel = connect(leader.address, TOKEN, SOON_S)
        channel.send({"purpose": "member", **facts("small").to_json()})
        threading.Timer(0.5, channel.close).start()
        time.sleep(SOON_S)  # plans
    assert time.monotonic() - begin < SOON_S / 2


def test_who_is_silent_is_lost(hosts: Hosts, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(conversation, "SILENT_S", 0.5)
    lost = r"node small .* is lost: .* was silent for too long"
    with pytest.raises(WorkerLostError, match=lost), hosts.leader as leader:
        channel = connect(leader.address, TOKEN, SOON_S)
        channel.send({"purpose": "member", **facts("small").to_json()})
        leader.gather(SOON_S)
    channel.close()


def test_a_member_without_a_leader_ends(hosts: Hosts):
    member = hosts.member("small", address=("127.0.0.1", 9))
    assert "did not answer within 0.5 s" in str(error_of(member))
    assert isinstance(error_of(member), InputError)


def test_another_token_and_another_node_are_refused(hosts: Hosts):
    with hosts.leader as leader:
        stranger = hosts.member("small", token=b"another token 16")
        assert "another token" in str(error_of(stranger))
        fourth = hosts.member("fourth")
        assert "node fourth takes no part in this run; give another --node" in str(error_of(fourth))
        members: list[Any] = [hosts.member("small"), hosts.member("mid")]
        leader.gather(SOON_S)
        twin = hosts.member("small")
        assert "node small is here already" in str(error_of(twin))
    assert [error_of(member) for member in members] == [None, None]


@pytest.fixture
def training(hosts: Hosts) -> Iterator[Hosts]:
    """A leader that trains with mid, and has lost small."""
    with hosts.leader as leader:
        mid = hosts.member("mid")
        channel = connect(leader.address, TOKEN, SOON_S)
        channel.send({"purpose": "member", **facts("small").to_json()})
        leader.gather(SOON_S)
        leader.take_back("")
        channel.close()
        soon(lambda: leader.others == ("mid",))
        assert leader.missing(DEVICES) == {"small/0"}
        yield hosts
    assert error_of(mid) is None


def soon(happens: Callable[[], bool]) -> None:
    end_s = time.monotonic() + SOON_S
    while not happens():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_a_host_that_is_back_waits_until_it_is_let_in(training: Hosts):
    leader = training.leader
    small = training.member("small", {"weather": lambda message: ({"of": "rain"}, b"")})
    soon(lambda: leader.waiting() == {"small"})
    assert leader.others == ("mid",)
    assert leader.missing(DEVICES) == {"small/0"}
    twin = training.member("small")
    assert "node small is here already" in str(error_of(twin))
    assert leader.returned() == {"small"}
    assert leader.waiting() == frozenset()
    assert leader.others == ("mid", "small")
    assert leader.missing(DEVICES) == frozenset()
    _, answers = leader.ask("weather", ("small",), lambda: None)
    assert answers["small"][0]["of"] == "rain"
    back = f"node small (host-of-small, {leader.address[0]}) is back; it joins at the next checkpoint"
    assert back in training.told
    leader.__exit__(None, None, None)
    assert error_of(small) is None


def test_a_host_that_waits_hears_that_the_run_is_over(training: Hosts):
    small = training.member("small")
    soon(lambda: training.leader.waiting() == {"small"})
    training.leader.__exit__(None, None, None)
    assert error_of(small) is None


def test_a_host_that_is_back_but_another_is_refused_and_the_run_goes_on(training: Hosts):
    other = training.member("small", torch="2.12.0")
    assert str(error_of(other)).startswith("torch is 2.12.0 on small (host-of-small) and 2.13.0 on big")
    training.leader.take_back("--plan is not planned anew")
    refused = "node small was lost, and is not let in again: --plan is not planned anew"
    assert str(error_of(training.member("small"))) == refused
    assert training.leader.waiting() == frozenset()
    assert training.leader.missing(DEVICES) == {"small/0"}


def test_a_host_that_is_gone_again_is_not_let_in(training: Hosts):
    channel = connect(training.leader.address, TOKEN, SOON_S)
    channel.send({"purpose": "member", **facts("small").to_json()})
    soon(lambda: training.leader.waiting() == {"small"})
    channel.close()
    soon(lambda: not training.leader.waiting())
    assert training.leader.returned() == frozenset()
    assert training.told[-1].endswith("is gone again")


def test_a_host_that_is_lost_between_two_attempts_ends_the_next_one(training: Hosts):
    leader = training.leader
    channel = connect(leader.address, TOKEN, SOON_S)
    channel.send({"purpose": "member", **facts("small").to_json()})
    soon(lambda: bool(leader.returned()))
    channel.close()
    soon(lambda: leader.others == ("mid",))
    with pytest.raises(WorkerLostError, match=r"node small .* is lost"):
        leader.ask("there", ("mid",), lambda: None)
    assert leader.missing(DEVICES) == {"small/0"}
