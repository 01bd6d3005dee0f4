"""What `run` does where it is started on several hosts: who leads, what others are asked, who follows."""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from cost_model.cluster import Cluster, Node
from cost_model.errors import InputError
from cost_model.profile import ModelProfile, profile_from_data, profile_text
from cost_model.units import parse_seconds
from hetpipe.commands.given_data import readable_texts
from hetpipe.commands.inputs import PlanRequest
from hetpipe.commands.learning import LearningOptions
from hetpipe.commands.output import note
from hetpipe.commands.training import RUNS, TrainingOptions
from hetpipe.models.names import ModelEntry
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import Settings

if TYPE_CHECKING:
    from hetpipe.hosts.agreement import Facts
    from hetpipe.hosts.leader import Leader
    from hetpipe.hosts.rendezvous import SharedFile
    from hetpipe.hosts.ssh import Launch, RemoteHosts
    from hetpipe.trust.channel import Address


@dataclass(frozen=True, slots=True)
class HostOptions:
    """Where the hosts of a run meet, which of them this is, and whom it trusts."""

    title: ClassVar[str] = "Several hosts"
    rendezvous: Annotated[
        str | None,
        typer.Option("--rendezvous", help="Several hosts: tcp://LEADER:PORT or file:///SHARED, on each."),
    ] = None
    node: Annotated[
        str | None, typer.Option("--node", help="Which node of the cluster file this host is; by its name.")
    ] = None
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="The secret of the run; else that of HETPIPE_TOKEN.")
    ] = None
    trust_network: Annotated[
        bool, typer.Option("--trust-network", help="Let tensors travel over a network that proves nothing.")
    ] = False
    hosts: Annotated[
        bool | None,
        typer.Option("--hosts/--no-hosts", help="Start the others from here by ssh, and lead them; no."),
    ] = None
    ssh_config: Annotated[
        Path | None, typer.Option("--ssh-config", help="A configuration file for ssh, instead of your own.")
    ] = None
    print_launch: Annotated[
        bool,
        typer.Option("--print-launch/--no-print-launch", help="Print each host's line, start nothing; no."),
    ] = False
    wait: Annotated[str, typer.Option("--wait", help="How long hosts wait for each other at the start.")] = (
        "10min"
    )

    def __post_init__(self) -> None:
        assert self.wait_s > 0  # refuses what is no time
        if self.ssh_config is not None and self.hosts is None and not self.print_launch:
            raise InputError("--ssh-config is for hosts that are started from here; give --hosts too")

    def check_alone(self) -> None:
        """Check, of a run on this host alone, that no options of several hosts are given.

        Raises: InputError naming them.
        """
        given = {
            "--node": self.node is not None,
            "--token-file": self.token_file is not None,
            "--trust-network": self.trust_network,
        }
        names = [name for name, is_given in given.items() if is_given]
        if names:
            raise InputError(
                f"{' and '.join(names)} given, and nothing says where several hosts meet; give --rendezvous "
                "on each, or --hosts, or leave it out to use this host alone"
            )

    @property
    def are_several(self) -> bool:
        """Return whether a launcher is started on each host, whatever else has started this process."""
        return self.rendezvous is not None or bool(self.hosts)

    @property
    def wait_s(self) -> float:
        """Return the seconds that hosts wait for each other.

        Raises: InputError if it is no time above zero.
        """
        seconds = parse_seconds(self.wait)
        if not 0 < seconds < float("inf"):
            raise InputError(f"--wait is {self.wait!r}; give a time above zero, such as 10min")
        return seconds


@dataclass(frozen=True, slots=True)
class Place:
    """A host among those of a run: its node, and the leader's address.

    file: of the rendezvous: who leads has made it, and is yet to write its address; who follows has read it.
    """

    node: Node
    leads: bool
    address: "Address"
    token: bytes
    options: HostOptions
    file: "SharedFile | None" = None
    launch: "Launch | None" = None


