"""PipeDream's planner: replicated stages, planned as if all devices were equal.

State of the programme: the layers [0, stop) that are placed, for one period. Label: the fewest (devices, then
stages) that keep the period. Transition: a last stage [start, stop) on as many replicas as the period asks.
Source: Narayanan et al., SOSP 2019, section 3.1, turned round: their state has the number of devices too, and
their label is the period; here the period is bisected, which has the same optimum.
Complexity: O(layers^2) a period, some 40 periods; theirs is O(layers^2 * devices^2).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import harmonic_mean

import numpy as np
import numpy.typing as npt

from cost_model.memory import trained_bytes
from partition.baselines.drafts import Drafts
from partition.estimates.arrays import Floats
from partition.estimates.device_classes import equal_devices
from partition.estimates.layer_bytes import between
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.shared_pipelines import Draft, SharedLayers, refined
from partition.estimates.stage_tables import ProblemTables
from partition.plan import Plan
from partition.problem import Evaluate, Problem

PRECISION = 1e-9  # of a period
SHORTEST_S = 1e-300  # a period, where all times are zero
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ReplicatedStage:
    """Layers [start, stop) on each of num_replicas devices, which share the samples equally."""

    start: int
    stop: int
    num_replicas: int


@dataclass(frozen=True, slots=True)
class EqualDevices:
    """What layers cost for a microbatch where all devices and all links are alike.

    layer_s: forward and backward of each layer. sync_s: its gradients on a link, per microbatch of a step.
    hop_s: the link in front of each layer, both ways; 0 for the first.
    most_replicas: of a stage, since each needs a sample.
    """

    num_devices: int
    most_replicas: int
    layer_s: tuple[float, ...]
    sync_s: tuple[float, ...]
    hop_s: tuple[float, ...]

    def period_s(self, stages: Sequence[ReplicatedStage]) -> float:
        """Return the seconds per microbatch of the slowest stage or link."""
        return max(max(self.stage_s(stage), self.hop_s[stage.start]) for stage in stages)

    def stage_s(self, stage: ReplicatedStage) -> float:
        """Return T of the paper: a stage's seconds per microbatch, to compute or to sum gradients."""
        count, layers = stage.num_replicas, slice(stage.start, stage.stop)
        return max(sum(self.layer_s[layers]) / count, 2 * (count - 1) / count * sum(self.sync_s[layers]))


def pipedream(problem: Problem, evaluate: Evaluate | None = None) -> Plan:
    """Plan stages with replication as in PipeDream (Narayanan et al., SOSP 2019, section 3.1).

    Its programme knows one speed, the average, one link, the slowest between neighbours, and one memory, the
    least. Gradients are summed once a step here, not once a microbatch. Devices are taken in the order of
    the cluster, none that do not shorten the period; each stage has in flight what it needs, as far as
    memory allows it.

    Raises: InfeasibleError of the microbatch size that lacks least.
    """
    drafts = Drafts("pipedream", problem)
    tables = ProblemTables(problem, equal_devices(problem.cluster))
    for size in sorted({min(size, problem.global_batch_size) for size in problem.microbatch_sizes}):
        devices, fits = (
            as_if_equal(drafts.costs, size),
            tables.at(size).caps(recompute=False).min(axis=0) >= 1,
        )
        stages = replicated_stages(devices, fits) or replicated_stages(devices)
        # shares to the sample, or of whole microbatches
        for draft in dict.fromkeys(refinement(problem, stages, size, unit) for unit in (1, size)):
            drafts.enter(draft)
    return drafts.best(evaluate)


