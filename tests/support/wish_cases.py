"""Random problems on which what a wish finds is compared with what `auto` finds. Shared by tests."""

import random
from collections.abc import Sequence
from dataclasses import replace

from cost_model.cluster import Cluster, Device, Link, Node
from cost_model.errors import InfeasibleError, InputError
from hetpipe.simulation.prediction import evaluator
from partition.auto import auto
from partition.problem import Forced, Problem
from random_problems import SIZES, random_profile

NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
FEW = (1, 2, 4)
"""Numbers of pipelines that are forced; of more than eight devices few."""
COUNTS = (3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 6, 6, 8, 12, 16)


def wish_case(seed: int) -> Problem:
    """Three to sixteen devices, six to sixteen layers; in turn three sorts of problems.

    Chains with slow links and memory 1.05 to 1.6 times the least there could be; ample memory where sums take
    long; both.
    """
    rng, sort = random.Random(seed), seed % 3
    profile = random_profile(rng, rng.randint(6, 16), kinds=3)
    count = rng.choice(COUNTS)
    layers = profile.layers
    states = 4 * sum(layer.parameter_bytes for layer in layers)
    kept = sum(layer.saved_bytes_per_sample for layer in layers) + 2 * len(layers) ** 0.5
    slack = rng.uniform(1.05, 1.6) if sort != 1 else rng.uniform(3, 20)
    each = slack * (states + kept) / count + max(layer.workspace_bytes for layer in layers)
    width = 1 if sort == 0 else rng.choice([1, 2, 2, 4])
    nodes: list[Node] = []
    while sum(len(node.devices) for node in nodes) < count:
        name, kind = f"n{len(nodes)}", f"kind {rng.randrange(3)}"
        memory, speed = each * rng.uniform(0.8, 1.3), rng.choice([0.5, 1.0, 1.0, 2.0])
        slots = min(width, count - sum(len(node.devices) for node in nodes))
        devices = (Device(f"{name}/{slot}", name, kind, memory, speed=speed) for slot in range(slots))
        nodes.append(Node(name, tuple(devices), Link(0.0, 1e3)))
    message = sum(layer.output_bytes_per_sample for layer in layers) / len(layers)
    # of a mean stage's seconds for a sample, which are some 4 times its layers
    stage_s = 4 * len(layers) / count
    share = rng.choice([0.3, 0.7, 1.0, 2.0]) if sort == 0 else rng.choice([0.02, 0.1, 0.3])
    link = Link(rng.choice([0.0, 0.1]), message / (share * stage_s))
    if sort:
        summed_s = rng.choice([0.1, 0.3, 1.0]) * 4 * len(layers) * 4
        link = replace(link, bandwidth_bytes_per_s=max(link.bandwidth_bytes_per_s, states / 2 / summed_s))
    sizes = rng.choice([SIZES[:1], SIZES[:2], SIZES])
    batch = count * rng.choice([4, 8])
    return Problem(profile, Cluster("wishes", link, tuple(nodes)), batch, sizes)


def step_s(problem: Problem) -> float | None:
    """Return the simulated step of the plan of `auto`; None where none fits, or the wish is impossible."""
    evaluate = evaluator(problem.profile, problem.cluster)
    try:
        return evaluate(auto(problem, evaluate)).step_s
    except (InfeasibleError, InputError):
        return None


def forced_steps(problem: Problem, numbers: Sequence[int] = ()) -> dict[int, float]:
    """Return the steps of what `auto` answers where the number of pipelines is forced, by number."""
    most = min(len(problem.cluster.devices), problem.global_batch_size)
    numbers = numbers or (NUMBERS if most <= 8 else FEW)
    wishes = {
        number: replace(problem, forced=Forced(num_pipelines=number)) for number in numbers if number <= most
    }
    found = {number: step_s(wish) for number, wish in wishes.items()}
    return {number: seconds for number, seconds in found.items() if seconds is not None}
