"""Whether sums go by nodes: as each is cheapest alone, or none does, by simulation of the whole step."""

from collections.abc import Sequence
from dataclasses import replace

from cost_model.collectives import Collective
from cost_model.sum_resources import ring_holds_s
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.gradient_buckets import not_by_nodes
from hetpipe.program.instructions import Program, Schedule
from hetpipe.simulation.fast_simulator import MANY, StepTimes, has_clock, step_times
from partition.estimates.ranking import instructions

MOST_WEIGHT = 5_000
"""Instructions' worth of simulation up to which both are simulated: sums seldom get into each other's way."""


def with_best_collectives(costs: ProgramCosts, *, many: int = MANY) -> tuple[Program, StepTimes | None]:
    """Return a program, its sums as they are or none by nodes, whichever step is shorter; and its times.

    What is cheapest alone may meet others on a card. Of plans that have a clock, under 1F1B, and are small;
    others stay as they are, without times. The other one is simulated where its sums, if they begin no
    sooner, may be over sooner than the step. many: see `step_times`.
    """
    program = costs.program
    if not has_clock(program.plan) or program.schedule is not Schedule.ONE_F_ONE_B:
        return program, None
    plain = not_by_nodes(program.plan, program.buckets, costs.sync_bytes, costs.network)
    if plain == program.buckets or instructions(program.plan) > MOST_WEIGHT:
        return program, None
    times, other_costs = step_times(costs, many=many), costs.of(replace(program, buckets=plain))
    if sums_over_s(other_costs, times.sums_begin_s) >= times.step_s:
        return program, times
    other_times = step_times(other_costs, many=many)
    if other_times.step_s < times.step_s:
        return other_costs.program, other_times
    return program, times


def sums_over_s(costs: ProgramCosts, begin_s: Sequence[float]) -> float:
    """Return when the rings of buckets are over at the earliest, each begun at its time.

    Those that share a link or a card hold it one after another.
    """
    held: dict[int, list[tuple[float, float]]] = {}  # by resource: from when on, for how long
    for index, bucket in enumerate(costs.program.buckets):
        if bucket.collective is Collective.RING and bucket.state_owner is None:
            names = [costs.device_names[rank] for rank in bucket.ranks]
            for resource, seconds in ring_holds_s(costs.network, costs.sync_bytes(index), names).items():
                held.setdefault(resource, []).append((begin_s[index], seconds))
    over_s = 0.0
    for sums in held.values():
        left_s = 0.0
        for from_s, seconds in sorted(sums, reverse=True):
            left_s += seconds
            over_s = max(over_s, from_s + left_s)
    return over_s
