"""The uses of the devices' speed in a step: what keeps it from the bound at which all always compute."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from cost_model.cluster import Cluster, Device
from cost_model.layer_costs import Prices
from cost_model.profile import ModelProfile
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.instructions import Compute, Pass, Program
from hetpipe.program.trace import Event, Trace
from hetpipe.reporting.idle_time import Cause, events_by_rank, waits_by_cause

COMPUTES, LEFT_OUT, LONGER = "computes", "left out", "computes longer"
DEVICES, GRADIENTS, MESSAGES = "waits for devices", "waits for gradients", "waits for messages"
_WAITS = {
    Cause.MESSAGE: MESSAGES,
    Cause.SYNC: GRADIENTS,
    Cause.NORM: GRADIENTS,
    Cause.BROADCAST: GRADIENTS,
    Cause.REDUCE: GRADIENTS,
    Cause.GATHER: MESSAGES,
}
"""The kind of each wait; the others are for computations and optimizer steps of other devices."""
_WORDS = {
    LONGER: "goes into small microbatches and recompute",
    DEVICES: "waits for other devices",
    MESSAGES: "waits for messages",
    GRADIENTS: "waits for sums of gradients",
    LEFT_OUT: "is left out",
}


def speed_shares(
    trace: Trace, costs: ProgramCosts, profile: ModelProfile, cluster: Cluster
) -> dict[str, float]:
    """Return what devices do in a step, each weighted by its speed; the shares add up to 1.

    A device's speed: samples a second of the whole model on it alone, each layer at the microbatch size that
    is best for it; what a stage computes for longer than that is a share of its own. cluster: devices that
    the plan leaves out count too, unless their kind was never measured. Who waits for a sum of gradients
    while some device still computes its last backward waits for devices, and only then for the sum.
    """
    prices, known = Prices(profile), [d for d in cluster.devices if d.kind in profile.kinds]
    of_class = {(device.kind, device.speed): _best_s(device, prices) for device in _one_of_each(known)}
    best_s = {device.name: of_class[device.kind, device.speed] for device in known}
    speeds = {name: 1 / sums[-1] if sums[-1] > 0 else float("inf") for name, sums in best_s.items()}
    endless = [name for name, speed in speeds.items() if speed == float("inf")]
    if endless:  # layers that take no time
        speeds = {name: float(name in endless) for name in speeds}
    total, makespan_s = sum(speeds.values()), trace.makespan_s
    computed = [_Computed.of(events, costs.program, best_s) for events in events_by_rank(trace)]
    last_s = max(entry.end_s for entry in computed)
    found = dict.fromkeys((COMPUTES, *_WORDS), 0.0)
    found[LEFT_OUT] = total - sum(speeds[name] for name in trace.device_names)
    for rank, waits in enumerate(waits_by_cause(trace, costs)):
        seconds = dict.fromkeys((DEVICES, GRADIENTS, MESSAGES), 0.0)
        for cause, waited_s in waits.items():
            seconds[_WAITS.get(cause, DEVICES)] += waited_s
        early_s = min(seconds[GRADIENTS], last_s - computed[rank].end_s)
        seconds[GRADIENTS] -= early_s
        seconds[DEVICES] += early_s
        seconds[LONGER] = computed[rank].longer_s
        seconds[COMPUTES] = trace.busy_s(rank) - seconds[LONGER]
        speed = speeds[trace.device_names[rank]]
        for what, spent_s in seconds.items():
            found[what] += speed * (spent_s / makespan_s if makespan_s else float(what == COMPUTES))
    return {what: share / total for what, share in found.items()}


@dataclass(frozen=True, slots=True)
class _Computed:
    """The end of a rank's last computation, and how much longer than need be all of them took."""

    end_s: float
    longer_s: float

    @classmethod
    def of(
        cls, events: Iterable[Event], program: Program, best_s: Mapping[str, Sequence[float]]
    ) -> "_Computed":
        end_s = longer_s = 0.0
        for event in events:
            compute = event.instruction
            if not isinstance(compute, Compute):
                continue
            end_s = max(end_s, event.end_s)
            longer_s += event.duration_s
            if compute.op is Pass.FORWARD:
                stage = program.stage(compute)
                sums = best_s[stage.device]
                longer_s -= program.samples(compute) * (sums[stage.stop] - sums[stage.start])
        return cls(end_s, max(0.0, longer_s))


def _one_of_each(devices: Iterable[Device]) -> Iterable[Device]:
    """Return a device of each kind and speed: thousands may be alike."""
    return {(device.kind, device.speed): device for device in devices}.values()


def _best_s(device: Device, prices: Prices) -> list[float]:
    """Return the seconds of a sample, forward and backward, through the first 0, 1, 2, ... layers."""
    profile = prices.profile
    sizes = profile.kind(device.kind).microbatch_sizes
    layers = (
        min(
            (
                prices.forward_s(device, layer, layer + 1, size)
                + prices.backward_s(device, layer, layer + 1, size)
            )
            / size
            for size in sizes
        )
        for layer in range(profile.num_layers)
    )
    return list(accumulate(layers, initial=0.0))


def speed_sentence(shares: Mapping[str, float]) -> str:
    """Say where the speed goes, the largest loss first; what rounds to nothing is left away."""
    losses = sorted(_WORDS, key=lambda what: -shares[what])
    parts = ", ".join(f"{shares[what]:.1%} {_WORDS[what]}" for what in losses if shares[what] >= 0.0005)
    return f"of the speed of all devices {shares[COMPUTES]:.1%} computes" + (f"; {parts}" if parts else "")
