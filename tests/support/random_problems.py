"""Random small planning problems, and a closed-form stand-in for the simulator. Shared by tests."""

import random
from dataclasses import replace
from typing import Any

from cost_model.cluster import Cluster, Device, Link, Node
from cost_model.dtypes import BFLOAT16_AUTOCAST, FLOAT32
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.profile import KindProfile, ModelProfile
from partition.estimates.pipeline_costs import PipelineCosts
from partition.estimates.plan_memory import plan_memory
from partition.estimates.step_estimate import StepEstimate
from partition.plan import DeviceFigures, Figures, Plan
from partition.problem import Evaluate, Problem

SIZES = (1, 2, 4)


def random_profile(
    rng: random.Random, num_layers: int, kinds: int = 2, *, tied: bool = False
) -> ModelProfile:
    """Layers of 1 to 8 bytes of parameters; times that grow with the microbatch, not in proportion.

    Some layers have a workspace: the odd ones by microbatch size, the others the same at any.
    """
    optimizer = rng.choice([0.0, 0.2])
    layers = tuple(
        LayerProfile(
            name=f"layer {index}",
            parameter_bytes=rng.uniform(1, 8),
            output_bytes_per_sample=rng.uniform(0.1, 1),
            saved_bytes_per_sample=rng.uniform(0.2, 3),
            **_workspace(rng.choice([0.0, 2.0]), by_size=index % 2 == 1),
            tied_to="layer 0" if tied and index == num_layers - 1 else None,
        )
        for index in range(num_layers)
    )
    return ModelProfile(
        model="random",
        sequence_length=8,
        dtype="float32",
        layers=layers,
        kinds={f"kind {index}": _kind(rng, num_layers, optimizer) for index in range(kinds)},
    )


def _workspace(num_bytes: float, *, by_size: bool) -> dict[str, Any]:
    if not by_size:
        return {"workspace_bytes": num_bytes}
    return {"workspace_by_size": tuple((size, num_bytes * (0.5 + size / 4)) for size in SIZES)}


def _kind(rng: random.Random, num_layers: int, optimizer: float) -> KindProfile:
    def layer() -> LayerTimes:
        fixed, slope = rng.uniform(0, 1), rng.uniform(0.2, 1.5)
        forward = tuple(fixed + slope * size for size in SIZES)
        return LayerTimes(forward_s=forward, backward_s=tuple(2 * seconds for seconds in forward))

    layers = tuple(layer() for _ in range(num_layers))
    return KindProfile("measured", SIZES, layers, optimizer_s_per_byte=optimizer)


def frozen_below(profile: ModelProfile, first_trained: int) -> ModelProfile:
    """The profile of a model whose first layers are not trained."""
    layers = (
        replace(layer, unreached_bytes=layer.parameter_bytes) if index < first_trained else layer
        for index, layer in enumerate(profile.layers)
    )
    return replace(profile, layers=tuple(layers))


def in_two_precisions(problem: Problem) -> Problem:
    """The problem with kind 1 in 16 bits: half of what travels, less saved, and copies of the weights."""
    profile = problem.profile
    lowered = tuple(
        replace(
            layer,
            output_bytes_per_sample=layer.output_bytes_per_sample / 2,
            saved_bytes_per_sample=layer.saved_bytes_per_sample * (0.5 if index % 3 else 1.2),
            lowered_bytes=layer.trained_bytes / 2,
        )
        for index, layer in enumerate(profile.layers)
    )
    dtypes = {kind: BFLOAT16_AUTOCAST if kind == "kind 1" else FLOAT32 for kind in profile.kinds}
    held = {FLOAT32: profile.layers, BFLOAT16_AUTOCAST: lowered}
    kinds = {kind: replace(times, held=held[dtypes[kind]]) for kind, times in profile.kinds.items()}
    return replace(problem, profile=profile.with_kinds(kinds, dtypes))


def random_cluster(rng: random.Random, num_devices: int, memory_bytes: float, kinds: int = 2) -> Cluster:
    """Devices on one or two nodes, some of them equal; memory about as given."""
    split = rng.randint(1, num_devices)
    nodes = []
    for name, count in (("a", split), ("b", num_devices - split)):
        options = [
            (
                f"kind {rng.randrange(kinds)}",
                rng.choice([0.5, 1.0, 2.0]),
                memory_bytes * rng.uniform(0.5, 1.5),
            )
            for _ in range(2)
        ]
        devices = []
        for index in range(count):
            kind, speed, memory = rng.choice(options)
            devices.append(Device(f"{name}/{index}", name, kind, memory, speed=speed))
        inside = rng.choice([None, Link(0.0, 50.0)])
        if devices:
            nodes.append(Node(name, tuple(devices), interconnect=inside))
    network = Link(rng.choice([0.0, 0.3]), rng.choice([0.5, 5.0, 100.0]))
    return Cluster("random", network, tuple(nodes))


def random_problem(seed: int) -> Problem:
    """Two to four devices, three to seven layers; tight and ample memory, fast and slow links."""
    rng = random.Random(seed)
    profile = random_profile(rng, rng.randint(3, 7), tied=rng.random() < 0.3)
    states = 4 * sum(layer.parameter_bytes for layer in profile.layers)
    num_devices = rng.choice([2, 2, 3, 3, 4])
    memory = rng.choice([0.4, 0.8, 1.2, 10.0]) * states / num_devices + 4
    cluster = random_cluster(rng, num_devices, memory)
    sizes = rng.choice([(1,), (2,), (1, 2)])
    return Problem(profile, cluster, rng.randint(2, 9), sizes)


def with_ample_memory(problem: Problem) -> Problem:
    """The problem on devices that hold the whole model with everything in flight."""
    nodes = tuple(
        replace(node, devices=tuple(replace(device, memory_bytes=1e6) for device in node.devices))
        for node in problem.cluster.nodes
    )
    return replace(problem, cluster=replace(problem.cluster, nodes=nodes))


def closed_form(problem: Problem) -> Evaluate:
    """Plans judged by the planner's own estimate."""
    costs = PipelineCosts(problem)
    estimate = StepEstimate(costs)

    def evaluate(plan: Plan) -> Figures:
        step_s = estimate.estimate_s(plan)
        busy_s = dict.fromkeys(plan.device_names, 0.0)
        for pipeline in plan.pipelines:
            for device, start, stop in costs.layout(pipeline):
                for microbatch in range(pipeline.num_microbatches):
                    samples = pipeline.microbatch_samples(microbatch)
                    busy_s[device.name] += costs.busy_s(device, start, stop, samples)
        devices = {
            name: DeviceFigures(plan_memory(plan, problem.profile, name).total_bytes, seconds / step_s)
            for name, seconds in busy_s.items()
        }
        bubble = 1 - sum(device.busy for device in devices.values()) / len(devices)
        return Figures(step_s, problem.global_batch_size / step_s, bubble, devices)

    return evaluate
