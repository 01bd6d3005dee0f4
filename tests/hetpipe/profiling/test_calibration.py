import json
from dataclasses import replace

import pytest

from cost_model.cluster import EMULATED, Cluster, Device, HostMemory, Link, Node
from cost_model.errors import InputError
from cost_model.measured_links import MeasuredLink
from cost_model.network import Network
from cost_model.profile import ModelProfile, profile_from_data, profile_text
from hetpipe.profiling.calibration import calibrate
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.trace import Trace
from hetpipe.simulation.schedule_selection import lower
from hetpipe.simulation.simulator import simulate
from partition.plan import Pipeline, Plan, Stage
from reports import report_of
from small_case import small_cluster, small_plan, small_profile


def factors(before: ModelProfile, after: ModelProfile, kind: str) -> list[float]:
    """By how much each layer became slower, the same in all its times."""
    found = []
    for old, new in zip(before.kinds[kind].layers, after.kinds[kind].layers, strict=True):
        ratios = [
            b / a for a, b in zip(old.forward_s + old.backward_s, new.forward_s + new.backward_s, strict=True)
        ]
        assert max(ratios) == pytest.approx(min(ratios))
        found.append(ratios[0])
    return found


def test_a_device_slower_than_profiled_makes_its_kind_slower():
    # 56 s on the fast device took 20 % longer, 12 s on the slow one as long as they should
    profile, plan = small_profile(), small_plan()
    after = calibrate(profile, plan, small_cluster(), report_of(plan, [(56.0, 67.2), (24.0, 24.0)]))
    assert factors(profile, after, "fast") == pytest.approx([1.2] * 4)
    assert factors(profile, after, "slow") == pytest.approx([1.0] * 4)
    assert after.layers == profile.layers and after.links == profile.links


def one_kind(*pipelines: tuple[tuple[str, int, int], ...]) -> tuple[Cluster, Plan]:
    devices = tuple(Device(f"n/{index}", "n", "fast", 1e6) for index in range(4))
    cluster = Cluster("one kind", Link(0.0, 1e9), (Node("n", devices),))
    entries = tuple(
        Pipeline(1, 4, tuple(Stage((name,), (start, stop), 1) for name, start, stop in stages))
        for stages in pipelines
    )
    return cluster, Plan("manual", "made-up", 4 * len(entries), entries)


def test_layers_of_one_kind_follow_the_stage_that_held_them():
    profile = small_profile()
    cluster, plan = one_kind((("n/0", 0, 2), ("n/1", 2, 4)))
    after = calibrate(profile, plan, cluster, report_of(plan, [(10.0, 15.0), (20.0, 22.0)]))
    assert factors(profile, after, "fast") == pytest.approx([1.5, 1.5, 1.1, 1.1])
    assert after.kinds["slow"] == profile.kinds["slow"]  # not in the run


def test_devices_of_one_kind_give_their_weighted_mean():
    profile = small_profile()
    cluster, plan = one_kind((("n/0", 0, 4),), (("n/1", 0, 4),))
    # 10 s took 12 s, 30 s took 30 s: 42 s for 40 s
    after = calibrate(profile, plan, cluster, report_of(plan, [(10.0, 12.0), (30.0, 30.0)]))
    assert factors(profile, after, "fast") == pytest.approx([1.05] * 4)


def test_the_run_is_then_predicted_as_it_was_measured():
    profile, plan, cluster = small_profile(), small_plan(), small_cluster()
    predicted = simulate(ProgramCosts(lower(plan, profile), profile, cluster)).stage_busy_s()
    measured = [1.3 * predicted[0, 0], 0.7 * predicted[0, 1]]
    after = calibrate(
        profile, plan, cluster, report_of(plan, list(zip(predicted.values(), measured, strict=True)))
    )
    again = simulate(ProgramCosts(lower(plan, after), after, cluster)).stage_busy_s()
    assert list(again.values()) == pytest.approx(measured)


def test_the_standard_error_of_the_old_medians_is_forgotten():
    profile, plan = small_profile(), small_plan()
    kinds = {kind: replace(entry, standard_error=0.01) for kind, entry in profile.kinds.items()}
    after = calibrate(
        replace(profile, kinds=kinds), plan, small_cluster(), report_of(plan, [(56.0, 67.2), (0.0, 0.0)])
    )
    assert after.kinds["fast"].standard_error is None
    assert after.kinds["slow"].standard_error == 0.01  # nothing was predicted, so nothing is learned


def slower_hops(profile: ModelProfile, plan: Plan, cluster: Cluster, by: float) -> Trace:
    """The trace of a step in which every link is slower than the profile's and the cluster's."""

    def slow(link: Link) -> Link:
        return Link(link.latency_s * by, link.bandwidth_bytes_per_s / by)

    links = {pair: slow(link) for pair, link in profile.links.items()}
    slowed = replace(profile, links=links)
    return simulate(
        ProgramCosts(lower(plan, slowed), slowed, replace(cluster, network=slow(cluster.network)))
    )


def test_hops_that_a_device_was_idle_for_give_the_link():
    profile, plan, cluster = small_profile(), small_plan(num_samples=1), small_cluster()
    report = report_of(plan, [(14.0, 14.0), (6.0, 6.0)])
    after = calibrate(profile, plan, cluster, report, slower_hops(profile, plan, cluster, 3.0))
    # 10 bytes: 0.25 s and 0.25 s, as in the file; measured 1.5 s: latency and seconds a byte, times three
    assert after.links.keys() == {"fast>slow", "slow>fast"}
    for link in after.links.values():
        assert link.latency_s == pytest.approx(0.75)
        assert link.bandwidth_bytes_per_s == pytest.approx(40 / 3)