def as_if_equal(costs: PipelineCosts, samples: int) -> EqualDevices:
    """Return a problem's devices with their average speed at each layer, and the slowest link for all."""
    problem, profile = costs.problem, costs.problem.profile
    share = problem.gradient_share
    classes, devices = equal_devices(problem.cluster), problem.cluster.devices
    links = {costs.network.route(one.name, other.name).link for one, other in pairwise(devices)}

    def link_s(num_bytes: float) -> float:
        return max((link.occupancy_s(num_bytes) for link in links), default=0.0)

    layers = range(profile.num_layers)
    busy_s = [[costs.busy_s(group[0], k, k + 1, samples) for group in classes.members] for k in layers]
    num_microbatches = costs.num_microbatches(samples)
    return EqualDevices(
        num_devices=len(devices),
        most_replicas=min(len(devices), problem.global_batch_size),
        layer_s=tuple(harmonic_mean(row, weights=classes.counts) for row in busy_s),
        sync_s=tuple(link_s(share * trained_bytes(profile, [layer])) / num_microbatches for layer in layers),
        hop_s=tuple(
            (1 + costs.prices.takes_gradient(k))
            * link_s(max(costs.prices.boundary_bytes(k, samples, one, one) for one, *_ in classes.members))
            if k
            else 0.0
            for k in layers
        ),
    )


def replicated_stages(devices: EqualDevices, fits: Bools | None = None) -> tuple[ReplicatedStage, ...]:
    """Return the stages of least period, then of fewest devices, then the fewest stages; () where none do.

    fits: by [start, stop], the stages that memory takes; None for all.

    The paper asks for the least period of layers [0, stop) on m devices, for all m; this asks for the fewest
    devices with which layers [0, stop) reach a period, and bisects the period. The optimum is the same, for
    a thousand devices in milliseconds.
    """
    busy, sync = between(np.array(devices.layer_s)), between(np.array(devices.sync_s))
    allowed = np.ones(busy.shape, dtype=bool) if fits is None else fits
    longest_s = sum(devices.layer_s)
    low = max(longest_s / devices.num_devices, SHORTEST_S)
    high = max(low, longest_s, *devices.hop_s)  # that of any stages without replicas, or more
    best = _fewest_devices(devices, busy, sync, allowed, high)
    if not best:
        return ()
    middle = low
    while high > low * (1 + PRECISION):
        stages = _fewest_devices(devices, busy, sync, allowed, middle)
        if stages:
            best, high = stages, min(middle, devices.period_s(stages))
        else:
            low = middle
        middle = math.sqrt(low * high)
    return best


def _fewest_devices(
    devices: EqualDevices, busy: Floats, sync: Floats, allowed: Bools, period_s: float
) -> tuple[ReplicatedStage, ...]:
    """Return the stages of a period that take fewest devices, then are the fewest; () where all do not do.

    Of the numbers of replicas that compute fast enough the least one has the least to sum.
    """
    ends, most_s = len(busy), period_s * (1 + PRECISION)
    replicas = np.maximum(np.ceil(busy / period_s - PRECISION), 1.0)
    slow = ~allowed | (replicas > devices.most_replicas) | (2 * (replicas - 1) / replicas * sync > most_s)
    slow[np.array((*devices.hop_s, 0.0)) > most_s] = True
    taken = np.where(slow, np.inf, replicas * ends + 1)  # fewer than `ends` stages never outweigh a device
    fewest, start_of = [0.0], [0]
    for stop in range(1, ends):
        totals = np.array(fewest) + taken[:stop, stop]
        start_of.append(int(totals.argmin()))
        fewest.append(float(totals[start_of[-1]]))
    if not fewest[-1] // ends <= devices.num_devices:
        return ()
    stages, stop = [], ends - 1
    while stop:
        start = start_of[stop]
        stages.append(ReplicatedStage(start, stop, int(replicas[start, stop])))
        stop = start
    return tuple(reversed(stages))


def refinement(problem: Problem, stages: Sequence[ReplicatedStage], samples: int, unit: int) -> Draft:
    """Return replicated stages as pipelines: the common refinement of the replicas' equal shares.

    Shares are of whole units of samples. 12 samples on two replicas, then on three:

        a a a a a a b b b b b b
        c c c c d d d d e e e e     pipelines ac, ad, bd, be of 4, 2, 2 and 4 samples
    """
    batch, devices = problem.global_batch_size, iter(problem.cluster.devices)
    num_units, rows = -(-batch // unit), []
    for stage in stages:
        count = stage.num_replicas
        edges = [min(batch, num_units * k // count * unit) for k in range(count + 1)]
        shares = tuple((next(devices), end - begin) for begin, end in pairwise(edges))
        rows.append(SharedLayers(stage.start, stage.stop, shares))
    return refined(rows, samples)
