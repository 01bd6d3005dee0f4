"""Plans within what the user decides: devices left out, given stages, pipelines, devices at most."""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from cost_model.cluster import Cluster
from cost_model.errors import InfeasibleError, InputError
from cost_model.profile import ModelProfile
from partition.constraints.device_orders import Arrangement, Arrangements
from partition.constraints.pinned_cuts import PinnedCutter
from partition.estimates.batch_split import share_out
from partition.estimates.effort import effort_for
from partition.estimates.optimizer_sharding import fits
from partition.estimates.timed_pipeline import TimedPipeline
from partition.exact.feasibility import least_pipeline
from partition.local_search.moves import LocalSearch, fitted
from partition.plan import Plan
from partition.problem import Evaluate, Forced, Pin, Problem

_PIN = re.compile(r"(?P<device>[^=]+)=(?P<first>\d+)(-(?P<last>\d+))?")


def parse_pin(text: str) -> Pin:
    """Return the pin that a text names, with both layers in it.

    >>> parse_pin("big/0=0-11")
    Pin(device='big/0', start=0, stop=12)

    Raises: InputError if it is none.
    """
    match = _PIN.fullmatch(text.strip())
    if match is None:
        raise InputError(f"the pin {text!r} names no device and layers; write for example big/0=0-11")
    first = int(match["first"])
    last = first if match["last"] is None else int(match["last"])
    if last < first:
        raise InputError(f"the pin {text}: the layers run backwards; write {match['device']}={last}-{first}")
    return Pin(match["device"], first, last + 1)


def forced_of(
    profile: ModelProfile,
    cluster: Cluster,
    pins: Sequence[Pin] = (),
    num_pipelines: int | None = None,
    max_devices: int | None = None,
) -> Forced:
    """Return what is forced, checked against model and cluster.

    Raises: InputError for an unknown device, layers that the model has not, or two pins of one device.
    """
    for pin in pins:
        cluster.device(pin.device)
        if pin.stop > profile.num_layers:
            raise InputError(
                f"the pin {pin_text(pin)}: {profile.model!r} has layers 0 to {profile.num_layers - 1}"
            )
    pins = tuple(dict.fromkeys(pins))
    names = [pin.device for pin in pins]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"the pins name {name!r} twice; a pinned device serves one stage")
    for what, number in (("pipelines", num_pipelines), ("max_devices", max_devices)):
        if number is not None and number < 1:
            raise InputError(f"{what} = {number}; give at least 1")
    return Forced(pins, num_pipelines, max_devices)


def pin_text(pin: Pin) -> str:
    """Return a pin as `parse_pin` reads it."""
    return f"{pin.device}={_range_text(pin.start, pin.stop)}"


def _range_text(start: int, stop: int) -> str:
    return str(start) if stop - start == 1 else f"{start}-{stop - 1}"


def check_forced(problem: Problem) -> None:
    """Refuse what contradicts itself, whatever memory there is.

    Raises: InputError with the two that cannot both be.
    """
    forced, count = problem.forced, len(problem.cluster.devices)
    most = min(count, forced.max_devices or count)
    what = f"max_devices = {most}" if most < count else f"the {count} devices of the cluster"
    if len(forced.pins) > most:
        raise InputError(f"{len(forced.pins)} devices are pinned, more than {what}; pin fewer")
    deepest = max(
        (
            (sum(other.start <= layer < other.stop for other in forced.pins), -layer)
            for layer in range(problem.profile.num_layers)
        ),
        default=(0, 0),
    )
    pipelines = forced.num_pipelines or max(1, deepest[0])
    if pipelines > most:
        raise InputError(f"{pipelines} pipelines need {pipelines} devices, more than {what}; ask for fewer")
    if pipelines > problem.global_batch_size:
        raise InputError(
            f"{pipelines} pipelines need a sample each, more than global_batch_size "
            f"= {problem.global_batch_size}; ask for fewer pipelines or more samples"
        )
    if deepest[0] > pipelines:
        raise InputError(
            f"layer {-deepest[1]} is pinned {deepest[0]} times, with pipelines = {pipelines} there is room "
            f"for {pipelines}; pin it less often, or ask for {deepest[0]} pipelines"
        )
    free = most - len(forced.pins)
    missing = list(_gaps(problem, pipelines))
    if len(missing) > free:
        gaps = " and ".join(dict.fromkeys(_range_text(*gap) for gap in missing))
        again = f" of {len(missing)} pipelines" if pipelines > 1 else ""
        raise InputError(
            f"the pins leave layers {gaps}{again} to {free or 'no'} free device{'s' * (free != 1)}, of "
            f"{what}; pin fewer devices, or pin them to more layers"
        )


