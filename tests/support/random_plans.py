"""Random plans, and problems whose memory is just enough for them. Shared by tests."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from cost_model.cluster import Cluster, Device, Link, Node, NodeLink
from cost_model.dtypes import GRADIENT_DTYPES
from cost_model.layer_profile import LayerTimes
from cost_model.measured_links import MeasuredAllReduce, MeasuredLink
from cost_model.profile import ModelProfile
from hetpipe.program.instructions import Compute, Step
from hetpipe.simulation.prediction import simulate_plan
from partition.estimates.plan_memory import plan_memory
from partition.plan import Pipeline, Plan, Stage
from partition.problem import Problem
from random_problems import frozen_below, in_two_precisions, random_cluster, random_profile

SIZE_SETS = ((1,), (2,), (3,), (4,), (1, 2), (2, 4), (1, 4), (1, 2, 4), (3, 8))


def without_sync_s(plan: Plan, problem: Problem) -> float:
    """Seconds until the last computation of the simulated step, and the longest optimizer step after it."""
    events = simulate_plan(plan, problem.profile, problem.cluster).events
    last = max(event.end_s for event in events if isinstance(event.instruction, Compute))
    return last + max(event.end_s - event.start_s for event in events if isinstance(event.instruction, Step))


def fits(plan: Plan, problem: Problem) -> bool:
    return all(
        need <= problem.cluster.device(name).usable_bytes for name, need in needs_of(plan, problem).items()
    )


def needs_of(plan: Plan, problem: Problem) -> dict[str, float]:
    """What each device of a plan needs, of the bytes that layers have on its kind."""
    kinds = {name: problem.cluster.device(name).kind for name in plan.device_names}
    return {
        name: plan_memory(plan, problem.profile.on(kind), name).total_bytes for name, kind in kinds.items()
    }


def random_case(seed: int) -> Problem:
    """One to five devices with ample memory, on one node or several; one to six layers, some frozen.

    In half of the cases the times of a layer rise with the microbatch in any way, per sample too.
    """
    rng = random.Random(seed)
    profile = random_profile(rng, rng.randint(1, 6), tied=False)
    if rng.random() < 0.5:
        profile = _rough(rng, profile)
    if profile.num_layers > 1 and rng.random() < 0.4:
        profile = _tied(rng, profile)
    profile = _frozen(seed, profile)
    devices = []
    for index in range(rng.randint(1, 5)):
        node = rng.choice("abc")
        kind, speed = f"kind {rng.randrange(2)}", rng.choice([0.5, 1.0, 1.0, 2.0])
        devices.append(Device(f"{node}/{index}", node, kind, 1e6, speed=speed))
    link = Link(rng.choice([0.0, 0.3, 2.0]), rng.choice([0.5, 5.0, 100.0, 1e9]))
    inside = rng.choice([None, Link(0.0, 50.0)])
    sizes = rng.choice(SIZE_SETS)
    cluster = _cluster(link, inside, devices)
    if len(cluster.nodes) > 1 and rng.random() < 0.4:
        nodes = rng.sample([node.name for node in cluster.nodes], 2)
        own = NodeLink((nodes[0], nodes[1]), Link(rng.choice([0.0, 1.0]), rng.choice([0.5, 1e9])))
        cluster = replace(cluster, links=(own,))
    return Problem(profile, cluster, rng.randint(1, 14), sizes)


def crowded_case(seed: int) -> Problem:
    """Three to seven devices with ample memory on one node or two, and links on which messages queue.

    In a third of the cases all seconds are whole numbers, so that much happens at one time.
    """
    rng = random.Random(seed)
    profile = random_profile(rng, rng.randint(3, 8), tied=rng.random() < 0.4)
    link = Link(rng.choice([0.0, 0.3]), rng.choice([0.05, 0.1, 0.3]))
    cluster = replace(random_cluster(rng, rng.randint(3, 7), 1e6), network=link)
    if rng.random() < 1 / 3:
        profile, cluster = _in_whole_seconds(rng, profile, cluster)
    return Problem(profile, cluster, rng.randint(8, 24), rng.choice(SIZE_SETS))


def _in_whole_seconds(
    rng: random.Random, profile: ModelProfile, cluster: Cluster
) -> tuple[ModelProfile, Cluster]:
    """Layers of F 1 s, B 2 s a sample, or twice that, and messages of 1 or 2 s a sample on equal devices."""
    sizes = profile.kind("kind 0").microbatch_sizes
    times = [
        LayerTimes(tuple(map(float, sizes)), tuple(2.0 * size for size in sizes)),
        LayerTimes(tuple(2.0 * size for size in sizes), tuple(4.0 * size for size in sizes)),
    ]
    layers = tuple(replace(layer, output_bytes_per_sample=rng.choice([1.0, 2.0])) for layer in profile.layers)
    kinds = {
        name: replace(kind, layers=tuple(rng.choices(times, k=len(layers))))
        for name, kind in profile.kinds.items()
    }
    nodes = tuple(
        replace(node, interconnect=None, devices=tuple(replace(device, speed=1.0) for device in node.devices))
        for node in cluster.nodes
    )
    network = Link(rng.choice([0.0, 1.0]), 1.0)
    return replace(profile, layers=layers, kinds=kinds), replace(cluster, network=network, nodes=nodes)


def _cluster(link: Link, inside: Link | None, devices: Sequence[Device]) -> Cluster:
    names = sorted({device.node for device in devices})
    nodes = tuple(Node(name, tuple(d for d in devices if d.node == name), inside) for name in names)
    return Cluster("random", link, nodes)


def _rough(rng: random.Random, profile: ModelProfile) -> ModelProfile:
    def rising(count: int) -> tuple[float, ...]:
        return tuple(sorted(rng.uniform(0, 4) for _ in range(count)))

    kinds = {
        name: replace(
            kind,
            layers=tuple(
                LayerTimes(rising(len(kind.microbatch_sizes)), rising(len(kind.microbatch_sizes)))
                for _ in kind.layers
            ),
        )
        for name, kind in profile.kinds.items()
    }
    return replace(profile, kinds=kinds)


def _frozen(seed: int, profile: ModelProfile) -> ModelProfile:
    """The profile, in a third of the cases with first layers that are not trained."""
    if seed % 3 != 1 or any(layer.tied_to for layer in profile.layers):
        return profile
    return frozen_below(profile, random.Random(-seed).randrange(profile.num_layers))


def _tied(rng: random.Random, profile: ModelProfile) -> ModelProfile:
    other, one = sorted(rng.sample(range(profile.num_layers), 2))
    layers = list(profile.layers)
    layers[one] = replace(layers[one], tied_to=layers[other].name)
    return replace(profile, layers=tuple(layers))


def random_plan(rng: random.Random, problem: Problem, most: int = 100) -> Plan:
    """At most so many disjoint pipelines of the space of the bounds, whether memory takes them or not."""
    devices = list(problem.cluster.devices)
    rng.shuffle(devices)
    devices = devices[: rng.choice([len(devices), rng.randint(1, len(devices))])]
    batch = problem.global_batch_size
    count = rng.choice([1, rng.randint(1, min(len(devices), batch, most))])
    ends = [0, *sorted(rng.sample(range(1, len(devices)), count - 1)), len(devices)]
    shares = [0, *sorted(rng.sample(range(1, batch), count - 1)), batch]
    pipelines = tuple(
        _pipeline(rng, problem, devices[first:last], stop - start)
        for (first, last), (start, stop) in zip(pairwise(ends), pairwise(shares), strict=True)
    )
    return problem.plan("random", pipelines)


def random_shared_plan(rng: random.Random, problem: Problem) -> Plan:
    """One to three pipelines whose stages take any device, also one that others have."""
    batch = problem.global_batch_size
    count = rng.randint(1, min(3, batch))
    shares = [0, *sorted(rng.sample(range(1, batch), count - 1)), batch]
    pipelines = tuple(
        _pipeline(rng, problem, rng.choices(problem.cluster.devices, k=rng.randint(1, 5)), stop - start)
        for start, stop in pairwise(shares)
    )
    return problem.plan("random", pipelines)


def with_measured_links(rng: random.Random, profile: ModelProfile) -> ModelProfile:
    """The profile with links between its kinds measured by size, and with all-reduces of two or all four."""
    sizes = (1, 3, 9)

    def rising() -> tuple[float, ...]:
        return tuple(sorted(rng.uniform(0, 2) for _ in sizes))

    links = {
        f"{one}>{other}": MeasuredLink(rng.choice([0.0, 0.2]), rng.choice([2.0, 50.0]), sizes, rising())
        for one in profile.kinds
        for other in profile.kinds
    }
    groups = [tuple(rng.choices(list(profile.kinds), k=count)) for count in (2, 4)]
    measured = tuple(MeasuredAllReduce(kinds, sizes, rising()) for kinds in groups)
    return replace(profile, links=links, all_reduces=rng.choice([(), measured]))


def _pipeline(rng: random.Random, problem: Problem, devices: Sequence[Device], num_samples: int) -> Pipeline:
    layers = problem.profile.num_layers
    size = min(rng.choice(problem.microbatch_sizes), num_samples)
    stages = min(len(devices), layers)
    cuts = [0, *sorted(rng.sample(range(1, layers), stages - 1)), layers]
    many = -(-num_samples // size)
    flights = sorted((rng.choice([1, 2, many, rng.randint(1, many)]) for _ in range(stages)), reverse=True)
    again = rng.random() < 0.3
    stages = []
    for device, cut, flight in zip(devices, pairwise(cuts), flights, strict=False):
        recompute = again and rng.random() < 0.7
        each = (0, 1, 2)[(sum(cut) + flight) % 3] if recompute else 0
        stages.append(Stage((device.name,), cut, flight, recompute, each))
    return Pipeline(size, num_samples, tuple(stages))


def with_tight_memory(rng: random.Random, problem: Problem, plan: Plan) -> Problem:
    """The problem on devices that hold what the plan needs, and no more; or now and then a little more."""
    needs = needs_of(plan, problem)
    largest = max(needs.values())
    same, more = rng.random() < 0.3, rng.choice([1.0, 1.0, 1.0, 1.2])

    def tight(device: Device) -> Device:
        need = largest if same else needs.get(device.name, rng.uniform(0.3, 1.0) * largest)
        return replace(device, memory_bytes=max(need * more, 1e-6))

    nodes = tuple(replace(node, devices=tuple(map(tight, node.devices))) for node in problem.cluster.nodes)
    return replace(problem, cluster=replace(problem.cluster, nodes=nodes))


def tight_case(seed: int, num_plans: int = 25) -> tuple[Problem, list[Plan]]:
    """A problem, and plans that its memory takes: the fastest of some random ones, and others.

    In a quarter of the cases the kinds compute in two precisions.
    """
    rng, problem = random.Random(seed), random_case(seed)
    if seed % 4 == 2:
        problem = in_two_precisions(problem)
    plans = [random_plan(rng, problem) for _ in range(num_plans)]
    order = sorted(plans, key=lambda plan: without_sync_s(plan, problem))
    chosen = order[0] if rng.random() < 0.7 else rng.choice(order)
    problem = with_tight_memory(rng, problem, chosen)
    return problem, [plan for plan in order if fits(plan, problem)]


def sync_case(seed: int) -> Problem:
    """Two or three nodes of one to three devices with ample memory, and slow links between the nodes.

    In some cases nodes have a link of their own, links and all-reduces are measured, gradients are rounded.
    """
    rng = random.Random(seed)
    profile = random_profile(rng, rng.randint(1, 5), tied=False)
    if profile.num_layers > 1 and rng.random() < 0.3:
        profile = _tied(rng, profile)
    if rng.random() < 0.25:
        profile = with_measured_links(rng, profile)
    profile = _frozen(seed, profile)
    devices = [
        Device(f"{node}/{index}", node, f"kind {rng.randrange(2)}", 1e6, speed=rng.choice([1.0, 1.0, 2.0]))
        for node in "abc"[: rng.randint(2, 3)]
        for index in range(rng.randint(1, 3))
    ]
    link = Link(rng.choice([0.0, 0.1]), rng.choice([0.3, 1.0, 3.0]))
    cluster = _cluster(link, rng.choice([None, Link(0.0, 50.0)]), devices)
    if rng.random() < 0.3:
        own = NodeLink(("a", "b"), Link(0.0, rng.choice([0.5, 5.0])))
        cluster = replace(cluster, links=(own,))
    batch, sizes = rng.randint(4, 16), rng.choice([(1,), (2,), (1, 2), (1, 4)])
    return Problem(profile, cluster, batch, sizes, gradient_dtype=GRADIENT_DTYPES[seed % 3 == 1])
