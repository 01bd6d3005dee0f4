"""Poplar's allocation where gradients, or weights too, are sharded: all devices run equally many rounds.

Source: Zhang et al., "Poplar: Efficient Scaling of Distributed DNN Training on Heterogeneous GPU Clusters",
AAAI 2025, the batch allocation of ZeRO stages 2 and 3. Every microbatch is a round of sums in which all take
part, so a time T of a round is searched for: each device has the largest microbatch that it computes in T,
which fixes the number of rounds; the last one takes what is left.

What differs: T is the time of some device for a microbatch of any size up to its largest
(`largest_microbatch`), and every one of these is tried. What a round's communication takes is for the
simulator to say, which judges two: the candidate with the fewest seconds of computation, and that with the
fewest rounds. Times between profiled sizes are on straight lines, where the paper has a cubic spline: no
nearer by measurement (`examples/benchmarks/batch_curves`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cost_model.errors import InfeasibleError, InputError
from cost_model.sharding import Sharding
from partition.baselines.largest_microbatch import largest_microbatches, tried_sizes
from partition.baselines.strategy import least_of, shortfall
from partition.estimates.batch_split import in_proportion
from partition.estimates.optimizer_sharding import with_state_owners
from partition.estimates.pipeline_costs import PipelineCosts
from partition.plan import Pipeline, Plan, Stage
from partition.problem import Evaluate, Problem, check_plan


def poplar_2(problem: Problem, evaluate: Evaluate | None = None) -> Plan:
    """Run equal numbers of unequal microbatches on all devices, gradients sharded.

    Raises: InfeasibleError if none fits.
    """
    return _in_rounds("poplar-2", problem, Sharding.GRADIENTS, evaluate)


def poplar_3(problem: Problem, evaluate: Evaluate | None = None) -> Plan:
    """Run equal numbers of unequal microbatches on all devices, gradients and weights sharded.

    Raises: InfeasibleError if none fits.
    """
    return _in_rounds("poplar-3", problem, Sharding.WEIGHTS, evaluate)


def sharded_replicas(strategy: str, problem: Problem, sharding: Sharding, sizes: Mapping[str, int]) -> Plan:
    """Return the whole model on some devices, each with its microbatch size, in equally many rounds.

    The last round takes what is left, in proportion; of a single round who gets nothing is left out. Owners
    are those of `with_state_owners`; whether all fits is not asked.
    """
    each, batch = sum(sizes.values()), problem.global_batch_size
    full, rest = divmod(batch, each)
    last = in_proportion(list(map(float, sizes.values())), rest) if rest else [0] * len(sizes)
    layers = (0, problem.profile.num_layers)
    pipelines = tuple(
        Pipeline(size, full * size + more, (Stage((name,), layers, 1),))
        for (name, size), more in zip(sizes.items(), last, strict=True)
        if full * size + more
    )
    plan = Plan(
        strategy, problem.profile.model, batch, pipelines, int(sharding),
        gradient_dtype=problem.gradient_dtype,
    )  # fmt: skip
    check_plan(plan, problem.profile, problem.cluster)
    return with_state_owners(plan, problem.profile, problem.cluster)


@dataclass(frozen=True, slots=True)
class _Rounds:
    """A number of rounds, the seconds of computation of all of them, and the microbatch of each device."""

    number: int
    seconds: float
    sizes: Mapping[str, int]

    @property
    def key(self) -> tuple[int, frozenset[str]]:
        """How many rounds there are, and who takes part."""
        return self.number, frozenset(self.sizes)


def _in_rounds(strategy: str, problem: Problem, sharding: Sharding, evaluate: Evaluate | None) -> Plan:
    if len(problem.cluster.devices) < 2:
        raise InfeasibleError(f"{strategy}: one device has nobody to share with; let `auto` plan for it")
    try:
        made = _Plans(strategy, problem, sharding)
        candidates = list(_candidates(problem, sharding))
        soonest = made.first_fitting(sorted(candidates, key=lambda each: (each.seconds, each.number)))
        if evaluate is None:
            return soonest
        fewest = made.first_fitting(sorted(candidates, key=lambda each: each.number))
    except InputError as error:  # what is not sharded at all: 16 bits, gradients in bf16
        raise InfeasibleError(f"{strategy}: {error}") from error
    if soonest == fewest:
        return soonest
    return min((soonest, fewest), key=lambda plan: evaluate(plan).step_s)


class _Plans:
    """The plans of numbers of rounds, each made once, and what those lack that do not fit."""

    def __init__(self, strategy: str, problem: Problem, sharding: Sharding) -> None:
        self._strategy, self._problem, self._sharding = strategy, problem, sharding
        self._made: dict[tuple[int, frozenset[str]], Plan] = {}
        self._errors: dict[tuple[int, frozenset[str]], InfeasibleError] = {}

    def first_fitting(self, candidates: Sequence[_Rounds]) -> Plan:
        """Return the plan of the first one that memory takes.

        Raises: InfeasibleError of what lacks least, if it takes none.
        """
        for each in candidates:
            if each.key not in self._made:
                self._make(each)
            if each.key not in self._errors:
                return self._made[each.key]
        raise least_of(self._strategy, list(self._errors.values()))

    def _make(self, rounds: _Rounds) -> None:
        plan = sharded_replicas(self._strategy, self._problem, self._sharding, rounds.sizes)
        self._made[rounds.key], lacking = plan, shortfall(self._problem, plan)
        if lacking is not None:
            self._errors[rounds.key] = lacking


def _candidates(problem: Problem, sharding: Sharding) -> Iterator[_Rounds]:
    """Yield those that are over soonest, for each number of rounds that there can be and who takes part.

    Each device has the largest microbatch that it computes within a round, which lasts as long as some device
    needs for one of its sizes. Longer rounds of the same number need no less memory, unless another device
    takes part, which owns states too. Microbatches that do not fit where nothing is owned are left out, but
    the smallest.
    """
    costs, layers = PipelineCosts(problem), problem.profile.num_layers
    smallest = min(*problem.microbatch_sizes, problem.global_batch_size)
    largest = {name: max(size, smallest) for name, size in largest_microbatches(problem, sharding).items()}
    leaders = {
        (device.kind, device.speed, largest[device.name]): device for device in problem.cluster.devices
    }
    round_s = {
        key: {size: costs.busy_s(device, 0, layers, size) for size in _sizes(problem, key[0], key[2])}
        for key, device in leaders.items()
    }
    seen = set()
    for seconds in sorted({each for by_size in round_s.values() for each in by_size.values()}):
        found = {
            key: max((size for size, each in by_size.items() if each <= seconds), default=0)
            for key, by_size in round_s.items()
        }
        each = {
            device.name: found[device.kind, device.speed, largest[device.name]]
            for device in problem.cluster.devices
        }
        chosen = {name: size for name, size in each.items() if size}
        if not chosen:  # where a larger one was measured to be sooner, nobody may be found within its time
            continue
        number = -(-problem.global_batch_size // sum(chosen.values()))
        rounds = _Rounds(number, number * seconds, chosen)
        if rounds.key not in seen:
            seen.add(rounds.key)
            yield rounds


def _sizes(problem: Problem, kind: str, largest: int) -> Iterable[int]:
    return range(1, largest + 1) if problem.any_size else tried_sizes(problem, kind, largest)