def test_hops_faster_than_planned_give_a_faster_link():
    profile, plan, cluster = small_profile(), small_plan(num_samples=1), small_cluster()
    report = report_of(plan, [(14.0, 14.0), (6.0, 6.0)])
    after = calibrate(profile, plan, cluster, report, slower_hops(profile, plan, cluster, 0.5))
    for link in after.links.values():
        assert link.latency_s == pytest.approx(0.125)
        assert link.bandwidth_bytes_per_s == pytest.approx(80)
    route = Network(cluster, after.links).route(*plan.device_names[:2])
    assert route.link.transfer_s(10) == pytest.approx(0.25)  # faster than the file's 0.5 s
    assert profile_from_data(json.loads(profile_text(after)), "file") == after


def test_a_link_measured_by_size_is_scaled_at_each_size():
    plan, cluster = small_plan(num_samples=1), small_cluster()
    by_size = MeasuredLink(0.25, 40.0, message_bytes=(10, 20), occupied_s=(0.5, 0.75))
    profile = replace(small_profile(), links={"fast>slow": by_size})
    report = report_of(plan, [(14.0, 14.0), (6.0, 6.0)])
    # forwards take 0.25 s and 0.5 s; as the trace of a link that takes twice that
    slow = MeasuredLink(0.5, 20.0, message_bytes=(10, 20), occupied_s=(1.0, 1.5))
    slowed = replace(profile, links={"fast>slow": slow})
    trace = simulate(ProgramCosts(lower(plan, slowed), slowed, cluster))
    link = calibrate(profile, plan, cluster, report, trace).links["fast>slow"]
    assert [link.transfer_s(size) for size in (10, 20, 40)] == pytest.approx([1.5, 2.0, 3.0])


def test_optimizer_seconds_are_those_of_the_measured_step():
    profile, plan, cluster = small_profile(), small_plan(), small_cluster()
    report = report_of(plan, [(56.0, 56.0), (24.0, 24.0)])
    # by hand: 360 + 200 + 200 bytes at 0.001 s, 300 at 0.002 s; the slow device takes twice as long
    kinds = {**profile.kinds, "slow": replace(profile.kinds["slow"], optimizer_s_per_byte=0.004)}
    measured = simulate(ProgramCosts(lower(plan, profile), replace(profile, kinds=kinds), cluster))
    after = calibrate(profile, plan, cluster, report, measured)
    assert after.kinds["fast"].optimizer_s_per_byte == pytest.approx(0.001)
    assert after.kinds["slow"].optimizer_s_per_byte == pytest.approx(0.004)
    # the same where nothing was predicted, and on devices of half the speed
    none = {kind: replace(entry, optimizer_s_per_byte=0.0) for kind, entry in profile.kinds.items()}
    nodes = tuple(replace(node, devices=(replace(node.devices[0], speed=0.5),)) for node in cluster.nodes)
    after = calibrate(replace(profile, kinds=none), plan, replace(cluster, nodes=nodes), report, measured)
    assert after.kinds["fast"].optimizer_s_per_byte == pytest.approx(0.0005)
    assert after.kinds["slow"].optimizer_s_per_byte == pytest.approx(0.002)


def test_the_seconds_of_a_step_on_the_host_are_none_of_the_device():
    profile, plan, cluster = small_profile(), small_plan(), small_cluster()
    (pipeline,) = plan.pipelines
    away = replace(pipeline.stages[1], offload=("optimizer states", "optimizer step"))
    moved = replace(plan, pipelines=(replace(pipeline, stages=(pipeline.stages[0], away)),))
    kinds = {kind: replace(entry, optimizer_s_per_byte=0.5) for kind, entry in profile.kinds.items()}
    measured = simulate(ProgramCosts(lower(plan, profile), replace(profile, kinds=kinds), cluster))
    report = report_of(plan, [(56.0, 56.0), (24.0, 24.0)])
    hosts = tuple(replace(node, host_memory=HostMemory(1e9, Link(0.0, 1e9), 1e9)) for node in cluster.nodes)
    after = calibrate(profile, moved, replace(cluster, nodes=hosts), report, measured)
    assert after.kinds["fast"].optimizer_s_per_byte == pytest.approx(0.5)
    assert after.kinds["slow"].optimizer_s_per_byte == profile.kinds["slow"].optimizer_s_per_byte


def test_links_of_emulated_devices_stay_as_they_are():
    profile, plan, cluster = small_profile(), small_plan(num_samples=1), small_cluster()
    trace = slower_hops(profile, plan, cluster, 3.0)
    fast, slow = cluster.nodes
    emulated = replace(slow, devices=(replace(slow.devices[0], kind=EMULATED),))
    profile = replace(profile, kinds={**profile.kinds, EMULATED: profile.kinds["slow"]})
    report = report_of(plan, [(14.0, 14.0), (6.0, 6.0)])
    after = calibrate(profile, plan, replace(cluster, nodes=(fast, emulated)), report, trace)
    assert after.links == profile.links


def test_a_report_of_another_plan_is_refused():
    profile, plan = small_profile(), small_plan()
    _, other = one_kind((("n/0", 0, 4),))
    with pytest.raises(
        InputError, match="the report is of 'made-up' in 1 stages, the plan of 'made-up' in 2"
    ):
        calibrate(profile, plan, small_cluster(), report_of(other, [(1.0, 1.0)]))
