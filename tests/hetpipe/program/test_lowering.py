from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.cluster import Cluster, Device, Link, Node
from cost_model.collectives import Collective
from cost_model.errors import InputError
from cost_model.profile import ModelProfile
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.gradient_buckets import gradient_buckets
from hetpipe.program.instructions import Bucket, Compute, Norm, Pass, Step, Sync, Transfer
from hetpipe.program.program_text import parse_instruction, parse_program
from hetpipe.program.verification import (
    observed_in_flight,
    verify,
    verify_computations,
    verify_messages,
    verify_order,
)
from hetpipe.simulation.prediction import simulate_plan
from hetpipe.simulation.schedule_selection import lower
from hetpipe.simulation.simulator import simulate
from partition.plan import Pipeline, Plan, Stage
from small_case import (
    equal_plan,
    equal_stages,
    plan_of,
    small_plan,
    small_profile,
    whole_model_on_two_nodes_of_two,
)


def words(plan: Plan, rank: int) -> str:
    return " ".join(map(str, lower(plan, small_profile()).ranks[rank]))


def two_pipelines() -> Plan:
    """One sample alone on x, two through y and z."""
    return Plan(
        "manual",
        "made-up",
        3,
        (
            Pipeline(1, 1, (Stage(("x",), (0, 4), 1),)),
            Pipeline(1, 2, (Stage(("y",), (0, 2), 2), Stage(("z",), (2, 4), 1))),
        ),
    )


def test_two_stages_as_text():
    plan = small_plan(num_samples=3)
    assert words(plan, 0) == (
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0F2 0SEND_F2 0RECV_B2 0B1 0B2 SYNC0 NORM STEP"
    )
    assert words(plan, 1) == (
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1SEND_B2 SYNC0 NORM STEP"
    )


def test_one_device_needs_no_messages():
    plan = plan_of([("a/0", 0, 4, 1)], num_samples=2)
    assert words(plan, 0) == "0F0 0B0 0F1 0B1 NORM STEP"


def test_receives_are_posted_one_computation_ahead():
    program = lower(small_plan(num_samples=4), small_profile())
    for instructions in program.ranks:
        computes = [entry for entry in instructions if isinstance(entry, Compute)]
        for index, entry in enumerate(instructions):
            if isinstance(entry, Transfer) and entry.direction == "RECV":
                done = sum(isinstance(other, Compute) for other in instructions[:index])
                user = Compute(entry.op, entry.pipeline, entry.stage, entry.microbatch)
                assert computes.index(user) - done <= 1


def test_every_rank_ends_in_syncs_norm_and_step():
    program = lower(two_pipelines(), small_profile())
    for rank, instructions in enumerate(program.ranks):
        mine = [index for index, bucket in enumerate(program.buckets) if rank in bucket.ranks]
        assert instructions[-2 - len(mine) :] == (*map(Sync, mine), Norm(), Step())


def test_buckets_join_neighbouring_layers_of_the_same_owners():
    # x holds all; y layers 0 and 1; z layers 2 and 3. Tied layers 0 and 3 are summed over all three.
    assert gradient_buckets(two_pipelines(), small_profile()) == (
        Bucket((2, 3), (0, 2)),
        Bucket((0, 1), (0, 1)),
        Bucket((0, 3), (0, 1, 2), tied=True),
    )


def test_bytes_of_buckets_count_tied_and_unreached_parameters_once():
    profile = small_profile()
    # layers 0 and 1 without the 250 bytes tied to the head and the 40 that no gradient reaches
    assert Bucket((0, 1), (0, 1)).num_bytes(profile) == 400 - 40 - 250 + 200
    assert Bucket((2, 3), (0, 2)).num_bytes(profile) == 200 + 300 - 250
    assert Bucket((0, 3), (0, 1, 2), tied=True).num_bytes(profile) == 250


def test_a_pipeline_without_copies_syncs_only_its_tied_weights():
    assert gradient_buckets(small_plan(), small_profile()) == (Bucket((0, 3), (0, 1), tied=True),)
    together = plan_of([("a/0", 0, 4, 1)], num_samples=1)
    assert gradient_buckets(together, small_profile()) == ()


def test_other_pipelines_are_marked_in_the_text():
    assert str(Compute(Pass.BACKWARD, 1, 0, 3)) == "1:0B3"
    assert parse_instruction("1:0B3") == Compute(Pass.BACKWARD, 1, 0, 3)


@pytest.mark.parametrize("word", ["", "F3", "0X3", "0SEND3", "SYNC", "0SEND_F", "norm"])
def test_what_is_no_instruction_is_refused(word: str):
    with pytest.raises(InputError, match="is no instruction"):
        parse_instruction(word)


def test_program_text_is_read_back():
    for plan in (small_plan(), two_pipelines()):
        program = lower(plan, small_profile())
        assert parse_program(program.text, plan) == program