def place_of(options: HostOptions, cluster: Cluster) -> Place | None:
    """Return this host's place in a run on several hosts; None where all devices are of this one.

    Raises: InputError if the options do not say enough, or nobody vouches for the network.
    """
    if options.hosts:
        return _starting_place(options, cluster)
    if options.rendezvous is None:
        given = {node.host for node in cluster.nodes if node.host is not None and node.devices}
        if len(given) > 1:
            raise InputError(
                f"the nodes are on several hosts ({', '.join(sorted(given))}); give --rendezvous on each, or "
                "take `host` out of the cluster file to run on this one"
            )
        options.check_alone()
        return None
    from hetpipe.hosts.rendezvous import (
        SharedFile,
        check_trusted,
        leaders_number,
        leads,
        numbers_of,
        outer_number,
        own_node,
        parse_rendezvous,
    )
    from hetpipe.trust.token import run_token

    meeting, token = parse_rendezvous(options.rendezvous), run_token(options.token_file)
    name = own_node(cluster, options.node)
    node = next(node for node in cluster.nodes if node.name == name)
    if not node.devices:
        raise InputError(
            f"node {name!r} is this host, and --exclude leaves it out; do not start the run here"
        )
    if meeting.address is not None:
        leading = leads(meeting.address, cluster, name)
        host, port = meeting.address
        named = next((each.host for each in cluster.nodes if each.name == host and each.host), host)
        number = leaders_number(named) if leading else named
        for each in [number] if leading else numbers_of(named):
            check_trusted(each, trusts=options.trust_network)
        return Place(node, leading, (number, port), token, options)
    assert meeting.file is not None
    file = SharedFile(meeting.file)
    if not file.make():
        host, port = file.read(options.wait_s)
        for each in numbers_of(host):
            check_trusted(each, trusts=options.trust_network)
        return Place(node, False, (host, port), token, options, file)
    try:
        number = outer_number(node.host)
        check_trusted(number, trusts=options.trust_network)
    except BaseException:
        file.remove()
        raise
    return Place(node, True, (number, 0), token, options, file)


def _starting_place(options: HostOptions, cluster: Cluster) -> Place:
    """Return the place of the host that leads, and starts the others by ssh."""
    from hetpipe.hosts.rendezvous import (
        check_trusted,
        leaders_number,
        outer_number,
        own_node,
        parse_rendezvous,
    )
    from hetpipe.trust.token import run_token

    name = own_node(cluster, options.node)
    node = next(node for node in cluster.nodes if node.name == name)
    launch = _launch_of(options, cluster, name)
    launch.check()
    number, port = outer_number(None) if node.host is None else leaders_number(node.host), 0
    if options.rendezvous is not None:
        meeting = parse_rendezvous(options.rendezvous)
        if meeting.address is None:
            raise InputError("--hosts starts the others from here; give no rendezvous file with it")
        port = meeting.address[1]
    check_trusted(number, trusts=options.trust_network)
    return Place(node, True, (number, port), run_token(options.token_file), options, launch=launch)


def _launch_of(options: HostOptions, cluster: Cluster, name: str | None) -> "Launch":
    """Return what is started on all nodes but this one; on all, where that is none."""
    from hetpipe.hosts.ssh import Launch

    nodes = tuple(node for node in cluster.nodes if node.devices and node.name != name)
    return Launch(nodes, tuple(sys.argv[1:]), options.ssh_config)


def print_launch(options: HostOptions, cluster: Cluster) -> None:
    """Print the line to paste on each host.

    Raises: InputError without a rendezvous.
    """
    from hetpipe.hosts.ssh import STARTS_NONE

    if options.rendezvous is None:
        raise InputError("--print-launch needs --rendezvous tcp://LEADER:PORT, where the hosts are to meet")
    token_file = "token" if options.token_file is None else str(options.token_file)
    taken_back = [STARTS_NONE] if options.hosts or options.ssh_config is not None else []
    if "--print-launch" not in sys.argv:  # a run file says so
        taken_back.append("--no-print-launch")
    for line in _launch_of(options, cluster, None).lines(options.rendezvous, token_file, taken_back):
        typer.echo(line)


@dataclass(frozen=True, slots=True)
class Asked:
    """What all hosts are asked to do together, and what of it is compared before.

    cluster: whole; usable: less what is excluded. said: options by name that are to be the same. data: texts.
    run: groups of options that the leader decides. what: a word for it.
    """

    cluster: Cluster
    usable: Cluster
    entry: ModelEntry
    said: Mapping[str, object]
    data: tuple[Path, ...] = ()
    eval_data: tuple[Path, ...] = ()
    run: tuple[object, ...] = ()
    what: str = "training"

    @classmethod
    def training(
        cls, request: PlanRequest, entry: ModelEntry, training: TrainingOptions, learning: LearningOptions
    ) -> "Asked":
        """Return what `run` asks."""
        options = request.options
        said = said_of(options.dtype, options.loss_chunks, compiled=options.compiled)
        said |= {f"--{name}": str(value) for name, value in options.decided.items()}
        texts = readable_texts(training.data, entry) if training.data else ()
        held_out = readable_texts(learning.eval_data, entry) if learning.eval_data else ()
        data, held_out = tuple(map(Path, texts)), tuple(map(Path, held_out))
        return cls(request.cluster, request.usable, entry, said, data, held_out, (training, learning))

    def facts(self, node: Node) -> "Facts":
        """Return what this host, of a node, says of itself.

        NOTE: torch is loaded before hosts talk: the loader holds Python's lock meanwhile, on a busy host or
        from a slow disk for longer than a launcher may be silent.
        """
        import torch  # noqa: F401

        from hetpipe.hosts.agreement import facts_of, options_of_leader

        given = {
            "model": [self.entry.folder.path] if self.entry.folder is not None else [],
            "adapter": [Path(self.entry.adapter)] if self.entry.adapter is not None else [],
            "data": self.data,
            "eval_data": self.eval_data,
        }
        said = {**self.said, **options_of_leader(*self.run)}
        return facts_of(node, self.cluster, given, {"--model": self.entry.name, **said})


