"""The clock of one pipeline by hand, and its timing for any number of samples, which equals the clock.

That the clock equals the simulator is in tests/hetpipe/simulation/test_clocks.py.
"""

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from cost_model.cluster import Cluster, Device, Link, Node
from partition.estimates.batch_split import share_out
from partition.estimates.closed_forms import makespan_bound_s
from partition.estimates.pipeline_clock import Seconds, one_f_one_b_s
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.timed_pipeline import TimedPipeline, TimingCache, timed_stages
from partition.plan import Pipeline, Stage
from partition.problem import Problem
from random_problems import random_profile


def random_pipeline(seed: int) -> tuple[Problem, Pipeline]:
    """One to five stages on one node, where each pair of devices has links of its own; memory is ample."""
    rng = random.Random(seed)
    count = rng.randint(1, 5)
    num_layers = rng.randint(count, 8)
    profile = random_profile(rng, num_layers)
    devices = tuple(
        Device(f"n/{index}", "n", f"kind {rng.randrange(2)}", 1e6, speed=rng.choice([0.5, 1.0, 2.0]))
        for index in range(count)
    )
    link = Link(rng.choice([0.0, 0.3, 3.0]), rng.choice([0.5, 5.0, 1e9]))
    cluster = Cluster("one node", link, (Node("n", devices),))
    cuts = [0, *sorted(rng.sample(range(1, num_layers), count - 1)), num_layers]
    size, samples = rng.choice([1, 2, 3, 4]), rng.randint(1, 24)
    flights = sorted((rng.randint(1, 9) for _ in devices), reverse=True)
    stages = tuple(
        Stage((device.name,), cut, flight, rng.random() < 0.2)
        for device, cut, flight in zip(devices, pairwise(cuts), flights, strict=True)
    )
    return Problem(profile, cluster, samples, (size,)), Pipeline(size, samples, stages)


def test_clock_by_hand() -> None:
    # F 1, B 2 on two stages, links of 0.5 with latency 0.25 each way, two microbatches:
    # stage 0  F0 0-1  F1 1-2                        B0 5.5-7.5  B1 8.5-10.5
    # stage 1          F0 1.75-2.75  B0 2.75-4.75  F1 4.75-5.75  B1 5.75-7.75
    link = (0.5, 0.5, 0.25, 0.25)
    full = Seconds((1.0, 1.0), (2.0, 2.0), (link,))
    assert one_f_one_b_s(full, [2, 1], 2) == 10.5
    # in_flight 1 on both: a round trip of 1 + 0.75 + 3 + 0.75 + 2 after the other
    assert one_f_one_b_s(full, [1, 1], 2) == 15.0
    # the last microbatch takes half; its B is back at 4.75 + 0.5 + 1 + 0.75 = 7 and waits for B0 until 7.5
    half = Seconds((0.5, 0.5), (1.0, 1.0), (link,))
    assert one_f_one_b_s(full, [2, 1], 2, half) == 8.5


def test_a_message_occupies_its_link_without_the_latency() -> None:
    # two forwards on a link of 2 with latency 10: they leave at 1 and 3, arrive at 13 and 15
    full = Seconds((1.0, 1.0), (0.0, 0.0), ((2.0, 0.0, 10.0, 0.0),))
    assert one_f_one_b_s(full, [2, 2], 2) == 16.0


def timed_of(problem: Problem, pipeline: Pipeline) -> TimedPipeline:
    stages = timed_stages(problem.cluster, pipeline)
    return TimingCache(PipelineCosts(problem)).pipeline(stages, pipeline.microbatch_size)


def error_of_whole_s(seed: int) -> float:
    """The largest relative error of the timing against the clock, for few and for many microbatches."""
    problem, pipeline = random_pipeline(seed)
    timing = timed_of(problem, pipeline).timing

    def exact_s(count: int) -> float:
        return one_f_one_b_s(timing.full, timing.usual, count) + timing.optimizer_s

    return max(abs(timing.clock.whole_s(count) / exact_s(count) - 1) for count in (1, 7, 20, 40, 300))


