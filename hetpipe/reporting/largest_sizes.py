"""How large a microbatch of the whole model each kind of device takes, by what is sharded (ZeRO)."""

from rich.table import Table

from cost_model.cluster import Cluster
from cost_model.errors import InputError
from cost_model.profile import ModelProfile
from cost_model.sharding import Sharding
from cost_model.units import format_bytes
from hetpipe.reporting.tables import new_table
from partition.baselines.largest_microbatch import largest_microbatches
from partition.problem import MOST_BATCH, problem_of

MEASURED = "+"
LARGEST_MEANS = f"of the whole model, if others own what is sharded; {MEASURED}: none larger was measured"


def largest_table(profile: ModelProfile, cluster: Cluster) -> Table:
    """Return the largest microbatch of each kind and memory of the cluster, by stage of ZeRO."""
    problem = problem_of(profile, cluster, MOST_BATCH)
    table = new_table("largest microbatch on")
    table.add_column("usable", justify="right")
    found: list[dict[str, int]] = []
    for sharding in Sharding:
        table.add_column(f"ZeRO {int(sharding)}", justify="right")
        try:
            found.append(largest_microbatches(problem, sharding))
        except InputError:  # what is not sharded at all: copies of weights in 16 bits
            found.append({})
    shown = {(device.kind, device.usable_bytes): device for device in cluster.devices}
    for (kind, usable_bytes), device in shown.items():
        most = profile.kind(kind).microbatch_sizes[-1]
        cells = [_cell(sizes.get(device.name), most) for sizes in found]
        table.add_row(kind, format_bytes(usable_bytes), *cells)
    return table


def _cell(size: int | None, most: int) -> str:
    if size is None:
        return "-"
    if size == 0:
        return "none fits"
    return f"{size}{MEASURED}" if size == most else str(size)
