from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.cluster import Link
from cost_model.errors import InputError
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.instructions import Compute, Norm, Pass, Step, Sync, Transfer
from hetpipe.program.trace import Event, Trace
from hetpipe.program.verification import verify_order
from hetpipe.simulation.prediction import predict, simulate_plan
from hetpipe.simulation.schedule_selection import lower
from hetpipe.simulation.simulator import simulate
from partition.plan import Pipeline, Plan, Stage
from small_case import INSTANT, equal_plan, equal_stages, plan_of, small_cluster, small_plan, small_profile


def equal_makespan_s(in_flight: tuple[int, ...], microbatches: int, link: Link = INSTANT) -> float:
    profile, cluster = equal_stages(len(in_flight), link=link)
    return simulate_plan(equal_plan(in_flight, microbatches), profile, cluster).makespan_s


def test_one_device_takes_the_sum():
    # 3 microbatches of (1 + 2 + 2 + 1) + (1 + 4 + 4 + 2) = 17 s, then the optimizer: parameters 1100, less
    # 250 tied, less 40 unreached, at 1 ms a byte
    trace = simulate_plan(plan_of([("a/0", 0, 4, 1)], 3), small_profile(), small_cluster())
    assert trace.makespan_s == pytest.approx(3 * 17 + 0.81)
    assert trace.bubble == pytest.approx(0)


def test_two_equal_stages_by_hand():
    # F 1 s, B 2 s, no link:  a: F0 F1 .  B0 B1     0-1 1-2 4-6 7-9 (B1 of b ends at 7)
    #                         b: .  F0 B0 F1 B1     1-2 2-4 4-5 5-7
    profile, cluster = equal_stages(2)
    trace = simulate_plan(equal_plan((2, 1), 2), profile, cluster)
    times = {
        (event.rank, str(event.instruction)): (event.start_s, event.end_s)
        for event in trace.events
        if isinstance(event.instruction, Compute)
    }
    assert times == {
        (0, "0F0"): (0, 1),
        (0, "0F1"): (1, 2),
        (0, "0B0"): (4, 6),
        (0, "0B1"): (7, 9),
        (1, "1F0"): (1, 2),
        (1, "1B0"): (2, 4),
        (1, "1F1"): (4, 5),
        (1, "1B1"): (5, 7),
    }
    assert trace.makespan_s == 9
    assert trace.bubble == pytest.approx(1 - 12 / 18)


def test_messages_sync_norm_and_step_by_hand():
    # One microbatch. a: F 1 + 2 + 2 = 5. 10 bytes at 40 B/s + 0.25 s: there at 5.5. b (twice as slow): F 2,
    # B 4, to 11.5. Gradient back at 12. a: B 1 + 4 + 4 = 9, to 21. SYNC of 250 tied bytes from 21: 2 rounds
    # of 125 / 40 + 0.25 = 3.375, to 27.75. NORM of 32 bytes: 2 rounds of 16 / 40 + 0.25 = 0.65, to 29.05.
    # STEP: a trains 360 + 200 + 200 = 760 bytes at 1 ms, to 29.81; b 300 at 2 ms.
    trace = simulate_plan(small_plan(num_samples=1), small_profile(), small_cluster())
    ends = {(event.rank, str(event.instruction)): event.end_s for event in trace.events}
    assert ends == pytest.approx(
        {
            (0, "0F0"): 5,
            (0, "0SEND_F0"): 5.5,
            (1, "1F0"): 7.5,
            (1, "1B0"): 11.5,
            (1, "1SEND_B0"): 12,
            (0, "0B0"): 21,
            (0, "SYNC0"): 27.75,
            (1, "SYNC0"): 27.75,
            (0, "NORM"): 29.05,
            (1, "NORM"): 29.05,
            (0, "STEP"): 29.81,
            (1, "STEP"): 29.65,
        }
    )
    assert trace.makespan_s == pytest.approx(29.81)


def test_messages_on_one_link_queue():
    # F 1 s but 4 s of link per message: forwards leave it at 5, 9, 13, not at 5, 6, 7. The cluster gives no
    # latency, the profile has measured 0.25 s: the slower one counts.
    plan = plan_of([("a/0", 0, 1, 3), ("b/0", 1, 4, 3)], num_samples=3)
    cluster = small_cluster()
    slow = type(cluster)(cluster.name, Link(0.0, 2.5), cluster.nodes)
    trace = simulate_plan(plan, small_profile(), slow)
    sends = [e.end_s for e in trace.events if isinstance(e.instruction, Transfer) and e.rank == 0]
    assert sends == [5.25, 9.25, 13.25]


@pytest.mark.parametrize(
    ("in_flight", "period"),
    [((4, 3, 2, 1), 3.15), ((5, 4, 3, 1), 3.1333333333), ((7, 5, 3, 1), 3.0)],
)
def test_period_of_four_equal_stages_depends_on_in_flight(in_flight: tuple[int, ...], period: float):
    # notes/planner-feasibility.md: f = 1, b = 2, link 0.1 each way
    link = Link(latency_s=0.1, bandwidth_bytes_per_s=1e30)
    grown = equal_makespan_s(in_flight, 96, link) - equal_makespan_s(in_flight, 48, link)
    assert grown / 48 == pytest.approx(period, abs=0.005)


