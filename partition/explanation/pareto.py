"""Which devices to use where money and energy count, too: plans that no other beats, and the best of a kind.

A plan is costed by the devices it uses, for its whole step (`cost_model.expenses`). `auto` plans for sets of
devices; bounds of the sets say which are worth it. Within a set that is used whole the fastest plan is the
cheapest one, too.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from cost_model.cluster import Cluster
from cost_model.errors import InfeasibleError, InputError
from cost_model.expenses import Expenses, Objective, expenses
from cost_model.units import format_seconds
from partition.auto import auto
from partition.explanation.device_sets import DeviceSet, device_sets, on_devices
from partition.plan import Plan
from partition.problem import Evaluate, Problem

MOST_PLANS = 24
"""Sets of devices that `auto` is asked about."""
ROUNDING = 1e-9
"""By which share prices may add up to more than a budget: three times 0.1 is more than 0.3."""


@dataclass(frozen=True, slots=True)
class CostedPlan:
    """A plan with its figures, and the expenses of the devices that it uses."""

    plan: Plan
    step_s: float
    expenses: Expenses

    @property
    def money(self) -> float | None:
        """Money for a step."""
        return self.expenses.money(self.step_s)

    @property
    def energy_j(self) -> float | None:
        """Joules of a step."""
        return self.expenses.energy_j(self.step_s)

    def of(self, objective: Objective) -> float:
        """Return what a step of the plan has of an objective."""
        return objective.of(self.step_s, self.expenses)


@dataclass(frozen=True, slots=True)
class Front:
    """The plans that no other found beats in all objectives at once; the fastest first.

    objectives: those that are known. planned: sets of devices that `auto` planned for, of num_sets.
    within: to any plan on the other sets some plan of the front comes within this factor in every objective;
        1.05 is 5 %. complete: whether num_sets is all the sets there are.
    """

    plans: tuple[CostedPlan, ...]
    objectives: tuple[Objective, ...]
    planned: int
    num_sets: int
    within: float
    complete: bool


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan has to keep: a step within deadline_s, devices for budget_per_hour at most."""

    deadline_s: float = inf
    budget_per_hour: float = inf

    def __post_init__(self) -> None:
        if not self.deadline_s > 0:
            raise InputError(f"a deadline of {self.deadline_s:g} s leaves no time; give more")
        if not self.budget_per_hour >= 0:
            raise InputError(f"a budget of {self.budget_per_hour:g} an hour is none; give zero or more")

    def within_budget(self, used: Expenses) -> bool:
        """Return whether devices cost no more than the budget; True for any without a budget."""
        return (used.per_hour or 0.0) <= self.budget_per_hour * (1 + ROUNDING)


@dataclass(frozen=True, slots=True)
class Choice:
    """The plan with the least of an objective, of those that `auto` finds on sets of devices.

    planned: sets that it planned for, of num_sets within the limits. finished: whether none of the others can
    be better. least: no plan within the limits has less of the objective; None where sets were left out.
    """

    best: CostedPlan
    objective: Objective
    planned: int
    num_sets: int
    finished: bool
    least: float | None


def pareto(problem: Problem, evaluate: Evaluate, *, most_plans: int = MOST_PLANS) -> Front:
    """Return the plans that no other found beats in step, money and energy, the fastest one among them.

    The next set of devices is the one whose bounds are farthest beyond the plans known, by the additive
    epsilon indicator on logarithms (Zitzler et al., IEEE Trans. Evolutionary Computation 2003); none is left
    where some known plan is as good in each objective as the bounds of a set.

    Raises: InputError if neither prices nor watts are known; InfeasibleError if no plan fits.
    """
    objectives = known_objectives(problem.cluster)
    found = device_sets(problem)
    planner = _Planner(problem, evaluate, found.sets)
    planner.plan_whole()
    while planner.planned < most_plans and planner.open:
        promising = max(planner.open, key=lambda entry: _promise(entry, planner.found, objectives))
        if _promise(promising, planner.found, objectives) <= 1:
            break
        planner.plan(promising)
    within = max((_promise(entry, planner.found, objectives) for entry in planner.open), default=1.0)
    front = _not_beaten(planner.found, objectives)
    return Front(front, objectives, planner.planned, len(found.sets), max(1.0, within), found.complete)


