"""The programs of every schedule as text, to be read beside the change that altered one.

Regenerate: HETPIPE_UPDATE_GOLDEN=1 python -m pytest tests/hetpipe/program/test_golden_programs.py
"""

import pytest

from cost_model.cluster import Cluster
from cost_model.profile import ModelProfile
from hetpipe.program.instructions import Schedule
from hetpipe.program.program_text import parse_program
from hetpipe.program.verification import verify
from hetpipe.simulation.schedule_selection import lower
from partition.plan import Pipeline, Plan, Stage
from places import GOLDEN
from shared_plans import layers_of, pipeline
from shared_plans import plan_of as shared_plan_of
from small_case import (
    check_golden,
    plan_of,
    small_cluster,
    small_plan,
    small_profile,
    whole_model_on_two_nodes_of_two,
)

Made = tuple[Plan, ModelProfile, Cluster]


def small(plan: Plan) -> Made:
    return plan, small_profile(), small_cluster()


def of_equal_layers(plan: Plan) -> Made:
    return plan, *layers_of(*[3.0] * plan.num_layers)


def whole_model_on_each(zero: int) -> Plan:
    """Two pipelines of one stage; zero 1: each device has the optimizer states of two layers."""
    pipelines = (
        Pipeline(1, 2, (Stage(("a/0",), (0, 4), 1),)),
        Pipeline(1, 1, (Stage(("b/0",), (0, 4), 1),)),
    )
    owners = ("a/0", "a/0", "b/0", "b/0") if zero else None
    return Plan("manual", "made-up", 3, pipelines, zero=zero, state_owners=owners)


ROUNDS = shared_plan_of(pipeline(4, (0, 0, 1, 4), (1, 1, 2, 3), (0, 2, 3, 2), (1, 3, 4, 1)))
CASES = {
    "1f1b": (small(small_plan()), Schedule.ONE_F_ONE_B),
    "gpipe": (small(small_plan()), Schedule.GPIPE),
    "list": (
        small(plan_of([("a/0", 0, 3, 3), ("b/0", 3, 4, 2)], num_samples=7, microbatch_size=2)),
        Schedule.LIST,
    ),
    "interleaved": (of_equal_layers(ROUNDS), Schedule.INTERLEAVED),
    "shared-devices": (
        of_equal_layers(
            shared_plan_of(
                pipeline(3, (0, 0, 1, 2), (1, 1, 3, 1)),
                pipeline(2, (0, 0, 2, 2), (0, 2, 3, 2)),
                pipeline(2, (2, 0, 1, 2), (1, 1, 3, 1)),
            )
        ),
        Schedule.ONE_F_ONE_B,
    ),
    "data-parallel": (small(whole_model_on_each(zero=0)), Schedule.ONE_F_ONE_B),
    "hierarchical": (whole_model_on_two_nodes_of_two(), Schedule.ONE_F_ONE_B),
    "zero1": (small(whole_model_on_each(zero=1)), Schedule.ONE_F_ONE_B),
}


@pytest.mark.parametrize("name", CASES)
def test_program_as_text(name: str):
    (plan, profile, cluster), schedule = CASES[name]
    program = lower(plan, profile, cluster, schedule)
    verify(program, profile, cluster)
    check_golden(f"program-{name}.txt", program.text)
    assert parse_program((GOLDEN / f"program-{name}.txt").read_text(), program.plan) == program


def test_every_schedule_has_a_golden_program():
    assert {schedule for _, schedule in CASES.values()} == set(Schedule) - {Schedule.AUTO}
    assert {path.name for path in GOLDEN.glob("program-*.txt")} == {f"program-{name}.txt" for name in CASES}
