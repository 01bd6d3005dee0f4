"""Sets of pipelines that are alike: equal devices and nodes may change places, nothing else may."""

import random
from collections.abc import Sequence

import pytest

from cost_model.cluster import Cluster, Device, Link, Node, NodeLink
from hetpipe.simulation.prediction import evaluator
from partition.estimates.device_classes import equal_devices
from partition.estimates.timed_pipeline import TimedPipeline
from partition.local_search.alike_sets import AlikeSets
from partition.local_search.pipeline_search import PipelineSearch
from partition.plan import Plan
from partition.problem import Problem
from random_problems import random_profile


def problem_of(*, named: bool = False) -> Problem:
    """Two equal nodes of two and one unlike; named: one of the equal ones has a link of its own to it."""
    profile = random_profile(random.Random(5), 6)
    nodes = [
        Node(
            name, tuple(Device(f"{name}/{slot}", name, "kind 0", 1e9, speed=speed) for slot in range(2)), link
        )
        for name, speed, link in (
            ("a", 1.0, Link(0.0, 40.0)),
            ("b", 1.0, Link(0.0, 40.0)),
            ("c", 2.0, Link(0.0, 70.0)),
        )
    ]
    links = (NodeLink(("a", "c"), Link(0.0, 5.0)),) if named else ()
    return Problem(profile, Cluster("alike", Link(0.1, 10.0), tuple(nodes), links), 12, (1, 2))


def random_sets(search: PipelineSearch, rng: random.Random, count: int) -> list[list[TimedPipeline]]:
    """Return sets of pipelines on random devices, many of them alike."""
    found: list[list[TimedPipeline]] = []
    while len(found) < count:
        devices = list(search.problem.cluster.devices)
        rng.shuffle(devices)
        timed = []
        while devices:
            width = rng.randint(1, 3)
            chain, devices = devices[:width], devices[width:]
            pipeline = search.cut_optimizer.recut(chain, rng.choice((1, 2)), 4)
            timed += [pipeline] if pipeline is not None and pipeline.timing.fits else []
        if timed:
            found.append(timed)
    return found


def exchanged(
    search: PipelineSearch, timed: Sequence[TimedPipeline], names: dict[str, str]
) -> list[TimedPipeline]:
    """Return the pipelines with other devices."""
    devices = {device.name: device for device in search.problem.cluster.devices}
    return [
        search.timings.pipeline(
            [
                stage._replace(device=devices[names.get(stage.device.name, stage.device.name)])
                for stage in pipeline.stages
            ],
            pipeline.microbatch_size,
        )
        for pipeline in timed
    ]


def swap(*pairs: tuple[str, str]) -> dict[str, str]:
    return dict(pairs) | {other: one for one, other in pairs}


def key_of(alike: AlikeSets, timed: Sequence[TimedPipeline]) -> object:
    return alike.ordered(timed)[0]


@pytest.mark.parametrize("named", [False, True])
def test_sets_that_are_alike_take_the_same_step_in_order(named: bool) -> None:
    problem = problem_of(named=named)
    search, evaluate = PipelineSearch(problem), evaluator(problem.profile, problem.cluster)
    alike, steps = AlikeSets(search.classes), dict[object, list[float]]()
    for timed in random_sets(search, random.Random(1), 400):
        key, ordered = alike.ordered(timed)
        assert sorted(map(id, ordered)) == sorted(map(id, timed))
        plan = search.plan("alike", ordered)
        assert plan is not None
        steps.setdefault(key, []).append(evaluate(plan).step_s)
    several = [found for found in steps.values() if len(found) > 1]
    assert all(max(found) <= min(found) * (1 + 1e-12) for found in several)
    assert len(several) > 30


def test_equal_devices_and_nodes_may_change_places_and_no_others() -> None:
    search = PipelineSearch(problem_of())
    alike, between = AlikeSets(search.classes), AlikeSets(equal_devices(problem_of(named=True).cluster))
    differ = unlike = 0
    for timed in random_sets(search, random.Random(2), 60):
        key = key_of(alike, timed)
        assert key_of(alike, timed[::-1]) == key
        assert key_of(alike, exchanged(search, timed, swap(("a/0", "a/1"), ("c/0", "c/1")))) == key
        nodes = exchanged(search, timed, swap(("a/0", "b/0"), ("a/1", "b/1")))
        assert key_of(alike, nodes) == key
        # of these two nodes one has a slower way to the third
        differ += key_of(between, nodes) != key_of(between, timed)
        unlike += key_of(alike, exchanged(search, timed, swap(("a/0", "c/0"), ("a/1", "c/1")))) != key
    assert differ > 30 and unlike > 50


def test_other_cuts_sizes_and_pins_are_told_apart() -> None:
    problem = problem_of()
    search = PipelineSearch(problem)
    alike, devices = AlikeSets(search.classes), problem.cluster.devices
    pinned = AlikeSets(equal_devices(problem.cluster, ["a/0"]))
    whole = [search.cut_optimizer.recut(devices[:1], size, 4) for size in (1, 2)]
    other = search.cut_optimizer.recut(devices[1:2], 1, 4)
    assert whole[0] is not None and whole[1] is not None and other is not None
    assert key_of(alike, [whole[0]]) != key_of(alike, [whole[1]])
    assert key_of(alike, [whole[0]]) == key_of(alike, [other])
    assert key_of(pinned, [whole[0]]) != key_of(pinned, [other])
    two = search.cut_optimizer.recut(devices[:2], 1, 4)
    assert two is not None
    first, second = two.stages
    moved = [first._replace(stop=first.stop - 1), second._replace(start=second.start - 1)]
    assert first.stop > 1
    assert key_of(alike, [two]) != key_of(alike, [search.timings.pipeline(moved, 1)])


def test_of_alike_sets_one_is_simulated_and_the_result_takes_as_long() -> None:
    problem = problem_of()
    evaluate, made = evaluator(problem.profile, problem.cluster), list[object]()

    class Noting(PipelineSearch):
        def plan(self, strategy: str, timed: Sequence[TimedPipeline]) -> Plan | None:
            made.append(key_of(AlikeSets(self.classes), timed))
            return super().plan(strategy, timed)

    search = Noting(problem)
    found = search.search(lambda _, seconds: seconds)
    improved = search.improve_with_simulator(found, lambda plan: evaluate(plan).step_s)
    assert len(set(made)) == len(made) > 20
    for entry in improved:
        plan = search.plan("improved", entry.timed)
        assert plan is not None and evaluate(plan).step_s == entry.step_s