def best_within(
    problem: Problem,
    evaluate: Evaluate,
    objective: Objective,
    limits: Limits,
    *,
    most_plans: int = MOST_PLANS,
) -> Choice:
    """Return the plan with the least of an objective within limits.

    Sets of devices are planned for by what they would take if their plans were as far from the bounds as
    those known are; sets that cannot be better than the best plan known are left out.

    Raises: InputError if a price or power that it takes is not known; InfeasibleError if no plan is found.
    """
    check_known(problem.cluster, objective, limits)
    found = device_sets(problem)
    allowed = _within_limits(found.sets, limits)
    planner = _Planner(problem, evaluate, allowed)
    planner.plan(min(allowed, key=lambda entry: entry.least_s))
    best: CostedPlan | None = None
    while True:
        fitting = [known for known in planner.found if known.step_s <= limits.deadline_s]
        best = min(fitting, key=lambda known: (known.of(objective), known.step_s), default=None)
        most = inf if best is None else best.of(objective)
        better = [entry for entry in planner.open if objective.of(entry.least_s, entry.expenses) < most]
        if not better or planner.planned >= most_plans:
            break
        planner.plan(min(better, key=lambda entry: _expected(entry, planner.lost, objective, limits)))
    if best is None:
        raise planner.none_found(limits)
    least = min(objective.of(entry.least_s, entry.expenses) for entry in allowed)
    return Choice(
        best, objective, planner.planned, len(allowed), not better, least if found.complete else None
    )


class _Planner:
    """The plans that `auto` has found for sets of devices, and the sets that are open."""

    def __init__(self, problem: Problem, evaluate: Evaluate, sets: Sequence[DeviceSet]) -> None:
        self.problem, self.evaluate = problem, evaluate
        self.open = list(sets)
        self.found: list[CostedPlan] = []
        self.planned = 0
        self.refused: InfeasibleError | None = None
        self._lost: list[float] = []

    @property
    def lost(self) -> float:
        """The mean ratio of steps found to bounds; 1 before any is known."""
        return sum(self._lost) / len(self._lost) if self._lost else 1.0

    def plan_whole(self) -> None:
        """Plan for all devices.

        Raises: InfeasibleError if nothing fits.
        """
        everything = frozenset(device.name for device in self.problem.cluster.devices)
        self.open = [entry for entry in self.open if entry.names != everything]
        self.planned += 1
        self._keep(auto(self.problem, self.evaluate))

    def plan(self, devices: DeviceSet) -> None:
        """Plan for an open set, where something fits there."""
        self.open.remove(devices)
        self.planned += 1
        try:
            plan = auto(on_devices(self.problem, devices.names), self.evaluate)
        except InfeasibleError as error:
            self.refused = self.refused or error
        except InputError:  # more pipelines are asked for than there are devices
            return
        else:
            costed = self._keep(plan)
            if devices.least_s > 0:
                self._lost.append(costed.step_s / devices.least_s)

    def _keep(self, plan: Plan) -> CostedPlan:
        figures = self.evaluate(plan)
        plan = dataclasses.replace(
            plan,
            predicted=figures,
            profile_sha256=self.problem.profile.sha256,
            cluster_sha256=self.problem.cluster.sha256,
        )
        used = expenses(self.problem.cluster, plan.device_names)
        self.found.append(CostedPlan(plan, figures.step_s, used))
        return self.found[-1]

    def none_found(self, limits: Limits) -> InfeasibleError:
        """Return why no plan keeps the limits."""
        if not self.found and limits.budget_per_hour < inf:
            return InfeasibleError(
                f"no plan fits on devices of at most {limits.budget_per_hour:g} an hour; give a larger budget"
            )
        if not self.found:
            return self.refused or InfeasibleError("no plan was found; force less")
        fastest = min(known.step_s for known in self.found)
        return InfeasibleError(
            f"no plan with a step of at most {format_seconds(limits.deadline_s)} was found; the fastest one "
            f"of {self.planned} set{'s' * (self.planned > 1)} of devices takes {format_seconds(fastest)}; "
            "give a longer deadline, or more devices"
        )