def _gaps(problem: Problem, pipelines: int) -> Iterator[tuple[int, int]]:
    """Give runs of layers that need a device of their own besides the pinned ones.

    For one pipeline all that are not pinned, for several the layers that are pinned least.
    """
    layers = problem.profile.num_layers
    pinned = [sum(pin.start <= k < pin.stop for pin in problem.forced.pins) for k in range(layers)]
    if pipelines > 1:
        least = min(pinned)
        stretch = [k for k in range(layers) if pinned[k] == least]
        stop = next((k for k in range(stretch[0], layers) if pinned[k] != least), layers)
        yield from [(stretch[0], stop)] * (pipelines - least)
        return
    edges = [0, *(k for k in range(1, layers) if (pinned[k] > 0) != (pinned[k - 1] > 0)), layers]
    for start, stop in pairwise(edges):
        if not pinned[start]:
            yield start, stop


def describe(forced: Forced) -> str:
    """Return what is forced in words, empty where nothing is."""
    words = [f"the pin {pin_text(pin)}" for pin in forced.pins]
    if forced.num_pipelines is not None:
        words.append(f"pipelines = {forced.num_pipelines}")
    if forced.max_devices is not None:
        words.append(f"max_devices = {forced.max_devices}")
    return ", ".join(words)


def forced_plans(problem: Problem, evaluate: Evaluate) -> list[Plan]:
    """Return plans that respect problem.forced, best first; each device serves one stage of one pipeline.

    On small clusters all arrangements of devices in pipelines are weighed, on others some; the best are cut
    with the pinned stages fixed, then improved by local search on the evaluation.

    Raises: InputError if what is forced contradicts itself; InfeasibleError, with the bytes that are missing,
        if none of the arrangements fits.
    """
    check_forced(problem)
    search = _ForcedSearch(problem, evaluate)
    plans = search.plans()
    if not plans:
        raise search.shortfall()
    return plans


