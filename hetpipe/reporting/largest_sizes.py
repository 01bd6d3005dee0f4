"""The whole model on each kind: how fast by microbatch, and the largest that each stage of ZeRO takes."""

from rich.table import Table

from cost_model.cluster import Cluster
from cost_model.errors import InputError
from cost_model.layer_costs import Prices
from cost_model.profile import ModelProfile
from cost_model.sharding import Sharding
from cost_model.units import format_bytes, format_seconds
from hetpipe.reporting.tables import new_table
from partition.baselines.largest_microbatch import largest_microbatches
from partition.problem import MOST_BATCH, problem_of

MEASURED, PEAK = "+", " *"
CURVE_MEANS = f"{PEAK.strip()}: the peak of its kind, where poplar-0 and poplar-1 run it if memory takes it"
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


def curve_table(profile: ModelProfile, cluster: Cluster) -> Table:
    """Return the curve of time by microbatch of the whole model, for each kind and speed of the cluster.

    Forward and backward, without messages and sums, so that the curve is one for all stages of ZeRO; what
    each stage leaves room for is in `largest_table`.
    """
    prices, last = Prices(profile), profile.num_layers
    table = new_table("whole model on")
    for title in ("microbatch", "forward, backward", "samples/s"):
        table.add_column(title, justify="right", no_wrap=True)
    for device in {(device.kind, device.speed): device for device in cluster.devices}.values():
        seconds = {
            size: prices.forward_s(device, 0, last, size) + prices.backward_s(device, 0, last, size)
            for size in profile.kind(device.kind).microbatch_sizes
        }
        rates = {size: size / spent for size, spent in seconds.items() if spent > 0}
        peak = max(rates, key=lambda size: rates[size], default=0)
        for place, (size, spent) in enumerate(seconds.items()):
            name = "" if place else device.kind + ("" if device.speed == 1 else f" x {device.speed:g}")
            rate = f"{rates[size]:.4g}{PEAK if size == peak else ''}" if size in rates else ""
            table.add_row(name, str(size), format_seconds(spent), rate)
    return table


def _cell(size: int | None, most: int) -> str:
    if size is None:
        return "-"
    if size == 0:
        return "none fits"
    return f"{size}{MEASURED}" if size == most else str(size)
