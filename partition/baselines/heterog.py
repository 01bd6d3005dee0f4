"""HeteroG: each group of layers is replicated evenly, replicated in proportion, or placed on one device.

Source: Yi et al., "Optimizing distributed training deployment in heterogeneous GPU clusters", CoNEXT 2020,
section 4. Their groups are some 2,000 of operations, a graph neural network and reinforcement learning choose
for each, and a pool of plain strategies seeds the search.

State of the search here: a choice for each group. Label: the estimated step. Transition: another choice for
one group, the best of all taken, until none is better. It begins with each plain strategy of the pool: all
replicated evenly, or in proportion; all on one device; groups in turn on the devices.

What differs: groups are runs of layers of about equal time, at most MOST_GROUPS; a group is placed on the
first device of a class of equal ones, or on the next one in turn in the pool. Whether gradients are summed by
a ring, by nodes, or by reduction to one device and broadcast (a parameter server's way) is decided bucket by
bucket by cost, as in every plan (`cost_model.collective_choice`), and devices that serve several stages run
them in the order of list scheduling (`hetpipe.program.list_scheduling`), as HEFT ranks them in the paper.
All groups of the search have one microbatch size; the plain strategies of the pool, equal shares and shares
in proportion, are made with sizes of each device's own, too, and the best of all is the plan.
Complexity: O(passes * groups * (classes + 2)) drafts of as many pipelines as devices.
"""

import math
from collections.abc import Iterator
from contextlib import suppress

from cost_model.cluster import Device
from cost_model.errors import InfeasibleError
from partition.baselines.data_parallel import ddp
from partition.baselines.drafts import Drafts, check_few_devices
from partition.baselines.flops_shares import hap
from partition.baselines.layer_splits import proportional_cuts
from partition.estimates.batch_split import in_proportion
from partition.estimates.device_classes import equal_devices
from partition.estimates.shared_pipelines import SharedLayers, refined
from partition.plan import Plan
from partition.problem import Evaluate, Problem

MOST_GROUPS = 6
MOST_PASSES = 3

EVENLY, IN_PROPORTION = "evenly", "in proportion"
Choice = Device | str
"""A device that a group is placed on, or how it is replicated on all."""
Choices = tuple[Choice, ...]


def heterog(problem: Problem, evaluate: Evaluate | None = None) -> Plan:
    """Return the best plan found whose groups of layers are each replicated or placed.

    Raises: TooManyDevicesError where there are too many; InfeasibleError of the variant that lacks least.
    """
    check_few_devices("heterog", problem)
    search = _Search(problem)
    sizes = sorted({min(size, problem.global_batch_size) for size in problem.microbatch_sizes})
    pool = [(search.step_s(choices, size), -size, choices) for choices in search.pool() for size in sizes]
    _, size, best = min(pool, key=lambda entry: entry[:2])
    search.improve(best, -size)
    for rule in (ddp, hap):
        with suppress(InfeasibleError):
            search.drafts.enter_plan(rule(problem, None))
    return search.drafts.best(evaluate)


class _Search:
    """The groups of a problem, and what choices for them take."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self.drafts = problem, Drafts("heterog", problem)
        self._devices = problem.cluster.devices
        leaders = [group[0] for group in equal_devices(problem.cluster).members]
        self._choices: tuple[Choice, ...] = (IN_PROPORTION, EVENLY, *leaders)
        layers, size = range(problem.profile.num_layers), min(problem.microbatch_sizes)
        seconds = [self.drafts.costs.busy_s(self._devices[0], layer, layer + 1, size) for layer in layers]
        self._cuts = proportional_cuts(seconds, [1.0] * min(len(layers), MOST_GROUPS))
        self._known: dict[tuple[tuple[str, ...], int], float] = {}

    def pool(self) -> Iterator[Choices]:
        """Give the plain strategies that the search may begin with."""
        count = len(self._cuts) - 1
        for choice in self._choices:
            yield (choice,) * count
        yield tuple(self._devices[place * len(self._devices) // count] for place in range(count))
        yield tuple(self._devices[place % len(self._devices)] for place in range(count))

    def improve(self, choices: Choices, size: int) -> None:
        """Change one group at a time, for the better, until nothing helps."""
        best_s = self.step_s(choices, size)
        for _ in range(MOST_PASSES):
            before_s = best_s
            for group in range(len(choices)):
                for choice in self._choices:
                    changed = (*choices[:group], choice, *choices[group + 1 :])
                    seconds = self.step_s(changed, size)
                    if seconds < best_s:
                        best_s, choices = seconds, changed
            if best_s == before_s or math.isinf(best_s):
                return

    def step_s(self, choices: Choices, size: int) -> float:
        """Return the estimated seconds of a step, inf where memory does not take it."""
        key = (tuple(map(_name, choices)), size)
        if key not in self._known:
            rows = [
                SharedLayers(start, stop, self._shares(choice, size))
                for choice, start, stop in zip(choices, self._cuts, self._cuts[1:], strict=False)
            ]
            self._known[key] = self.drafts.enter(refined(rows, size))
        return self._known[key]

    def _shares(self, choice: Choice, size: int) -> tuple[tuple[Device, int], ...]:
        batch = self._problem.global_batch_size
        if isinstance(choice, Device):
            return ((choice, batch),)
        # by the whole model, so that a device has the same samples in each group and sends nothing
        last = self._problem.profile.num_layers
        seconds = [self.drafts.costs.busy_s(device, 0, last, size) for device in self._devices]
        weights = [1.0 if choice == EVENLY or not spent else 1 / spent for spent in seconds]
        return tuple(zip(self._devices, in_proportion(weights, batch), strict=True))


def _name(choice: Choice) -> str:
    return choice.name if isinstance(choice, Device) else choice
