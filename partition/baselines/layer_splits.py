"""Strategies of one pipeline whose layers are split by a simple rule, and a single device.

Without recompute. Microbatch sizes are chosen by closed-form estimates; where these are not exact the two
best are shown to the simulator, if it is given.
"""

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import accumulate, pairwise, product
from pathlib import Path
from types import ModuleType

from cost_model.cluster import Device
from cost_model.errors import InfeasibleError, InputError
from cost_model.memory import StageShape, device_memory
from partition.baselines.strategy import TooManyDevicesError, missing_bytes
from partition.estimates.device_classes import equal_devices
from partition.estimates.pipeline_costs import Layout, PipelineCosts
from partition.estimates.ranking import best_plan
from partition.estimates.step_estimate import StepEstimate
from partition.estimates.timed_pipeline import TimedStage
from partition.plan import Plan
from partition.problem import Evaluate, Problem

Cut = Callable[[PipelineCosts, int], Layout]
"""The stages that a strategy makes for a microbatch size."""


def single(problem: Problem, evaluate: Evaluate | None = None) -> Plan:
    """Return the whole model on the one device that is fastest, of those that it fits on.

    The closed form is exact for one device, so that evaluate is not asked.
    """
    costs, num_layers = PipelineCosts(problem), problem.profile.num_layers
    leaders = [group[0] for group in equal_devices(problem.cluster).members]
    layouts = [((device, 0, num_layers),) for device in leaders]
    options = list(product(layouts, problem.microbatch_sizes))
    plans = [
        costs.plan("single", layout, samples, (1,))
        for layout, samples in options
        if costs.cap(*layout[0], samples)
    ]
    if plans:
        estimate = StepEstimate(costs)
        return best_plan(problem, None, ((estimate.estimate_s(plan), plan) for plan in plans))
    shortfalls = (costs.shortfall(*option) for option in options)
    raise _least("single", (error for error in shortfalls if error is not None))


