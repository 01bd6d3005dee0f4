"""Which schedule a plan is run under: the one that is asked for, or for `auto` the fastest by simulation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cost_model.cluster import Cluster
from cost_model.errors import InfeasibleError, InputError
from cost_model.profile import ModelProfile
from cost_model.units import format_seconds
from hetpipe.program.compute_orders import in_rounds
from hetpipe.program.costs import ProgramCosts, check_memory
from hetpipe.program.instructions import Program, Schedule
from hetpipe.program.lowering import lower_as
from hetpipe.program.trace import Trace
from hetpipe.simulation.collective_selection import with_best_collectives
from hetpipe.simulation.simulator import simulate
from partition.plan import Plan

MOST_INSTRUCTIONS = 100_000
"""In a program beyond which `auto` does not try other schedules: each then takes seconds to simulate."""

TIE = 1e-9  # relative: sums of the same seconds in another order are one time
_FIRST, *_OTHERS = Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED, Schedule.LIST, Schedule.GPIPE


@dataclass(frozen=True, slots=True)
class Choice:
    """A program, and of `auto` the seconds of a step of each schedule, or why it was not taken.

    trace: of the program, where it was simulated to choose it.
    """

    asked: Schedule
    program: Program
    step_s: Mapping[Schedule, float]
    refused: Mapping[Schedule, str]
    trace: Trace | None = None

    @property
    def schedule(self) -> Schedule:
        """The schedule of the program, never `auto`."""
        return self.program.schedule

    def __str__(self) -> str:
        if self.asked is not Schedule.AUTO:
            return f"schedule: {self.schedule}"
        times = ", ".join(f"{name} {format_seconds(step_s)}" for name, step_s in self.step_s.items())
        others = [f"not {name}: {reason}" for name, reason in self.refused.items()]
        return "; ".join([f"schedule auto takes {self.schedule}", *([times] if times else []), *others])

    def to_json(self) -> dict[str, Any]:
        return {
            "asked": str(self.asked),
            "taken": str(self.schedule),
            "step_s": {str(name): step_s for name, step_s in self.step_s.items()},
            "refused": {str(name): reason for name, reason in self.refused.items()},
        }


def lower(
    plan: Plan, profile: ModelProfile, cluster: Cluster | None = None, schedule: Schedule | None = None
) -> Program:
    """Return the program of a plan: computations by schedule, receives posted ahead, SYNC when it can.

    cluster: decides by which collective each bucket is summed, all by rings without it. Where a device serves
    several stages, its seconds decide their order (`list_scheduling`). schedule: None is `default_schedule`.
    The plan of the program has the in_flight of its schedule: `gpipe` and `interleaved` do not ask what the
    plan given allows.

    Raises: InputError if the schedule is not for the plan; or if no cluster is given, and a device is shared
        or it is open who has the states.
    """
    if cluster is not None:
        return choose_schedule(plan, profile, cluster, schedule).program
    if schedule is Schedule.AUTO:
        raise InputError("the schedule auto depends on the seconds of each; give the cluster")
    return lower_as(plan, profile, None, schedule or Schedule.ONE_F_ONE_B)


def choose_schedule(
    plan: Plan, profile: ModelProfile, cluster: Cluster, schedule: Schedule | None = None
) -> Choice:
    """Lower a plan as `lower` does, and say of the schedule `auto` what each would take."""
    asked = schedule or default_schedule(plan)

    def lowered(schedule: Schedule) -> Program:
        program = lower_as(plan, profile, cluster, schedule)
        return with_best_collectives(ProgramCosts(program, profile, cluster))[0]

    return _choose(lowered, profile, cluster, asked)


def default_schedule(plan: Plan) -> Schedule:
    """Return `auto` for a pipeline that visits its devices in rounds, where order counts most; else 1F1B."""
    return Schedule.AUTO if in_rounds(plan) else Schedule.ONE_F_ONE_B


def _choose(
    lower: Callable[[Schedule], Program], profile: ModelProfile, cluster: Cluster, asked: Schedule
) -> Choice:
    """Return the program of a schedule, for `auto` the fastest that fits memory.

    Ties go to 1F1B, which is taken too where none fits: the verifier then names what is missing.

    lower: gives the program of a plan under each schedule but `auto`.

    Raises: InputError if the schedule is not for the plan.
    """
    if asked is not Schedule.AUTO:
        return Choice(asked, lower(asked), {}, {})
    best = first = lower(_FIRST)
    trace: Trace | None = None
    step_s: dict[Schedule, float] = {}
    refused: dict[Schedule, str] = {}
    number = sum(map(len, first.ranks))
    if number > MOST_INSTRUCTIONS:
        why = f"not tried, the program has {number:,} instructions, more than {MOST_INSTRUCTIONS:,}"
        return Choice(asked, first, {}, dict.fromkeys(_OTHERS, why))
    for schedule in (_FIRST, *_OTHERS):
        try:
            program = first if schedule is _FIRST else lower(schedule)
            check_memory(program.plan, profile, cluster)
        except (InputError, InfeasibleError) as error:
            refused[schedule] = str(error)
        else:
            simulated = simulate(ProgramCosts(program, profile, cluster))
            seconds = simulated.makespan_s
            if not step_s or seconds < min(step_s.values()) * (1 - TIE):
                best, trace = program, simulated
            step_s[schedule] = seconds
    return Choice(asked, best, step_s, refused, trace)
