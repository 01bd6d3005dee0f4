"""The correction of a profile by what a run measured. Needs no torch."""

import dataclasses
import statistics
from collections.abc import Callable, Iterator

from cost_model.cluster import Cluster, Link, is_emulated
from cost_model.errors import InputError
from cost_model.layer_profile import LayerTimes
from cost_model.measured_links import MeasuredLink
from cost_model.network import Network
from cost_model.profile import KindProfile, ModelProfile
from hetpipe.program.instructions import Compute, Pass, Step
from hetpipe.program.trace import Trace
from hetpipe.runs.run_report import RunReport
from partition.estimates.plan_memory import stepped_bytes
from partition.plan import OPTIMIZER_STEP, Plan
from partition.problem import check_plan


def calibrate(
    profile: ModelProfile, plan: Plan, cluster: Cluster, report: RunReport, trace: Trace | None = None
) -> ModelProfile:
    """Return the profile that would have predicted the run as it was measured, stage by stage.

    The times of a layer on a kind are scaled by measured over predicted seconds of the stages of that kind
    that held the layer (so by the mean of their errors, weighted with their predicted seconds); layers that
    the kind did not hold by those of all its stages. Kinds without a stage stay as they are.

    trace: the measured step; its optimizer seconds replace those of the kinds, and links between real devices
    are scaled by its transfers over the predicted ones.

    Raises: InputError if the report, plan and profile do not belong together.
    """
    check_plan(plan, profile, cluster)
    known = {
        (number, index, stage.device)
        for number, pipeline in enumerate(plan.pipelines)
        for index, stage in enumerate(pipeline.stages)
    }
    found = {(stage.pipeline, stage.stage, stage.device) for stage in report.stages}
    if report.model != plan.model or found != known:
        raise InputError(
            f"the report is of {report.model!r} in {len(found)} stages, the plan of {plan.model!r} in "
            f"{len(known)}, or on other devices; give a run folder as it was written"
        )
    kinds = {kind: _scaled(kind, times, plan, cluster, report) for kind, times in profile.kinds.items()}
    if trace is None:
        return dataclasses.replace(profile, kinds=kinds)
    for kind, s_per_byte in _optimizer_s_per_byte(profile, plan, cluster, trace).items():
        kinds[kind] = dataclasses.replace(kinds[kind], optimizer_s_per_byte=s_per_byte)
    links = {**profile.links, **_links(profile, plan, cluster, trace)}
    return dataclasses.replace(profile, kinds=kinds, links=links)


def _scaled(kind: str, times: KindProfile, plan: Plan, cluster: Cluster, report: RunReport) -> KindProfile:
    held = [entry for entry in report.stages if cluster.device(entry.device).kind == kind]

    def factor(counts: Callable[[int, int], bool]) -> float | None:
        stages = [stage for stage in held if counts(stage.pipeline, stage.stage)]
        predicted_s = sum(stage.predicted_busy_s for stage in stages)
        return sum(stage.measured_busy_s for stage in stages) / predicted_s if predicted_s else None

    of_kind = factor(lambda pipeline, stage: True)
    if of_kind is None:
        return times
    layers = []
    for layer, layer_times in enumerate(times.layers):
        of_layer = factor(
            lambda pipeline, stage, layer=layer: (  # type: ignore[misc]  # binds the layer now
                layer in range(*plan.pipelines[pipeline].stages[stage].layers)
            )
        )
        by = of_kind if of_layer is None else of_layer
        layers.append(
            LayerTimes(
                tuple(by * s for s in layer_times.forward_s), tuple(by * s for s in layer_times.backward_s)
            )
        )
    # the standard error was that of the medians that are no longer here
    return dataclasses.replace(times, layers=tuple(layers), standard_error=None, standard_error_of=None)


