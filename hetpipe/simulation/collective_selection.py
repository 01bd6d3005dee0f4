"""Whether sums go by nodes: as each is cheapest alone, or none does, by simulation of the whole step."""

from dataclasses import replace

from hetpipe.program.costs import ProgramCosts
from hetpipe.program.gradient_buckets import not_by_nodes
from hetpipe.program.instructions import Program, Schedule
from hetpipe.simulation.fast_simulator import MANY, StepTimes, both_step_times, has_clock
from partition.estimates.ranking import instructions

MOST_WEIGHT = 5_000
"""Instructions' worth of simulation up to which both are simulated: sums seldom get into each other's way."""


def with_best_collectives(costs: ProgramCosts, *, many: int = MANY) -> tuple[Program, StepTimes | None]:
    """Return a program, its sums as they are or none by nodes, whichever step is shorter; and its times.

    What is cheapest alone may meet others on a card. Of plans that have a clock, under 1F1B, and are small;
    others stay as they are, without times. many: see `step_times`.
    """
    program = costs.program
    if not has_clock(program.plan) or program.schedule is not Schedule.ONE_F_ONE_B:
        return program, None
    plain = not_by_nodes(program.plan, program.buckets, costs.sync_bytes, costs.network)
    if plain == program.buckets or instructions(program.plan) > MOST_WEIGHT:
        return program, None
    other = replace(program, buckets=plain)
    times, other_times = both_step_times(costs, costs.of(other), many=many)
    return (other, other_times) if other_times.step_s < times.step_s else (program, times)
