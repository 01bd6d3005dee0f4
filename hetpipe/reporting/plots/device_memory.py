"""The picture of what fills each device, and the memory of hosts, under a plan."""

from collections.abc import Mapping

from matplotlib.axes import Axes

from cost_model.cluster import Cluster
from cost_model.profile import ModelProfile
from cost_model.units import format_bytes
from hetpipe.reporting.colours import (
    BLUE,
    FROZEN,
    GREEN,
    IDLE,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
)
from hetpipe.reporting.many_pipelines import alike, shown_devices
from hetpipe.reporting.memory_tables import memory_uses, mostly_frozen
from hetpipe.reporting.plots.style import BAR, GIB, MIB, dot_entry, label_rows, legend_above, new_axes
from hetpipe.reporting.tables import describe_device
from partition.estimates.plan_memory import HostUse, host_uses, memory_on
from partition.plan import Plan

SMALL_USE = 0.25
"""Of the capacity: where less is used, only a part of it is drawn."""
TERMS = (
    ("parameters", "parameter_bytes", BLUE),
    ("gradients", "gradient_bytes", SKY),
    ("optimizer", "optimizer_bytes", GREEN),
    ("activations in flight", "saved_bytes", ORANGE),
    ("boundary buffers", "boundary_bytes", YELLOW),
    ("workspace", "workspace_bytes", PURPLE),
)


def memory(
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    ax: Axes | None = None,
    *,
    measured_bytes: Mapping[str, float] | None = None,
) -> Axes:
    """Draw the memory of each device, term by term, against its capacity; measured peaks as dots.

    Below stand hosts that keep a part of it. At the right stands what is needed of what a plan may fill.
    Where that is a small part of the capacity on all devices, the picture ends soon after it, and says so. Of
    many pipelines, devices of those alike have the row of one.
    """
    shown, hosts = shown_devices(plan, cluster), host_uses(plan, profile, cluster)
    names = list(shown)
    ax = ax or new_axes(height=1.3 + 0.45 * num_rows(plan, profile, cluster))
    frozen = memory_uses(plan, profile, cluster) if mostly_frozen(profile) else {}
    needs = {name: memory_on(plan, profile, cluster.device(name)) for name in names}
    peaks_bytes = {name: peak for name, peak in (measured_bytes or {}).items() if name in shown}
    shown_bytes, is_cut = _axis(
        max(*(need.total_bytes for need in needs.values()), *peaks_bytes.values(), 0.0),
        max(cluster.device(name).memory_bytes for name in names),
        max((use.total_bytes for use in hosts.values()), default=0.0),
    )
    unit = MIB if shown_bytes < 2 * GIB else GIB
    for row, name in enumerate(names):
        device = cluster.device(name)
        need = needs[name]
        used = f"{format_bytes(need.total_bytes)} of {format_bytes(device.usable_bytes)}"
        ax.text(1.01, row, used, va="center", fontsize=8, color=INK, transform=ax.get_yaxis_transform())
        ax.barh(row, device.memory_bytes / unit, BAR, color="white", edgecolor=INK, linewidth=0.8)
        usable, reserve = device.usable_bytes / unit, device.reserve_bytes / unit
        driver = device.driver_bytes / unit
        ax.barh(row, driver, BAR, usable, color=IDLE, hatch="...", edgecolor="#AAAAAA", linewidth=0)
        ax.barh(row, reserve, BAR, usable + driver, color=IDLE, hatch="///", edgecolor="#AAAAAA", linewidth=0)
        start = 0.0
        for _, field, colour in TERMS:
            width = getattr(need, field) / unit
            ax.barh(row, width, BAR * 0.8, start, color=colour, linewidth=0)
            start += width
        if frozen:  # the first part of the parameters
            ax.barh(row, frozen[name].frozen_bytes / unit, BAR * 0.8, color=FROZEN, linewidth=0)
    for row, use in enumerate(hosts.values(), start=len(names)):
        _host_row(ax, row, use, unit)
    dots = []
    if peaks_bytes:
        peaks = [peak / unit for peak in peaks_bytes.values()]
        rows = [names.index(name) for name in peaks_bytes]
        ax.plot(peaks, rows, "o", color=VERMILION, markeredgecolor="white", zorder=3)
        dots = [dot_entry(VERMILION, "measured peak")]
    devices = [f"{name}  {describe_device(cluster.device(name))}{alike(shown[name])}" for name in names]
    label_rows(ax, devices + [f"{node}, memory of the host" for node in hosts])
    ax.set_xlim(0, shown_bytes / unit)
    end = "devices have far more than is drawn" if is_cut else "frame: capacity"
    ax.set_xlabel(f"{'MiB' if unit == MIB else 'GiB'} ({end})")
    legend_above(ax, _legend(plan, cluster, has_frozen=bool(frozen), is_cut=is_cut), num_columns=4, more=dots)
    return ax


def num_rows(plan: Plan, profile: ModelProfile, cluster: Cluster) -> int:
    """Return how many rows `memory` draws of a plan."""
    return len(shown_devices(plan, cluster)) + len(host_uses(plan, profile, cluster))


def _host_row(ax: Axes, row: int, use: HostUse, unit: int) -> None:
    ax.barh(row, use.capacity_bytes / unit, BAR, color="white", edgecolor=INK, linewidth=0.8)
    start = 0.0
    for num_bytes, colour in (
        (use.frozen_bytes, FROZEN),
        (use.state_bytes, GREEN),
        (use.saved_bytes, ORANGE),
        (use.fetched_bytes, BLUE),
    ):
        ax.barh(row, num_bytes / unit, BAR * 0.8, start, color=colour, linewidth=0)
        start += num_bytes / unit
    used = f"{format_bytes(use.total_bytes)} of {format_bytes(use.capacity_bytes)}"
    ax.text(1.01, row, used, va="center", fontsize=8, color=INK, transform=ax.get_yaxis_transform())


def _legend(plan: Plan, cluster: Cluster, *, has_frozen: bool, is_cut: bool) -> list[tuple[str, str]]:
    """Return colours and what they stand for, of what is drawn."""
    entries = [(colour, label) for label, _, colour in TERMS]
    if has_frozen:
        entries[:1] = [(FROZEN, "frozen parameters"), (BLUE, "trained parameters")]
    devices = [cluster.device(name) for name in plan.device_names]
    if is_cut or not any(device.driver_bytes or device.reserve_bytes for device in devices):
        return entries
    has_driver = any(device.driver_bytes for device in devices)
    return [*entries, (IDLE, "driver (dots), reserve" if has_driver else "reserve")]


def _axis(used_bytes: float, capacity_bytes: float, on_hosts_bytes: float) -> tuple[float, bool]:
    """Return how many bytes are drawn, and whether that is less than a device has."""
    used_bytes = max(used_bytes, on_hosts_bytes)
    if used_bytes > SMALL_USE * capacity_bytes or not used_bytes:
        return 1.02 * max(capacity_bytes, used_bytes), False
    return 1.15 * used_bytes, True