def gpipe_even(problem: Problem, evaluate: Evaluate | None = None) -> Plan:
    """Put equally many layers on every device, in the cluster's order (GPipe, Huang et al., NeurIPS 2019).

    All microbatches are in flight; only where these do not fit it gets 1F1B and its smaller in_flight, to be
    compared fairly on small memory.
    """

    def cut(costs: PipelineCosts, samples: int) -> Layout:
        devices = _all_devices(problem)
        num_layers = problem.profile.num_layers
        return _layout(devices, [num_layers * stage // len(devices) for stage in range(len(devices) + 1)])

    return _best(problem, "gpipe-even", cut, evaluate, gpipe=True)


def torchgpipe(problem: Problem, evaluate: Evaluate | None = None) -> Plan:
    """Return torchgpipe's balance by time, measured on the first device (Kim et al., 2020).

    It knows one kind of device only. Scheduled like `gpipe_even`.
    """

    def cut(costs: PipelineCosts, samples: int) -> Layout:
        devices = _all_devices(problem)
        layers = range(problem.profile.num_layers)
        seconds = [costs.busy_s(devices[0], layer, layer + 1, samples) for layer in layers]
        blocks = _blockpartition().solve(seconds, len(devices))
        return _layout(devices, list(accumulate(map(len, blocks), initial=0)))

    return _best(problem, "torchgpipe", cut, evaluate, gpipe=True)


def speed_proportional(problem: Problem, evaluate: Evaluate | None = None) -> Plan:
    """Give each device layers in proportion to its speed, the inverse of its time for the whole model.

    Layers weigh their time on the first device's kind; all devices, in the order of the cluster; 1F1B.
    """

    def cut(costs: PipelineCosts, samples: int) -> Layout:
        devices = _all_devices(problem)
        return _layout(devices, _cuts_by_speed(costs, devices, samples))

    return _best(problem, "speed-proportional", cut, evaluate)


def memory_proportional(problem: Problem, evaluate: Evaluate | None = None) -> Plan:
    """Give each device layers in proportion to its usable memory.

    Layers weigh their states and one microbatch; all devices, in the order of the cluster; 1F1B.
    """

    def cut(costs: PipelineCosts, samples: int) -> Layout:
        devices = _all_devices(problem)
        weights = layer_bytes(problem, samples)
        return _layout(devices, proportional_cuts(weights, [device.usable_bytes for device in devices]))

    return _best(problem, "memory-proportional", cut, evaluate)


def whale_pp(problem: Problem, evaluate: Evaluate | None = None) -> Plan:
    """Give each device layers by its FLOPS, early stages on large memory, then move what does not fit.

    The rule across TaskGraphs of a pipeline (Whale: Jia et al., USENIX ATC 2022, section 3.5): first stages
    hold most microbatches, so devices come by memory. A layer that is too much goes towards the device with
    room that is used least. FLOPS are the inverse of the time for the whole model. 1F1B.
    """

    def cut(costs: PipelineCosts, samples: int) -> Layout:
        order = sorted(_all_devices(problem), key=lambda device: -device.usable_bytes)
        return _layout(order, _relieved(costs, order, _cuts_by_speed(costs, order, samples), samples))

    return _best(problem, "whale-pp", cut, evaluate)


def _cuts_by_speed(costs: PipelineCosts, devices: Sequence[Device], samples: int) -> list[int]:
    """Return cuts by the speed of the devices; layers weigh their time on the first device's kind."""
    layers = range(costs.problem.profile.num_layers)
    weights = [costs.busy_s(devices[0], layer, layer + 1, samples) for layer in layers]
    whole_s = [costs.busy_s(device, 0, len(layers), samples) for device in devices]
    return proportional_cuts(weights, [1 / seconds if seconds else 1.0 for seconds in whole_s])


def _relieved(costs: PipelineCosts, order: Sequence[Device], cuts: Sequence[int], samples: int) -> list[int]:
    """Return cuts with layers moved off stages that memory does not take, as far as others have room."""
    edges, places = list(cuts), range(len(order))

    def fits(place: int, more: int = 0) -> bool:
        start, stop = edges[place], edges[place + 1]
        if stop - start + more > edges[-1]:
            return False  # it has all layers
        inside = (start, stop + more) if stop + more <= edges[-1] else (start - more, stop)
        return costs.cap(order[place], *inside, samples) >= 1

    for _ in range(edges[-1] * len(order)):
        full = next((place for place in places if not fits(place)), None)
        room = [place for place in places if fits(place, more=1)]
        if full is None or not room or edges[full + 1] - edges[full] < 2:
            break
        least = min(
            room, key=lambda place: costs.busy_s(order[place], edges[place], edges[place + 1], samples)
        )
        step = 1 if least < full else -1
        for edge in range(least + 1, full + 1) if least < full else range(full + 1, least + 1):
            edges[edge] += step
    return edges


def _best(
    problem: Problem, strategy: str, cut: Cut, evaluate: Evaluate | None, *, gpipe: bool = False
) -> Plan:
    """Return the best plan over microbatch sizes.

    Raises: InfeasibleError of the variant that lacks least.
    """
    costs = PipelineCosts(problem)
    estimate, estimated, shortfalls = StepEstimate(costs), [], []
    for samples in problem.microbatch_sizes:
        layout = cut(costs, samples)
        shortfall = costs.shortfall(layout, samples)
        if shortfall is not None:
            shortfalls.append(shortfall)
            continue
        num_microbatches = costs.num_microbatches(samples)
        timing = estimate.pipeline([TimedStage(*stage) for stage in layout], samples).timing
        flights = timing.needed_in_flight(num_microbatches)
        if gpipe and min(timing.caps) >= num_microbatches:
            flights = (num_microbatches,) * len(layout)
        plan = costs.plan(strategy, layout, samples, flights)
        estimated.append((estimate.estimate_s(plan), plan))
    if estimated:
        return best_plan(problem, evaluate, estimated)
    raise _least(strategy, shortfalls)


def _least(strategy: str, shortfalls: Iterable[InfeasibleError]) -> InfeasibleError:
    """Return the error of the variant that lacks least."""
    least = min(shortfalls, key=missing_bytes)
    return InfeasibleError(
        f"{strategy}: {least}, even with one microbatch in flight; let `auto` choose the layers",
        device=least.device,
        missing_bytes=least.missing_bytes,
    )


def _all_devices(problem: Problem) -> tuple[Device, ...]:
    devices, num_layers = problem.cluster.devices, problem.profile.num_layers
    if len(devices) > num_layers:
        raise TooManyDevicesError(
            f"more stages than layers: {len(devices)} devices for the {num_layers} layers of "
            f"{problem.profile.model!r}; exclude {len(devices) - num_layers} devices or let `auto` choose"
        )
    return devices


def _layout(devices: Sequence[Device], cuts: Sequence[int]) -> Layout:
    """Return the stages between cuts; a device without layers is left out."""
    stages = zip(devices, pairwise(cuts), strict=True)
    return tuple((device, start, stop) for device, (start, stop) in stages if start < stop)


def layer_bytes(problem: Problem, samples: int) -> list[float]:
    """Return the states of each layer with one microbatch, on the kind of device that needs most."""
    views = [
        problem.profile.on(kind) for kind in dict.fromkeys(device.kind for device in problem.cluster.devices)
    ]
    shapes = [StageShape(layer, layer + 1, 1, samples) for layer in range(problem.profile.num_layers)]
    return [max(device_memory(each, [shape]).total_bytes for each in views) for shape in shapes]


def proportional_cuts(weights: Sequence[float], shares: Sequence[float]) -> list[int]:
    """Return cuts, ends included: each stage has a layer or more, and a weight near its share of the sum.

    >>> proportional_cuts([1.0] * 8, [3.0, 1.0])
    [0, 6, 8]
    """
    prefix = list(accumulate(weights, initial=0.0))
    cuts = [0]
    for stage, share in enumerate(accumulate(shares[:-1])):
        target = prefix[-1] * share / sum(shares)
        last = len(weights) - (len(shares) - 1 - stage)
        cuts.append(min(range(cuts[-1] + 1, last + 1), key=lambda cut: (abs(prefix[cut] - target), cut)))
    return [*cuts, len(weights)]


@cache
def _blockpartition() -> ModuleType:
    """Load torchgpipe's own partitioner from its file: the package would import torch."""
    package = importlib.util.find_spec("torchgpipe")
    if package is None or package.origin is None:
        raise InputError("strategy torchgpipe needs the package; pip install torchgpipe==0.0.7")
    path = Path(package.origin).parent / "balance" / "blockpartition.py"
    spec = importlib.util.spec_from_file_location("torchgpipe_blockpartition", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
