"""The measured links between the hosts of a run, put into what is planned for and into the cluster file."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cost_model.cluster import Cluster, NodeLink
from cost_model.cluster_file import read_cluster, with_links
from cost_model.strict_files import read_text, write_atomically
from hetpipe.commands.inputs import PlanRequest
from hetpipe.commands.output import note, warn

if TYPE_CHECKING:
    from hetpipe.hosts.leader import Leader


@contextmanager
def measured_network(
    leader: "Leader | None", request: PlanRequest, cluster_file: Path, *, anew: bool = False
) -> Iterator[tuple[PlanRequest, Path]]:
    """Give the request with the links between hosts as they are measured, and a cluster file that says them.

    leader: None where nothing is measured; then both are as they were. anew: whatever the cache holds.

    Raises: InputError if a link cannot be measured, or does not fit into the file.
    """
    if leader is None:
        yield request, cluster_file
        return
    from hetpipe.runtime.scratch import scratch_folder

    with scratch_folder("cluster") as folder:
        file = folder / cluster_file.name
        write_atomically(file, measured_text(leader, request.usable, cluster_file, anew=anew))
        cluster = read_cluster(file)
        usable = dataclasses.replace(request.usable, links=cluster.links)
        yield dataclasses.replace(request, cluster=cluster, usable=usable), file


def measured_text(leader: "Leader", usable: Cluster, cluster_file: Path, *, anew: bool = False) -> str:
    """Return the text of the cluster file with the measured links between the nodes that take part.

    anew: whatever the cache holds.
    """
    from hetpipe.hosts.leaders_links import measure_links, measure_sums

    found = measure_links(leader, usable, anew=anew)
    note(f"{'known' if link.was_kept else 'measured'} {link}" for link in found)
    if any(link.was_kept for link in found):
        note(["what is known was measured within the last day; --remeasure measures it anew"])
    links = [NodeLink(link.nodes, link.slower) for link in found]
    text = with_links(read_text(cluster_file), links, str(cluster_file))
    sums = measure_sums(leader, dataclasses.replace(usable, links=tuple(links)), anew=anew)
    if sums is not None:
        told = f"{'known' if sums.was_kept else 'measured'} {sums}"
        if sums.is_far:
            warn(told)
        else:
            note([told])
    return text
