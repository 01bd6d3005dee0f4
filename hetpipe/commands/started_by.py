"""What `run` and `profile` take from whoever started this process: torchrun, a scheduler, mpirun, Ray."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import typer

from cost_model.cluster import Cluster
from cost_model.errors import CheckFailedError, InfeasibleError, InputError
from hetpipe.commands.output import note
from hetpipe.commands.several_hosts import HostOptions

if TYPE_CHECKING:
    from hetpipe.hosts.environments import Placed

_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (InputError, 2), (InfeasibleError, 3), (CheckFailedError, 4), (OSError, 2),
    (RuntimeError, 5), (KeyboardInterrupt, 130),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Start:
    """Who started this process, and where; None for a start by hand, or by torchrun on one host."""

    placed: "Placed | None"

    @property
    def are_several(self) -> bool:
        """Return whether it was started on several hosts."""
        return self.placed is not None and self.placed.are_several

    def options(self, hosts: HostOptions, cluster: Cluster) -> HostOptions:
        """Return where the hosts meet, and which node this is, as if it had been given.

        cluster: less what is excluded.

        Raises: InputError if the hosts are not those of the cluster.
        """
        if self.placed is None:
            return hosts
        if not self.placed.are_several:  # the same job as for several, on one
            return replace(hosts, node=None, token_file=None, trust_network=False)
        from hetpipe.hosts.derived_rendezvous import check_hosts, meeting_of, node_of
        from hetpipe.hosts.rendezvous import Rendezvous

        check_hosts(self.placed, cluster)
        here = node_of(cluster, self.placed.host) if self.placed.host else None
        address = meeting_of(self.placed, cluster, hosts.wait_s, lambda text: note([text]))
        text = str(Rendezvous(address))
        note([f"started by {self.placed.starter} on several hosts, which meet at {text}"])
        node = hosts.node if hosts.node is not None or here is None else here.name
        return replace(hosts, rendezvous=text, node=node)


@contextmanager
def started(hosts: HostOptions) -> Iterator[Start]:
    """Find who started this process, and launch once on this host.

    Where several processes were started here the first goes on, and the others wait here for its end, and
    end alike. What is given by options goes before. While it goes on, the variables that number ranks are
    put away: it starts ranks of its own.

    Raises: InputError if the variables contradict each other; typer.Exit with the code of the first process.
    """
    from hetpipe.hosts.environments import OF_RANKS, Starter, placed_by

    placed = None if hosts.are_several or hosts.print_launch else placed_by(os.environ)
    if placed is None or (placed.starter is Starter.TORCHRUN and not placed.are_several):
        yield Start(None)
        return
    from hetpipe.hosts.one_launcher import launchers_code, launching

    if placed.local > 0:
        raise typer.Exit(launchers_code(placed.job_here))
    put_away = {name: os.environ.pop(name) for name in OF_RANKS if name in os.environ}
    try:
        with launching(placed.job_here, placed.num_local - 1, _code_of):
            yield Start(placed)
    finally:
        os.environ.update(put_away)


def _code_of(error: BaseException) -> int:
    """Return the exit code with which an error ends hetpipe."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, typer.Exit):
        return int(error.exit_code)
    return next((code for kind, code in _CODES if isinstance(error, kind)), 1)
