"""Which schedule a plan is run under: the one that is asked for, or for `auto` the fastest by simulation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cost_model.cluster import Cluster
from cost_model.errors import InfeasibleError, InputError
from cost_model.profile import ModelProfile
from cost_model.units import format_seconds
from hetpipe.costs import ProgramCosts, check_memory
from hetpipe.instructions import Program, Schedule
from hetpipe.simulator import simulate

MOST_INSTRUCTIONS = 100_000
"""In a program beyond which `auto` does not try other schedules: each then takes seconds to simulate."""

TIE = 1e-9  # relative: sums of the same seconds in another order are one time
_FIRST, *_OTHERS = Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED, Schedule.LIST, Schedule.GPIPE


@dataclass(frozen=True, slots=True)
class Choice:
    """A program, and of `auto` the seconds of a step of each schedule, or why it was not taken."""

    asked: Schedule
    program: Program
    step_s: Mapping[Schedule, float]
    refused: Mapping[Schedule, str]

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


def choose(
    lower: Callable[[Schedule], Program], profile: ModelProfile, cluster: Cluster, asked: Schedule
) -> Choice:
    """The program of a schedule; for `auto` the fastest that fits memory, ties to 1F1B, which is taken too
    where none fits: the verifier then names what is missing.

    lower: gives the program of a plan under each schedule but `auto`.

    Raises: InputError if the schedule is not for the plan.
    """
    if asked is not Schedule.AUTO:
        return Choice(asked, lower(asked), {}, {})
    best = first = lower(_FIRST)
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
            seconds = simulate(ProgramCosts(program, profile, cluster)).makespan_s
            if not step_s or seconds < min(step_s.values()) * (1 - TIE):
                best = program
            step_s[schedule] = seconds
    return Choice(asked, best, step_s, refused)