def known_objectives(cluster: Cluster) -> tuple[Objective, ...]:
    """Return the objectives that are known of all devices.

    Raises: InputError if it is the step alone.
    """
    everything = expenses(cluster, [device.name for device in cluster.devices])
    known = tuple(objective for objective in Objective if objective.of(1.0, everything) < inf)
    if len(known) == 1:
        raise InputError(
            f"neither prices nor watts are known of all devices of {cluster.name!r}; give every "
            "device `price_per_hour` or `watts` in the cluster file"
        )
    return known


def check_known(cluster: Cluster, objective: Objective, limits: Limits) -> None:
    """Refuse devices of which nobody knows what an objective or a limit counts.

    Raises: InputError naming the first one.
    """
    money = objective is Objective.MONEY or limits.budget_per_hour < inf
    for device in cluster.devices:
        for key, value, needed in (
            ("price_per_hour", device.price_per_hour, money),
            ("watts", device.watts, objective is Objective.ENERGY),
        ):
            if needed and value is None:
                raise InputError(
                    f"device {device.name!r} has no `{key}`, which is needed to choose devices by; give it "
                    "in the cluster file, or leave the device out by --exclude"
                )


def _within_limits(sets: Iterable[DeviceSet], limits: Limits) -> list[DeviceSet]:
    """Return the sets that a plan within the limits may use.

    Raises: InfeasibleError if there are none.
    """
    sets = list(sets)
    affordable = [entry for entry in sets if limits.within_budget(entry.expenses)]
    if sets and not affordable:
        least = min(entry.expenses.per_hour or 0.0 for entry in sets)
        raise InfeasibleError(
            f"no devices that could hold the model cost {limits.budget_per_hour:g} an hour or less, the "
            f"cheapest cost {least:g}; raise the budget"
        )
    fast = [entry for entry in affordable if entry.least_s <= limits.deadline_s]
    if affordable and not fast:
        least_s = min(entry.least_s for entry in affordable)
        raise InfeasibleError(
            f"no plan has a step of {format_seconds(limits.deadline_s)} or less: any takes "
            f"{format_seconds(least_s)} at least; give a longer deadline, or more devices"
        )
    if not fast:
        raise InfeasibleError("the states of the model fit on no devices of the cluster; add one, or memory")
    return fast


def _expected(
    entry: DeviceSet, lost: float, objective: Objective, limits: Limits
) -> tuple[bool, float, float]:
    """Return a key: sets that should keep the deadline first, by the objective; the others by step."""
    step_s = entry.least_s * lost
    late = step_s > limits.deadline_s
    return late, step_s if late else objective.of(step_s, entry.expenses), entry.least_s


def _promise(entry: DeviceSet, found: Sequence[CostedPlan], objectives: Sequence[Objective]) -> float:
    """Return the factor by which a plan on a set may be better than each known one in some objective.

    At most 1 where a known plan is as good as the bounds in all of them.
    """
    least = [objective.of(entry.least_s, entry.expenses) for objective in objectives]
    return min(
        max(_ratio(known.of(objective), bound) for objective, bound in zip(objectives, least, strict=True))
        for known in found
    )


def _ratio(value: float, bound: float) -> float:
    if bound > 0:
        return value / bound
    return 1.0 if value == 0 else inf


def _not_beaten(found: Sequence[CostedPlan], objectives: Sequence[Objective]) -> tuple[CostedPlan, ...]:
    """Return the plans that no other is at least as good as in all objectives; the fastest first."""
    front: list[CostedPlan] = []
    for known in sorted(found, key=lambda known: [known.of(objective) for objective in objectives]):
        if not any(all(kept.of(each) <= known.of(each) for each in objectives) for kept in front):
            front.append(known)
    return tuple(front)