def _optimizer_s_per_byte(
    profile: ModelProfile, plan: Plan, cluster: Cluster, trace: Trace
) -> dict[str, float]:
    """Return, by kind, the seconds of its STEPs over the bytes they trained, as at speed 1.

    A profile counts the local part of the norm with the optimizer; in a trace it cannot be told from the
    waiting for others in NORM, and is left out. So are devices with states on their hosts, whose STEP is
    the host's, or that of moving them.
    """
    away = {
        name
        for name in plan.device_names
        if plan.offloaded_layers(name) or plan.offloaded_layers(name, OPTIMIZER_STEP)
    }
    seconds: dict[str, float] = {}
    num_bytes: dict[str, float] = {}
    for event in trace.events:
        if isinstance(event.instruction, Step) and trace.device_names[event.rank] not in away:
            device = cluster.device(trace.device_names[event.rank])
            held = stepped_bytes(plan, profile, device.name) / device.speed
            seconds[device.kind] = seconds.get(device.kind, 0.0) + event.duration_s
            num_bytes[device.kind] = num_bytes.get(device.kind, 0.0) + held
    return {kind: total_s / num_bytes[kind] for kind, total_s in seconds.items() if num_bytes[kind] > 0}


def _links(profile: ModelProfile, plan: Plan, cluster: Cluster, trace: Trace) -> dict[str, Link]:
    """Return links by "kind>kind", scaled by the median of measured over predicted transfers.

    One size of message tells no latency from bandwidth, so both take the same factor.
    """
    network = Network(cluster, profile.links)
    ratios: dict[str, list[float]] = {}
    scaled: dict[str, Link] = {}
    for source, destination, num_bytes, transfer_s in _awaited_transfers(profile, plan, cluster, trace):
        kinds = cluster.device(source).kind, cluster.device(destination).kind
        if any(map(is_emulated, kinds)):
            continue
        link = network.route(source, destination).link
        pair = f"{kinds[0]}>{kinds[1]}"
        scaled.setdefault(pair, link)
        ratios.setdefault(pair, []).append(transfer_s / link.transfer_s(num_bytes))
    for pair, found in ratios.items():
        by, link = statistics.median(found), scaled[pair]
        if by > 0:
            scaled[pair] = _scaled_link(link, by)
    return scaled


def _scaled_link(link: Link, by: float) -> Link:
    latency_s, bandwidth = link.latency_s * by, link.bandwidth_bytes_per_s / by
    if isinstance(link, MeasuredLink):
        occupied_s = tuple(by * seconds for seconds in link.occupied_s)
        return MeasuredLink(latency_s, bandwidth, link.message_bytes, occupied_s, calibrated=True)
    return MeasuredLink(latency_s, bandwidth, calibrated=True)


def _awaited_transfers(
    profile: ModelProfile, plan: Plan, cluster: Cluster, trace: Trace
) -> Iterator[tuple[str, str, float, float]]:
    """Yield (source, destination, bytes, seconds) of the messages that an idle receiver waited for.

    A real device does not see when a message arrives; but where it waits for one, it starts to compute
    when the message is there.
    """
    ends: dict[Compute, float] = {}
    idle_since: dict[Compute, float] = {}
    starts: dict[Compute, float] = {}
    free_s: dict[int, float] = {}
    for event in trace.events:
        if isinstance(event.instruction, Compute):
            idle_since[event.instruction] = free_s.get(event.rank, 0.0)
            starts[event.instruction], ends[event.instruction] = event.start_s, event.end_s
            free_s[event.rank] = event.end_s
    for compute, start_s in starts.items():
        stages = plan.pipelines[compute.pipeline].stages
        before = compute.stage + (-1 if compute.op is Pass.FORWARD else 1)
        sender = dataclasses.replace(compute, stage=before)
        if sender not in ends or not idle_since[compute] <= ends[sender] < start_s:
            continue
        boundary = stages[max(compute.stage, before)].start
        samples = plan.pipelines[compute.pipeline].microbatch_samples(compute.microbatch)
        source, destination = stages[before].device, stages[compute.stage].device
        kinds = cluster.device(source).kind, cluster.device(destination).kind
        num_bytes = samples * profile.message_bytes_per_sample(boundary, *kinds)
        if source != destination:
            yield source, destination, num_bytes, start_s - ends[sender]