def said_of(dtype: str | None, loss_chunks: int | None, *, compiled: bool) -> dict[str, object]:
    """Return the options that decide what layers are, by name; None where they are not given."""
    return {"--dtype": dtype, "--loss-chunks": loss_chunks, "--compile": compiled or None}


def follow_leader(
    place: Place,
    asked: Asked,
    measure: Callable[[Cluster], ModelProfile],
) -> None:
    """Take part in a run that another host leads, until it ends.

    measure: the profile of a part of the cluster.

    Raises: whatever ended the run, on whichever host.
    """
    from hetpipe.hosts.member import follow
    from hetpipe.hosts.returned_copies import OwnCopies
    from hetpipe.hosts.ssh import TOKEN_FROM_INPUT, end_with_input

    def profile(message: dict[str, object]) -> tuple[dict[str, object], bytes]:
        return {}, profile_text(measure(part_of(asked.usable, place.node))).encode()

    if str(place.options.token_file) == TOKEN_FROM_INPUT:
        end_with_input()
    own = Settings(
        steps=1, data=tuple(map(str, asked.data)), eval_data=tuple(map(str, asked.eval_data)),
        **asked.entry.in_settings,
    )  # fmt: skip
    follow(
        place.address, place.token, asked.facts(place.node), own,
        {"profile": profile, **OwnCopies(RUNS, place.node.name).answers},
        wait_s=place.options.wait_s, tell=lambda text: note([text]),
        file=None if place.file is None else place.file.path,
    )  # fmt: skip
    note([f"{place.node.name}: {asked.what} is over; its results are on the leader's host"])


@contextmanager
def leading(place: Place | None, asked: Asked) -> "Iterator[Leader | None]":
    """Lead the other hosts of a run, once they are there and alike; None where there are no others.

    Raises: InputError if one does not come, or is not like this one.
    """
    if place is None:
        yield None
        return
    from hetpipe.hosts.leader import Leader

    nodes = [node.name for node in asked.usable.nodes if node.devices]
    try:
        facts = asked.facts(place.node)
        with (
            _remote_hosts(place) as remote,
            Leader(facts, nodes, place.address, place.token, lambda text: note([text])) as leader,
        ):
            if place.file is not None:
                place.file.write(leader.address)
            if remote is not None:
                remote.start(leader.address, leader.ended)
            leader.gather(place.options.wait_s)
            yield leader
    finally:
        if place.file is not None:
            place.file.remove()


@contextmanager
def _remote_hosts(place: Place) -> "Iterator[RemoteHosts | None]":
    """Give what starts the other hosts, which end with this one; None where others start them."""
    if place.launch is None:
        yield None
        return
    from hetpipe.hosts.ssh import RemoteHosts

    with RemoteHosts(place.launch, place.token, lambda text: print(text, file=sys.stderr)) as remote:
        yield remote


def bring_back_lost(others: "Leader", training: TrainingOptions, entry: ModelEntry) -> None:
    """Have the checkpoint to go on from brought back where this host has lost it and another holds it."""
    from hetpipe.hosts.returned_copies import bring_back

    if training.resume is not None:
        folder = None if training.run_folder is None else RunFolder(training.run_folder)
        bring_back(others, training.resume, folder, RUNS, entry.name, lambda text: note([text]))


def joined_profile(
    leader: "Leader", usable: Cluster, measure: Callable[[Cluster], ModelProfile]
) -> ModelProfile:
    """Have each host measure its own kinds, and join what they found.

    Of a kind that several hosts have, the first measures it.
    """
    from hetpipe.profiling.merging import merge

    nodes = {node.name: node for node in usable.nodes if node.devices}
    own = nodes.pop(leader.facts.node)
    known, asked = {device.kind for device in own.devices}, []
    for name, node in nodes.items():
        kinds = {device.kind for device in node.devices}
        if kinds - known:
            asked.append(name)
            known |= kinds
    mine, answers = leader.ask("profile", asked, lambda: measure(part_of(usable, own)))
    joined = mine
    for name, (_, blob) in answers.items():
        theirs = profile_from_data(json.loads(blob), f"the profile of {name}")
        new = {kind: times for kind, times in theirs.kinds.items() if kind not in joined.kinds}
        joined = merge([joined, dataclasses.replace(theirs, kinds=new)])
    return joined


def part_of(cluster: Cluster, node: Node) -> Cluster:
    """Return the cluster with the devices of one node alone."""
    own = next(entry for entry in cluster.nodes if entry.name == node.name)
    return dataclasses.replace(cluster, nodes=(own,), links=())