class _ForcedSearch:
    """A search that owns the cutter of a problem and the plans found so far."""

    def __init__(self, problem: Problem, evaluate: Evaluate) -> None:
        self.problem, self.evaluate = problem, evaluate
        self.cutter = PinnedCutter(problem)
        self.arrangements = Arrangements(self.cutter)
        self.found: dict[Plan, float] = {}

    def plans(self) -> list[Plan]:
        best = self.arrangements.best()
        starts = [timed for arrangement in best for timed in self.cut(arrangement)]
        evaluated = sorted(((self.step_s(timed, 0.0), place) for place, timed in enumerate(starts)))
        effort = effort_for(len(self.problem.cluster.devices)).forced
        for step_s, place in evaluated[: effort.climbed_starts]:
            if step_s < float("inf"):
                climber = LocalSearch(self.cutter.cut_optimizer, self.step_s, effort.climb_tries)
                climber.improve(starts[place])
        if not self.found:
            self.last()
        return sorted(self.found, key=lambda plan: (self.found[plan], len(plan.device_names)))

    def last(self) -> None:
        """Find the plan of a single pipeline, if any fits whatever the order, and what is near it."""
        if self.problem.forced.num_pipelines not in (None, 1):
            return
        try:
            least = least_pipeline(self.problem)
        except InfeasibleError:
            return
        plan = least.plan("forced", self.problem)
        self.found[plan] = self.evaluate(plan).step_s
        pipeline = self.cutter.timings.pipeline(least.stages, least.microbatch_size)
        if pipeline.timing.fits:
            effort = effort_for(len(self.problem.cluster.devices)).forced
            LocalSearch(self.cutter.cut_optimizer, self.step_s, effort.climb_tries).improve([pipeline])

    def cut(self, arrangement: Arrangement) -> Iterator[list[TimedPipeline]]:
        """Give the pipelines of an arrangement, for each microbatch size."""
        share = max(1, self.problem.global_batch_size // len(arrangement))
        for size in self.problem.microbatch_sizes:
            timed = [self.cutter.pipeline(devices, size, share) for devices in arrangement]
            fitting = [pipeline for pipeline in timed if pipeline is not None]
            if len(fitting) < len(arrangement):
                continue
            yield fitting
            step_s = share_out(fitting, self.problem.global_batch_size)[0]
            again = [fitted(self.cutter.cut_optimizer, devices, size, step_s) for devices in arrangement]
            pairs = zip(again, fitting, strict=True)
            yield [new if new is not None and new.timing.fits else old for new, old in pairs]

    def step_s(self, timed: Sequence[TimedPipeline], _: float) -> float:
        """Return the step of the plan of these pipelines; inf where it does not respect what is forced."""
        plan = self.plan(timed)
        profile, cluster = self.problem.profile, self.problem.cluster
        if plan is None or not self.problem.forced.allows(plan) or not fits(plan, profile, cluster):
            return float("inf")
        if plan not in self.found:
            self.found[plan] = self.evaluate(plan).step_s
        return self.found[plan]

    def plan(self, timed: Sequence[TimedPipeline]) -> Plan | None:
        """Return the plan of a set of pipelines, each with a sample at least."""
        batch = self.problem.global_batch_size
        if len(timed) > batch:
            return None
        seconds, samples = share_out(timed, batch)
        if seconds == float("inf"):
            return None
        samples = [max(1, count) for count in samples]
        while sum(samples) != batch:
            samples[samples.index(max(samples))] += 1 if sum(samples) < batch else -1
        pairs = zip(timed, samples, strict=True)
        pipelines = tuple(pipeline.pipeline(count) for pipeline, count in pairs)
        return Plan("forced", self.problem.profile.model, batch, pipelines)

    def shortfall(self) -> ValueError:
        """Return why there is no plan: what the arrangement that lacks fewest bytes lacks."""
        size = min(self.problem.microbatch_sizes)
        scope = (
            "arrangements of the devices" if self.arrangements.exhaustive else "arrangements that were tried"
        )
        names = describe(self.problem.forced) or "nothing forced"
        worst: tuple[float, InfeasibleError] | None = None
        for devices in self.arrangements.leanest():
            cut = self.cutter.lean(self.cutter.entries(devices))
            layout = tuple((d, *layers) for d, layers in zip(devices, cut.stages, strict=True))
            error = self.cutter.costs.shortfall(layout, size) if layout else None
            if error is not None and (worst is None or error.missing_bytes > worst[0]):
                worst = (error.missing_bytes, error)
        if worst is None:
            if self.arrangements.exhaustive and not self.arrangements.leanest():
                return InputError(
                    f"{names}: no arrangement of the devices gives every layer a device; pin less"
                )
            return InfeasibleError(f"no plan with {names} was found; force less")
        missing, error = worst
        return InfeasibleError(
            f"no plan fits with {names}: even in the best of all {scope}, each serving one stage, with one "
            f"microbatch of {size} in flight, {error}; force less, or add memory",
            device=error.device,
            missing_bytes=missing,
        )
