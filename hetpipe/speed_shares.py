"""Where the speed of all devices goes in a step: what keeps it from the bound at which all always compute."""

from collections.abc import Mapping

from cost_model.cluster import Cluster, Device
from cost_model.pricing import Prices
from cost_model.profile import ModelProfile
from hetpipe.costs import ProgramCosts
from hetpipe.instructions import Compute
from hetpipe.trace import Trace
from hetpipe.waiting import Cause, waits_by_cause

COMPUTES, LEFT_OUT = "computes", "left out"
DEVICES, GRADIENTS, MESSAGES = "waits for devices", "waits for gradients", "waits for messages"
_WAITS = {
    Cause.MESSAGE: MESSAGES,
    Cause.SYNC: GRADIENTS,
    Cause.NORM: GRADIENTS,
    Cause.BROADCAST: GRADIENTS,
}
"""The kind of each wait; the others are for computations and optimizer steps of other devices."""
_WORDS = {
    DEVICES: "waits for other devices",
    MESSAGES: "waits for messages",
    GRADIENTS: "waits for sums of gradients",
    LEFT_OUT: "is left out",
}


def speed_shares(
    trace: Trace, costs: ProgramCosts, profile: ModelProfile, cluster: Cluster
) -> dict[str, float]:
    """What the devices of a cluster do in a step, each weighted by its speed; the shares add up to 1.

    A device's speed: samples a second of the whole model on it alone, at the microbatch size that is best
    for it. cluster: devices that the plan leaves out count too. Who waits for a sum of gradients while some
    device still computes its last backward waits for devices, and only then for the sum.
    """
    speeds = {device.name: _samples_per_s(device, profile) for device in cluster.devices}
    endless = [name for name, speed in speeds.items() if speed == float("inf")]
    if endless:  # layers that take no time
        speeds = {name: float(name in endless) for name in speeds}
    total, makespan_s = sum(speeds.values()), trace.makespan_s
    ends_s = _compute_ends_s(trace)
    last_s = max(ends_s)
    found = dict.fromkeys((COMPUTES, *_WORDS), 0.0)
    found[LEFT_OUT] = total - sum(speeds[name] for name in trace.device_names)
    for rank, waits in enumerate(waits_by_cause(trace, costs)):
        speed = speeds[trace.device_names[rank]]
        found[COMPUTES] += speed * (trace.busy_s(rank) / makespan_s if makespan_s else 1.0)
        seconds = dict.fromkeys((DEVICES, GRADIENTS, MESSAGES), 0.0)
        for cause, waited_s in waits.items():
            seconds[_WAITS.get(cause, DEVICES)] += waited_s
        early_s = min(seconds[GRADIENTS], last_s - ends_s[rank])
        seconds[GRADIENTS] -= early_s
        seconds[DEVICES] += early_s
        for what, waited_s in seconds.items():
            found[what] += speed * waited_s / makespan_s if makespan_s else 0.0
    return {what: share / total for what, share in found.items()}


def _compute_ends_s(trace: Trace) -> list[float]:
    """When the last computation of each rank ends."""
    ends = [0.0] * len(trace.device_names)
    for event in trace.events:
        if isinstance(event.instruction, Compute):
            ends[event.rank] = max(ends[event.rank], event.end_s)
    return ends


def _samples_per_s(device: Device, profile: ModelProfile) -> float:
    prices, layers = Prices(profile), (0, profile.num_layers)
    seconds = min(
        (prices.forward_s(device, *layers, size) + prices.backward_s(device, *layers, size)) / size
        for size in profile.kind(device.kind).microbatch_sizes
    )
    return 1 / seconds if seconds > 0 else float("inf")


def speed_sentence(shares: Mapping[str, float]) -> str:
    """Where the speed goes, the largest loss first; what rounds to nothing is left away."""
    losses = sorted(_WORDS, key=lambda what: -shares[what])
    parts = ", ".join(f"{shares[what]:.1%} {_WORDS[what]}" for what in losses if shares[what] >= 0.0005)
    return f"of the speed of all devices {shares[COMPUTES]:.1%} computes" + (f"; {parts}" if parts else "")