def test_timing_extends_the_clock_to_many_microbatches() -> None:
    assert max(error_of_whole_s(seed) for seed in range(250)) < 1e-3


@pytest.mark.slow
def test_timing_is_rarely_off() -> None:
    errors = [error_of_whole_s(seed) for seed in range(5000, 7000)]
    assert max(errors) < 0.02 and sum(error > 1e-3 for error in errors) < 10


def check_inverse(seed: int) -> None:
    problem, pipeline = random_pipeline(seed)
    timing = timed_of(problem, pipeline).timing
    limit = 20 * timing.microbatch_size
    taken = [timing.time_s(samples) for samples in range(limit + 1)]
    for samples in range(1, limit):
        within = timing.most(taken[samples] * (1 + 1e-9), limit)
        assert within >= samples and taken[within] <= taken[samples] * (1 + 1e-9), (seed, samples)
        middle_s = (taken[samples] + taken[samples + 1]) / 2
        if taken[samples] < middle_s < taken[samples + 1]:
            assert timing.most(middle_s, limit) == samples, (seed, samples)
    assert timing.most(0.5 * taken[1], limit) == 0


def test_most_is_the_inverse_of_time() -> None:
    for seed in range(100):
        check_inverse(seed)


def test_the_closed_form_promises_no_fewer_samples_than_the_clock_finds() -> None:
    closer = 0
    for seed in range(300):
        problem, pipeline = random_pipeline(seed)
        limit = 30 * pipeline.microbatch_size
        asked, fresh = (timed_of(problem, pipeline).timing for _ in range(2))
        for count in (1, 2, 5, 17):
            step_s = (1 + 0.1 * (seed % 7)) * asked.clock.whole_s(count)
            promised = fresh.no_more(step_s, limit)
            assert asked.most(step_s, limit) <= promised <= limit, (seed, count)
            closer += promised < limit
        assert not fresh.clock.asked  # the clock was not asked
    assert closer > 500


def test_extended_times_are_no_shorter_than_z() -> None:
    for seed in range(300):
        problem, pipeline = random_pipeline(seed)
        timing = timed_of(problem, pipeline).timing
        for count in (50, 400, 3000):
            z_s = makespan_bound_s(timing.busy_s, timing.round_trips_s, count, in_flight=timing.usual)
            assert timing.clock.whole_s(count) >= (timing.optimizer_s + z_s) * (1 - 1e-9), (seed, count)


def test_samples_are_shared_out_so_that_no_pipeline_ends_later() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        problems = [random_pipeline(rng.randrange(10_000)) for _ in range(rng.randint(1, 4))]
        timed = [timed_of(problem, pipeline) for problem, pipeline in problems]
        batch = rng.randint(1, 60)
        step_s, samples = share_out(timed, batch)
        assert sum(samples) == batch
        ends = [
            timed_pipeline.timing.time_s(count) for timed_pipeline, count in zip(timed, samples, strict=True)
        ]
        assert max(ends) <= step_s * (1 + 1e-9)
        # in a step shorter by more than the tolerance they could not do the batch
        assert sum(timed_pipeline.timing.most(step_s * (1 - 3e-5), batch) for timed_pipeline in timed) < batch
        # asked for a step that is long enough, or too short
        assert share_out(timed, batch, within_s=1.3 * step_s)[0] == pytest.approx(step_s, rel=3e-5)
        assert share_out(timed, batch, within_s=0.99 * step_s) == (math.inf, [0] * len(timed))


def test_a_pipeline_that_does_not_fit_gets_nothing() -> None:
    problem, pipeline = random_pipeline(3)
    small = replace(
        problem,
        cluster=replace(
            problem.cluster,
            nodes=tuple(
                replace(node, devices=tuple(replace(device, memory_bytes=1e-3) for device in node.devices))
                for node in problem.cluster.nodes
            ),
        ),
    )
    able, unable = timed_of(problem, pipeline), timed_of(small, pipeline)
    assert share_out([unable, able], 5)[1] == [0, 5]
    assert share_out([unable], 5) == (float("inf"), [0])
