"""What training asks of the launchers of other hosts, who are told by `hetpipe.hosts`."""

from collections.abc import Sequence
from typing import Protocol

from cost_model.cluster import Device
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runtime.processes import Emit, RankGroup
from hetpipe.runtime.stopping import Stopping


class OtherHosts(Protocol):
    """The other hosts of a run, seen from the one that leads."""

    def local(self, devices: Sequence[Device]) -> tuple[int, ...]:
        """Return which ranks this host starts, given the device of each.

        Raises: InputError if there is none to report.
        """
        ...

    def missing(self, devices: Sequence[Device]) -> frozenset[str]:
        """Return the names of devices whose hosts are gone, once each other host has answered or is lost."""
        ...

    def take_back(self, refusal: str) -> None:
        """From now on let in who was lost and is here again; refusal: why nobody is, "" if they are.

        And who is lost from now on ends the attempt that follows, not the run.
        """
        ...

    def waiting(self) -> frozenset[str]:
        """Return the names of nodes that were lost and wait to be let in."""
        ...

    def returned(self) -> frozenset[str]:
        """Let in who waits, from the next attempt on; return their names."""
        ...

    def train(
        self, folder: RunFolder, handover: str, group: RankGroup, on_event: Emit, stopping: Stopping
    ) -> None:
        """Have all hosts train what is in the run folder, this one among them; as `run_ranks`."""
        ...
