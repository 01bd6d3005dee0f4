"""`execute` runs a step of a program in a loop of one's own: what torch computes, on any plan."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import execution_mains
import user_tasks
from cost_model.cluster import CPU, EMULATED
from cost_model.cluster_file import read_cluster
from cost_model.errors import InputError
from cost_model.sharding import OwnerRange
from hetpipe.program.instructions import Program, Transfer
from hetpipe.runtime.processes import RankGroup, run_ranks
from hetpipe.simulation.schedule_selection import lower
from hetpipe.training.user_loop import RankStages, execute, trace_of
from partition.plan import Pipeline, Plan, Stage
from runs import CPU_CLUSTER, chain_plan, cluster_file, made_up_profile_of, replica_plan

BATCH, STEPS = 16, 3


def lowered(tmp_path, plan: Plan, text: str = CPU_CLUSTER, kind: str = CPU) -> tuple[Program, Any, Any]:
    cluster = read_cluster(cluster_file(tmp_path, text))
    chain = execution_mains.chain_of()
    profile = made_up_profile_of(chain, "mine", kind, 1e-4, dtype="float64", sequence_length=1)
    return lower(plan, profile, cluster), profile, cluster


def two_pipelines() -> Plan:
    first = Pipeline(2, 10, (Stage(("here/0",), (0, 2), 2), Stage(("here/1",), (2, 5), 1)))
    second = Pipeline(4, 6, (Stage(("here/0",), (0, 3), 2), Stage(("here/2",), (3, 5), 1)))
    return Plan("manual", "mine", BATCH, (first, second))


def own_devices() -> Plan:
    first = Pipeline(2, 10, (Stage(("here/0",), (0, 2), 2), Stage(("here/1",), (2, 5), 1)))
    return Plan("manual", "mine", BATCH, (first, Pipeline(4, 6, (Stage(("here/2",), (0, 5), 2),))), zero=2)


PLANS = {
    "chain": chain_plan("mine", [0, 1, 2, 5], 3),
    "a shared device": two_pipelines(),
    "sharded states": replace(two_pipelines(), zero=1),
    "sharded gradients": own_devices(),
    "sharded gradients of replicas": replica_plan("mine", 5, (2, 7), (4, 4), (5, 5), zero=2),
    "sharded weights": replica_plan("mine", 5, (2, 7), (4, 4), (5, 5), zero=3),
    "sharded weights of stages": replace(own_devices(), zero=3, layer_zero=(3, 1, 3, 2, 3)),
}


def torch_alone() -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """(loss, norm) of the steps and the gradients after them, of the whole model in one process."""
    chain = execution_mains.chain_of()
    model = chain.materialise(range(chain.num_layers), execution_mains.SEED, torch.float64)
    values = model.owned_parameters()
    optimizer = torch.optim.SGD(values.values(), lr=0.05, momentum=0.9)
    found = []
    for step in range(STEPS + 1):
        inputs, labels = execution_mains.batch(step, BATCH)
        loss = user_tasks.squared_error(model.run(0, chain.num_layers, inputs)[0], labels)
        loss = loss / (BATCH if step < STEPS else 7)
        optimizer.zero_grad()
        loss.backward()
        if step < STEPS:
            norm = torch.nn.utils.clip_grad_norm_(values.values(), 0.5)
            found.append((loss.item(), float(norm)))
            optimizer.step()
    return found, {name: value.grad for name, value in values.items()}


def run_loop(program: Program, profile: Any, cluster: Any) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    names = program.device_names
    group = RankGroup(names, (1,) * len(names))
    run_ranks(execution_mains.user_loop, (program, profile, cluster, STEPS), group, events.append)
    return events


def check(events: list[dict[str, Any]], program: Program) -> None:
    expected, gradients = torch_alone()
    for rank in range(len(program.ranks)):
        mine = [event for event in events if event["rank"] == rank]
        found = [(event["loss"], event["norm"]) for event in mine if event["event"] == "step"]
        assert [f[0] for f in found] == pytest.approx([e[0] for e in expected], rel=1e-12)
        assert [f[1] for f in found] == pytest.approx([e[1] for e in expected], rel=1e-12)
    emitted = [event["gradients"] for event in events if event["event"] == "gradients"]
    got = {name: value for entry in emitted for name, value in entry.items()}
    assert got.keys() == (set() if program.plan.zero else gradients.keys())
    for name, value in got.items():
        torch.testing.assert_close(torch.tensor(value).double(), gradients[name], rtol=1e-6, atol=1e-9)
    counts = next(event["counts"] for event in events if event["event"] == "trace")
    for rank, instructions in enumerate(program.ranks):
        receives = [e for e in instructions if isinstance(e, Transfer) and e.direction == "RECV"]
        assert counts[rank] == len(instructions) - len(receives)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_loop_of_ones_own_computes_what_torch_alone_computes(tmp_path, plan):
    program, profile, cluster = lowered(tmp_path, plan)
    check(run_loop(program, profile, cluster), program)


@pytest.mark.slow
def test_emulated_devices_and_links_are_emulated(tmp_path):
    text = CPU_CLUSTER.replace('kind = "cpu", count = 4', 'kind = "emulated", count = 2, speed = 0.3')
    program, profile, cluster = lowered(tmp_path, chain_plan("mine", [0, 2, 5], 4), text, EMULATED)
    check(run_loop(program, profile, cluster), program)


def test_a_plan_whose_layers_are_cut_between_owners_is_refused(tmp_path):
    ranges = OwnerRange(0, "here/0", 0.0, 0.5), OwnerRange(0, "here/2", 0.5, 1.0)
    owners = ("here/0", "here/0", "here/1", "here/2", "here/2")
    plan = replace(own_devices(), state_owners=owners, owner_ranges=ranges)
    program, profile, cluster = lowered(tmp_path, plan)
    with pytest.raises(InputError, match=r"cuts layer 0 between devices, .*; plan with whole_states=True"):
        RankStages(
            program, execution_mains.chain_of(), user_tasks.squared_error, profile=profile, cluster=cluster,
            dtype=torch.float64,
        )  # fmt: skip


def test_one_device_needs_no_process_group(tmp_path):
    program, profile, cluster = lowered(tmp_path, chain_plan("mine", [0, 5], 4))
    stages = RankStages(
        program, execution_mains.chain_of(), user_tasks.squared_error, profile=profile, cluster=cluster,
        dtype=torch.float64,
    )  # fmt: skip
    optimizer = torch.optim.Adam(stages.parameters(), lr=1e-2)
    losses = []
    for step in range(5):
        outcome = execute(program, stages, *execution_mains.batch(0, BATCH), optimizer=optimizer, step=step)
        losses.append(outcome.loss)
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
    assert outcome.finite
    trace = trace_of(program, outcome)
    assert trace.device_names == ("here/0",)
    assert 0 < trace.busy_s(0) <= trace.makespan_s
    stages.close()


def test_a_step_that_is_not_finite_changes_nothing(tmp_path):
    program, profile, cluster = lowered(tmp_path, chain_plan("mine", [0, 5], 4))
    stages = RankStages(
        program, execution_mains.chain_of(), user_tasks.squared_error, profile=profile, cluster=cluster,
        dtype=torch.float64,
    )  # fmt: skip
    before = [value.detach().clone() for value in stages.parameters()]
    inputs, labels = execution_mains.batch(0, BATCH)
    labels[3] = float("inf")
    optimizer = torch.optim.SGD(stages.parameters(), lr=1.0)
    assert not execute(program, stages, inputs, labels, optimizer=optimizer).finite
    assert all(torch.equal(*pair) for pair in zip(before, stages.parameters(), strict=True))


def test_what_does_not_fit_together_is_refused_in_one_line(tmp_path):
    program, profile, cluster = lowered(tmp_path, chain_plan("mine", [0, 5], 4))
    chain, loss = execution_mains.chain_of(), user_tasks.squared_error
    stages = RankStages(program, chain, loss, profile=profile, cluster=cluster)
    inputs, labels = execution_mains.batch(0, BATCH)
    other, *_ = lowered(tmp_path, chain_plan("mine", [0, 5], 8))
    two, *_ = lowered(tmp_path, chain_plan("mine", [0, 2, 5], 4))
    for act, message in (
        (lambda: execute(other, stages, inputs, labels), "the stages are those of another program"),
        (
            lambda: execute(program, stages, inputs, labels[:3]),
            "'labels' has 3 samples, a step of the plan 16",
        ),
        (lambda: execute(program, stages, inputs, labels, num_terms=0), "num_terms is 0"),
        (lambda: execute(program, stages, inputs, labels, num_terms=float("nan")), "num_terms is nan"),
        (
            lambda: RankStages(two, chain, loss, profile=profile, cluster=cluster),
            r"torch.distributed has 1 processes, the program 2 devices \(here/0, here/1\)",
        ),
    ):
        with pytest.raises(InputError, match=message) as caught:
            act()
        assert "\n" not in str(caught.value)


def test_gradients_alone_cannot_be_had_of_sharded_states(tmp_path):
    program, profile, cluster = lowered(tmp_path, replace(chain_plan("mine", [0, 5], 4), zero=1))
    stages = RankStages(
        program, execution_mains.chain_of(), user_tasks.squared_error, profile=profile, cluster=cluster
    )
    with pytest.raises(InputError, match=r"no optimizer is given, .* shards its states \(zero 1\)"):
        execute(program, stages, *execution_mains.batch(0, BATCH))
