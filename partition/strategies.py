"""The strategies that one can ask for: the plan spaces of known systems, each a screenful, and `auto`.

Each plans one pipeline without recompute. It tries every microbatch size of the problem and keeps the plan
that evaluates best: by the simulator, or by the closed-form estimate where none is given.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from types import ModuleType

from cost_model.cluster import Device
from cost_model.errors import InfeasibleError, InputError
from cost_model.memory import StageShape, device_memory
from partition.pipeline_costs import Layout, PipelineCosts
from partition.plan import Pipeline, Plan
from partition.problem import Evaluate, Problem
from partition.search import AUTO, Rank, least_shortfall, rank, search_chains
from partition.windows import cap_in_flight

Strategy = Callable[[Problem, Evaluate | None], Plan]
Cut = Callable[[PipelineCosts, int], Layout]
"""The stages that a strategy makes for a microbatch size."""

NUM_JUDGED = 16  # candidates of the search that the verdict is asked about


class TooManyStagesError(InputError):
    """A strategy that uses every device has more of them than the model has layers."""


def single(problem: Problem, evaluate: Evaluate | None = None) -> Plan:
    """The whole model on the one device that is fastest, of those that it fits on."""

    def cut(device: Device, costs: PipelineCosts, samples: int) -> Layout:
        return ((device, 0, problem.profile.num_layers),)

    return _best("single", problem, [partial(cut, device) for device in problem.cluster.devices], evaluate)


def gpipe_even(problem: Problem, evaluate: Evaluate | None = None) -> Plan:
    """Equally many layers on every device, in the order of the cluster (GPipe, Huang et al., NeurIPS 2019).

    All microbatches are in flight; only where these do not fit it gets 1F1B and its smaller in_flight, to be
    compared fairly on small memory.
    """

    def cut(costs: PipelineCosts, samples: int) -> Layout:
        devices = _all_devices(problem)
        num_layers = problem.profile.num_layers
        return _layout(devices, [num_layers * stage // len(devices) for stage in range(len(devices) + 1)])

    return _best("gpipe-even", problem, [cut], evaluate, gpipe=True)


def torchgpipe(problem: Problem, evaluate: Evaluate | None = None) -> Plan:
    """The balance by time that torchgpipe would choose, measured on the first device (Kim et al., 2020).

    It knows one kind of device only. Scheduled like `gpipe_even`.
    """

    def cut(costs: PipelineCosts, samples: int) -> Layout:
        devices = _all_devices(problem)
        layers = range(problem.profile.num_layers)
        seconds = [costs.busy_s(devices[0], layer, layer + 1, samples) for layer in layers]
        blocks = _blockpartition().solve(seconds, len(devices))
        return _layout(devices, list(accumulate(map(len, blocks), initial=0)))

    return _best("torchgpipe", problem, [cut], evaluate, gpipe=True)


def speed_proportional(problem: Problem, evaluate: Evaluate | None = None) -> Plan:
    """Each device gets layers in proportion to its speed, the inverse of its time for the whole model.

    Layers weigh their time on the first device's kind; all devices, in the order of the cluster; 1F1B.
    """

    def cut(costs: PipelineCosts, samples: int) -> Layout:
        devices = _all_devices(problem)
        layers = range(problem.profile.num_layers)
        weights = [costs.busy_s(devices[0], layer, layer + 1, samples) for layer in layers]
        whole_s = [costs.busy_s(device, 0, len(layers), samples) for device in devices]
        shares = [1 / seconds if seconds else 1.0 for seconds in whole_s]
        return _layout(devices, proportional_cuts(weights, shares))

    return _best("speed-proportional", problem, [cut], evaluate)


def memory_proportional(problem: Problem, evaluate: Evaluate | None = None) -> Plan:
    """Each device gets layers in proportion to its usable memory.

    Layers weigh their states and one microbatch; all devices, in the order of the cluster; 1F1B.
    """

    def cut(costs: PipelineCosts, samples: int) -> Layout:
        devices = _all_devices(problem)
        shapes = [StageShape(layer, layer + 1, 1, samples) for layer in range(problem.profile.num_layers)]
        weights = [device_memory(problem.profile, [shape]).total_bytes for shape in shapes]
        return _layout(devices, proportional_cuts(weights, [device.usable_bytes for device in devices]))

    return _best("memory-proportional", problem, [cut], evaluate)


def auto(problem: Problem, evaluate: Evaluate | None = None) -> Plan:
    """The best of the candidates of `search_chains`, with more and less in flight, and every baseline.

    Never worse than a baseline, since each is a candidate. Ties go to fewer devices.

    Raises: InfeasibleError with the least that is missing, over all orders and cuts.
    """
    costs, verdict = PipelineCosts(problem), _Verdict(problem, evaluate)
    candidates = search_chains(problem)
    plans = [variant for plan in candidates.plans[:NUM_JUDGED] for variant in _variants(costs, plan)]
    for baseline in BASELINES.values():
        try:
            plans.append(baseline(problem, evaluate))
        except (InfeasibleError, TooManyStagesError):
            continue
    if not plans:
        raise least_shortfall(problem)
    return dataclasses.replace(min(plans, key=verdict), strategy=AUTO)


BASELINES: Mapping[str, Strategy] = {
    "single": single,
    "gpipe-even": gpipe_even,
    "torchgpipe": torchgpipe,
    "memory-proportional": memory_proportional,
    "speed-proportional": speed_proportional,
}
STRATEGIES: Mapping[str, Strategy] = {**BASELINES, AUTO: auto}


class _Verdict:
    """Sort key of plans: seconds of a step, then `rank`; remembers what it was asked.

    Seconds are rounded to ten digits, so that ties are ties on every machine.
    """

    def __init__(self, problem: Problem, evaluate: Evaluate | None) -> None:
        self._costs, self._evaluate = PipelineCosts(problem), evaluate
        self._keys: dict[tuple[Pipeline, ...], tuple[float, Rank]] = {}

    def __call__(self, plan: Plan) -> tuple[float, Rank]:
        if plan.pipelines not in self._keys:
            step_s = self._evaluate(plan).step_s if self._evaluate else self._costs.estimate_s(plan)
            self._keys[plan.pipelines] = (float(f"{step_s:.9e}"), rank(plan))
        return self._keys[plan.pipelines]


def _best(
    strategy: str, problem: Problem, cuts: Iterable[Cut], evaluate: Evaluate | None, *, gpipe: bool = False
) -> Plan:
    """The best plan over cuts and microbatch sizes.

    Raises: InfeasibleError of the variant that lacks least.
    """
    costs = PipelineCosts(problem)
    plans, shortfalls = [], []
    for cut in cuts:
        for samples in problem.microbatch_sizes:
            layout = cut(costs, samples)
            shortfall = costs.shortfall(layout, samples)
            if shortfall is not None:
                shortfalls.append(shortfall)
                continue
            num_microbatches = costs.num_microbatches(samples)
            flights = costs.windows(layout, samples)
            if gpipe and min(costs.caps(layout, samples)) == num_microbatches:
                flights = (num_microbatches,) * len(layout)
            plans.append(costs.plan(strategy, layout, samples, flights))
    if plans:
        return min(plans, key=_Verdict(problem, evaluate))
    least = min(shortfalls, key=lambda error: error.missing_bytes)
    raise InfeasibleError(
        f"{strategy}: {least}, even with one microbatch in flight; let `auto` choose the layers",
        device=least.device,
        missing_bytes=least.missing_bytes,
    )


def _all_devices(problem: Problem) -> tuple[Device, ...]:
    devices, num_layers = problem.cluster.devices, problem.profile.num_layers
    if len(devices) > num_layers:
        raise TooManyStagesError(
            f"more stages than layers: {len(devices)} devices for the {num_layers} layers of "
            f"{problem.profile.model!r}; exclude {len(devices) - num_layers} devices or let `auto` choose"
        )
    return devices


def _layout(devices: Sequence[Device], cuts: Sequence[int]) -> Layout:
    """Stages between cuts; a device without layers is left out."""
    stages = zip(devices, pairwise(cuts), strict=True)
    return tuple((device, start, stop) for device, (start, stop) in stages if start < stop)


def proportional_cuts(weights: Sequence[float], shares: Sequence[float]) -> list[int]:
    """Cuts, ends included, that give each stage at least one layer and a weight near its share of the sum.

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
    """torchgpipe's own partitioner, from its file: the package would import torch."""
    package = importlib.util.find_spec("torchgpipe")
    if package is None or package.origin is None:
        raise InputError("strategy torchgpipe needs the package; pip install torchgpipe==0.0.7")
    path = Path(package.origin).parent / "balance" / "blockpartition.py"
    spec = importlib.util.spec_from_file_location("torchgpipe_blockpartition", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _variants(costs: PipelineCosts, plan: Plan) -> Iterator[Plan]:
    """The plan with other in_flight, each within memory: one and two more, fewer, and all as in GPipe."""
    (pipeline,) = plan.pipelines
    layout, samples = costs.layout(pipeline), pipeline.microbatch_size
    flights = [stage.in_flight for stage in pipeline.stages]
    num_stages, num_microbatches = len(flights), costs.num_microbatches(samples)
    wanted = (
        flights,
        [flight + 1 for flight in flights[:-1]] + flights[-1:],
        [flight + 2 for flight in flights[:-1]] + flights[-1:],
        [num_stages - stage for stage in range(num_stages)],
        [num_microbatches] * num_stages,
    )
    caps = costs.caps(layout, samples)
    for flight in dict.fromkeys(cap_in_flight(entry, caps) for entry in wanted):
        yield costs.plan(plan.strategy, layout, samples, flight)