def rising(in_flight: tuple[int, ...], microbatches: int) -> bool:
    flights = [min(flight, microbatches) for flight in in_flight]
    return any(later > earlier for earlier, later in pairwise(flights))


@pytest.mark.parametrize("num_stages", [2, 3])
def test_in_flight_that_rises_deadlocks_and_nothing_else_does(num_stages: int):
    microbatches = 3
    profile, cluster = equal_stages(num_stages)
    for in_flight in product(range(1, 5), repeat=num_stages):
        plan = equal_plan([4] * num_stages, microbatches)
        for stage, flight in zip(plan.pipelines[0].stages, in_flight, strict=True):
            object.__setattr__(stage, "in_flight", flight)  # past the check that refuses it
        program = lower(plan, profile)
        if rising(in_flight, microbatches):
            with pytest.raises(InputError, match="deadlocks"):
                simulate(ProgramCosts(program, profile, cluster))
            with pytest.raises(InputError, match="deadlocks"):
                verify_order(program)
            with pytest.raises(InputError, match="in_flight rises"):
                equal_plan(in_flight, microbatches)
        else:
            assert simulate(ProgramCosts(program, profile, cluster)).makespan_s > 0
            verify_order(program)


def random_plan(data: st.DataObject) -> Plan:
    cut = data.draw(st.integers(1, 3))
    flights = sorted(data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=2)), reverse=True)
    samples = data.draw(st.integers(1, 9))
    size = data.draw(st.integers(1, 3))
    order = data.draw(st.permutations(["a/0", "b/0"]))
    return plan_of([(order[0], 0, cut, flights[0]), (order[1], cut, 4, flights[1])], samples, size)


@given(st.data())
def test_laws_of_every_trace(data: st.DataObject):
    plan = random_plan(data)
    trace = simulate_plan(plan, small_profile(), small_cluster())
    for rank in range(2):
        own = [e for e in trace.events if e.rank == rank and isinstance(e.instruction, Compute | Norm | Step)]
        assert trace.makespan_s >= trace.busy_s(rank)
        for one, two in pairwise(own):
            assert one.end_s <= two.start_s + 1e-9  # one thing at a time
    assert 0 <= trace.bubble < 1
    kinds = [type(event.instruction) for event in trace.events]
    assert kinds.count(Step) == kinds.count(Norm) == kinds.count(Sync) == 2
    assert kinds.count(Compute) == 4 * plan.pipelines[0].num_microbatches
    by_stage = trace.stage_busy_s()
    steps = [e.duration_s for e in trace.events if isinstance(e.instruction, Step)]
    assert sum(by_stage.values()) + sum(steps) == pytest.approx(trace.busy_s(0) + trace.busy_s(1))


@given(st.data())
def test_a_slower_network_never_helps(data: st.DataObject):
    plan, cluster = random_plan(data), small_cluster()
    slower = type(cluster)(cluster.name, Link(0.5, 20.0), cluster.nodes)
    fast = simulate_plan(plan, small_profile(), cluster).makespan_s
    assert simulate_plan(plan, small_profile(), slower).makespan_s >= fast - 1e-9


def test_the_last_microbatch_may_be_smaller():
    # 3 samples in microbatches of 2: 2 x 17 s, then 17 s, and the optimizer
    trace = simulate_plan(plan_of([("a/0", 0, 4, 1)], 3, microbatch_size=2), small_profile(), small_cluster())
    assert [e.duration_s for e in trace.events if isinstance(e.instruction, Compute)] == [12, 22, 6, 11]


def test_pipelines_side_by_side_wait_for_each_other_only_at_sync():
    stage = (0, 4)
    plan = Plan(
        "manual",
        "made-up",
        3,
        (Pipeline(1, 2, (Stage(("a/0",), stage, 1),)), Pipeline(1, 1, (Stage(("b/0",), stage, 1),))),
    )
    trace = simulate_plan(plan, small_profile(), small_cluster())
    ends = [
        e.end_s
        for e in trace.events
        if isinstance(e.instruction, Compute) and e.instruction.op is Pass.BACKWARD
    ]
    assert max(ends) == 34  # 2 x 17 s on the fast device, 1 x 34 s on the slow one
    assert all(e.start_s >= 34 for e in trace.events if isinstance(e.instruction, Norm | Step))


def test_predicted_figures_are_those_of_the_trace():
    plan = small_plan(num_samples=4)
    trace = simulate_plan(plan, small_profile(), small_cluster())
    figures = predict(plan, small_profile(), small_cluster())
    assert figures.step_s == trace.makespan_s
    assert figures.samples_per_s == pytest.approx(4 / trace.makespan_s)
    assert figures.devices["b/0"].busy == pytest.approx(trace.busy_s(1) / trace.makespan_s)


def test_a_trace_without_time_has_no_bubble():
    trace = Trace(("a",), (Event(0, Step(), 0.0, 0.0),))
    assert (trace.makespan_s, trace.bubble) == (0, 0)