def test_program_text_of_another_plan_is_refused():
    program = lower(small_plan(), small_profile())
    with pytest.raises(InputError, match="not format"):
        parse_program(program.text, small_plan(num_samples=5))
    lines = program.text.splitlines()
    with pytest.raises(InputError, match="has 1 ranks, the plan 2 devices"):
        parse_program("\n".join(lines[:-1]), small_plan())
    with pytest.raises(InputError, match="is no bucket"):
        parse_program(program.text.replace("layers=0,3", "layer=0"), small_plan())


def data_parallel(count: int) -> tuple[Plan, ModelProfile, Cluster]:
    """One pipeline of one stage on each of so many nodes, 4 bytes in every layer."""
    profile = equal_stages(2)[0]
    profile = replace(profile, layers=tuple(replace(layer, parameter_bytes=4.0) for layer in profile.layers))
    nodes = tuple(Node(f"n{i}", (Device(f"n{i}/0", f"n{i}", "one", 1e9),)) for i in range(count))
    pipelines = tuple(Pipeline(1, 1, (Stage((f"n{i}/0",), (0, 2), 1),)) for i in range(count))
    return Plan("manual", "made-up", count, pipelines), profile, Cluster("flat", Link(1.0, 8.0), nodes)


def test_each_bucket_is_summed_by_the_cheaper_collective():
    # 8 bytes over 8 owners at 8 B/s, ring: 14 x (1 + 1/8) s; tree: 3 rounds and back, 6 x (1 + 1) s
    plan, profile, cluster = data_parallel(8)
    (bucket,) = lower(plan, profile, cluster).buckets
    assert bucket == Bucket((0, 1), tuple(range(8)), collective=Collective.TREE)
    trace = simulate_plan(plan, profile, cluster)
    sync_s = max(event.duration_s for event in trace.events if isinstance(event.instruction, Sync))
    assert sync_s == 12.0
    # 0.1 s of latency: 14 x (0.1 + 1/8) against 6 x (0.1 + 1)
    quick = replace(cluster, network=Link(0.1, 8.0))
    assert lower(plan, profile, quick).buckets == (replace(bucket, collective=Collective.RING),)
    assert lower(plan, profile).buckets == (replace(bucket, collective=Collective.RING),)


def test_a_tree_is_written_and_read_back():
    plan, profile, cluster = data_parallel(8)
    program = lower(plan, profile, cluster)
    assert "bucket 0: ranks=0,1,2,3,4,5,6,7 layers=0,1 tree\n" in program.text
    assert parse_program(program.text, plan) == program
    assert "tree" not in lower(plan, profile).text
    tied = replace(program, buckets=(replace(program.buckets[0], tied=True),))
    assert parse_program(tied.text, plan) == tied


def test_a_bucket_over_nodes_that_is_malformed_is_refused():
    plan, profile, cluster = data_parallel(8)
    text = lower(plan, profile, cluster).text
    for wrong in ("0,1//2", "0,", "", "0/a"):
        with pytest.raises(InputError, match="is no bucket"):
            parse_program(text.replace(" tree", f" nodes={wrong}"), plan)


def test_the_ranks_of_a_ring_are_in_its_order():
    # no link inside the nodes is faster than between them: a ring that passes each card once a round is best
    plan, profile, cluster = whole_model_on_two_nodes_of_two()
    nodes = tuple(replace(node, interconnect=None) for node in cluster.nodes)
    cluster = replace(cluster, network=Link(0.0, 40.0), nodes=nodes)
    program = lower(plan, profile, cluster)
    assert [bucket.ranks for bucket in program.buckets] == [(0, 2, 1, 3)] * 2
    assert "bucket 0: ranks=0,2,1,3 layers=" in program.text
    assert parse_program(program.text, plan) == program
    verify(program, profile, cluster)
    turns = replace(program, buckets=tuple(replace(b, ranks=(0, 1, 2, 3)) for b in program.buckets))
    node_by_node_s, turns_s = (
        simulate(ProgramCosts(p, profile, cluster)).makespan_s for p in (program, turns)
    )
    # 6 messages a rank of a quarter of the bytes each; taking turns, two pass each card in a round, the last
    # of which the next bucket does not wait for
    quarter_s = sum(bucket.num_bytes(profile) for bucket in program.buckets) / 4 / 40
    assert 5.8 * quarter_s < turns_s - node_by_node_s <= 6 * quarter_s


def test_figures_in_the_plan_do_not_change_the_program():
    plan = small_plan()
    other = replace(plan, profile_sha256="x", cluster_sha256="y")
    assert lower(plan, small_profile()).text == lower(other, small_profile()).text


@given(st.data(), st.integers(1, 4), st.integers(1, 6))
def test_every_valid_plan_lowers_to_a_program_that_runs(data: st.DataObject, stages: int, microbatches: int):
    flights = data.draw(st.lists(st.integers(1, 6), min_size=stages, max_size=stages))
    plan = equal_plan(sorted(flights, reverse=True), microbatches)
    program = lower(plan, equal_stages(stages)[0])
    verify_messages(program)
    verify_computations(program)
    verify_order(program)
    for (_, stage), most in observed_in_flight(program).items():
        assert most <= plan.pipelines[0].in_flight(stage)
