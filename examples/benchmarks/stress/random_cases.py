"""Random plans that really run: own cuts, microbatches, in_flight, recompute; shared devices; hosts."""

import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cost_model.cluster import CPU, Cluster, Device, HostMemory, Link, Node
from cost_model.collective_choice import BUCKET_BYTES
from cost_model.collectives import Collective
from cost_model.errors import InputError
from cost_model.host_memory import movable_bytes, saved_bytes_on_host
from cost_model.layer_profile import LayerProfile, LayerTimes
from cost_model.network import Network
from cost_model.profile import KindProfile, ModelProfile
from cost_model.sharding import OwnerRange
from hetpipe.models.chain import ChainModel
from hetpipe.models.huggingface import model_spec
from hetpipe.models.loss import Loss, loss_sum
from hetpipe.program.gradient_buckets import summed_by
from hetpipe.program.instructions import Bucket, Program, Schedule
from hetpipe.program.lowering import lower_as
from hetpipe.program.verification import verify
from partition.estimates.optimizer_sharding import with_state_owners
from partition.plan import (
    FROZEN_WEIGHTS,
    OFFLOADS,
    OPTIMIZER_STATES,
    OPTIMIZER_STEP,
    SAVED_ACTIVATIONS,
    Pipeline,
    Plan,
    Stage,
)

FROZEN = "frozen"
"""Six layers with a frozen matrix each, beside which a small one is trained; for plans with hosts."""
MODELS = ("gpt2-tiny", "bert-tiny", "pairs")
"""Six layers, weights tied across them, dropout on; GPT-2 and BERT are shrunk to 4 blocks of width 16."""
MODULES = tuple(f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2"))
NUM_LAYERS = 6
NUM_FEATURES = 8
SEQUENCE_LENGTHS = ((8, 8), (8, 8), (8, 5), (6, 11, 6))
"""Of the steps of a case."""


@dataclass(frozen=True, slots=True)
class Case:
    """A program for a model, in float64, and the sequence length of each step."""

    name: str
    program: Program
    profile: ModelProfile
    cluster: Cluster
    sequence_lengths: tuple[int, ...]

    @property
    def model(self) -> str:
        return self.program.plan.model


def random_case(
    seed: int, num_ranks: int, *, over_nodes: bool = False, zero: int | None = None, hosts: bool = False
) -> Case:
    """A verified program on so many devices, a pure function of the arguments.

    over_nodes: sums of three ranks and more go inside nodes first in most of them. zero: 2 or 3, of a plan of
    its own; None for 0 or 1. hosts: stages keep any of `OFFLOADS` on them.
    """
    rng = random.Random(f"{seed} {num_ranks}" if zero is None else f"{seed} {num_ranks} {zero}")
    model = rng.choice(MODELS)
    if hosts and seed % 2:
        model = FROZEN
    profile = profile_of(rng, model)
    speeds = [rng.choice([0.5, 1.0, 2.0]) for _ in range(num_ranks)]
    names = [rng.choice("mn") for _ in speeds]
    if over_nodes and len(set(names)) == 1:
        names[seed % num_ranks] = "o"
    devices = [Device(f"n/{i}", names[i], CPU, 1e12, speed=speed) for i, speed in enumerate(speeds)]
    lent = HostMemory(1e12, Link(1e-3, 1e9), 1e9) if hosts else None
    nodes = tuple(
        Node(name, tuple(device for device in devices if device.node == name), host_memory=lent)
        for name in sorted(set(names))
    )
    cluster = Cluster("random", Link(rng.choice([0.0, 1e-3]), rng.choice([1e5, 1e9])), nodes)
    if zero is None:
        plan = _with_segments(random.Random(f"{seed} {num_ranks} segments"), _plan(rng, model, num_ranks))
    else:
        plan = _sharded_plan(rng, model, num_ranks, zero)
    if not hosts:
        plan = _in_ranges(random.Random(f"{seed} {num_ranks} {zero} ranges"), plan, profile, cluster)
    if hosts:
        plan = _on_hosts(random.Random(f"{seed} {num_ranks} hosts"), plan, profile)
    most_bytes = random.Random(f"{seed} {num_ranks} buckets").choice([1.0, 20.0, BUCKET_BYTES])
    program = _lowered(rng, plan, profile, cluster, most_bytes)
    ways, network = list(Collective) + 9 * [Collective.HIERARCHICAL] * over_nodes, Network(cluster)

    def summed(bucket: Bucket) -> Bucket:
        if bucket.state_owner is not None:
            return bucket
        made = summed_by(bucket, rng.choice(ways), program.plan, network)
        ring = made.collective is Collective.RING  # which goes over its ranks in any order
        return replace(made, ranks=tuple(rng.sample(made.ranks, len(made.ranks)))) if ring else made

    buckets = tuple(map(summed, program.buckets))
    program = replace(program, buckets=buckets)
    verify(program, profile, cluster)
    options = (", over_nodes=True" if over_nodes else "") + ("" if zero is None else f", zero={zero}")
    options += ", hosts=True" if hosts else ""
    name = f"random_case({seed}, {num_ranks}{options}): {model}"
    return Case(name, program, profile, cluster, rng.choice(SEQUENCE_LENGTHS))


def _lowered(
    rng: random.Random, plan: Plan, profile: ModelProfile, cluster: Cluster, most_bytes: float
) -> Program:
    """Under one of the schedules that are for the plan; 1F1B always is. most_bytes: of a bucket."""
    for schedule in (Schedule.INTERLEAVED, Schedule.GPIPE, Schedule.LIST):
        if rng.random() < 0.4:
            with suppress(InputError):
                return lower_as(plan, profile, cluster, schedule, most_bytes=most_bytes)
    return lower_as(plan, profile, cluster, Schedule.ONE_F_ONE_B, most_bytes=most_bytes)


def _plan(rng: random.Random, model: str, num_ranks: int) -> Plan:
    """One to four pipelines that together use all devices: of their own, shared, or in any order; or one that
    visits all of them several times, if it has the layers."""
    kind = rng.choice(["own", "rounds", "shared", "any order"])
    most = {"own": min(4, num_ranks), "rounds": 1}.get(kind, 4)
    names = [f"n/{index}" for index in range(num_ranks)]
    while True:
        count = rng.randint(1, most)
        rng.shuffle(names)
        ends = [0, *sorted(rng.sample(range(1, num_ranks), count - 1)), num_ranks] if kind == "own" else []
        chosen = [names[start:stop] for start, stop in pairwise(ends)]
        if kind == "rounds":
            chosen = [names * rng.randint(1, NUM_LAYERS // num_ranks)]
        while len(chosen) < count:
            if kind == "shared":
                chosen.append(rng.sample(names, rng.randint(1, num_ranks)))
            else:
                chosen.append([rng.choice(names) for _ in range(rng.randint(1, NUM_LAYERS))])
        if {name for row in chosen for name in row} == set(names):
            pipelines = tuple(_pipeline(rng, row) for row in chosen)
            total = sum(entry.num_samples for entry in pipelines)
            return Plan(kind, model, total, pipelines, zero=int(rng.random() < 0.25))


def _sharded_plan(rng: random.Random, model: str, num_ranks: int, zero: int) -> Plan:
    """Pipelines with devices of their own, in half of those under zero 3 of one stage each; some stages
    recompute, by layer, and some layers have a lower stage of ZeRO.
    """
    names = [f"n/{index}" for index in range(num_ranks)]
    rng.shuffle(names)
    whole = zero == 3 and rng.random() < 0.5
    count = num_ranks if whole else rng.randint(1, num_ranks)
    ends = [0, *sorted(rng.sample(range(1, num_ranks), count - 1)), num_ranks]
    drawn = [_pipeline(rng, names[start:stop]) for start, stop in pairwise(ends)]
    pipelines = tuple(
        replace(
            pipeline,
            stages=tuple(replace(stage, segment_layers=int(stage.recompute)) for stage in pipeline.stages),
        )
        for pipeline in drawn
    )
    levels = None
    if rng.random() < 0.4:
        levels = (zero, *(rng.randint(1, zero) for _ in range(NUM_LAYERS - 1)))
        levels = tuple(rng.sample(levels, NUM_LAYERS))
    total = sum(entry.num_samples for entry in pipelines)
    return Plan("sharded", model, total, pipelines, zero=zero, layer_zero=levels)


def _pipeline(rng: random.Random, devices: Sequence[str]) -> Pipeline:
    cuts = [0, *sorted(rng.sample(range(1, NUM_LAYERS), len(devices) - 1)), NUM_LAYERS]
    size, num_samples = rng.randint(1, 3), rng.randint(1, 7)
    flights = sorted((rng.randint(1, -(-num_samples // size)) for _ in devices), reverse=True)
    again = rng.choice([0.0, 0.0, 0.5, 1.0])
    stages = tuple(
        Stage((name,), layers, flight, rng.random() < again)
        for name, layers, flight in zip(devices, pairwise(cuts), flights, strict=True)
    )
    return Pipeline(size, num_samples, stages)


def _with_segments(rng: random.Random, plan: Plan) -> Plan:
    """The plan with some of the stages that recompute doing so by layer or by two, in draws of their own."""

    def drawn(stage: Stage) -> Stage:
        return replace(stage, segment_layers=rng.choice([0, 1, 2])) if stage.recompute else stage

    return replace(
        plan,
        pipelines=tuple(
            replace(pipeline, stages=tuple(map(drawn, pipeline.stages))) for pipeline in plan.pipelines
        ),
    )


def _in_ranges(rng: random.Random, plan: Plan, profile: ModelProfile, cluster: Cluster) -> Plan:
    """The plan; of those that shard states three quarters have layers that several devices own in ranges."""
    if not plan.zero or rng.random() < 0.25:
        return plan
    plan = with_state_owners(plan, profile, cluster)
    assert plan.state_owners is not None
    owners, ranges = list(plan.state_owners), list[OwnerRange]()
    for layer in range(NUM_LAYERS):
        holders = [name for name in plan.device_names if layer in plan.layers_of(name)]
        if len(holders) < 2 or rng.random() < 0.4:
            continue
        chosen, parts = rng.sample(holders, rng.randint(2, len(holders))), rng.choice([8, 4096])
        cuts = [0, *sorted(rng.sample(range(1, parts), len(chosen) - 1)), parts]
        owners[layer] = chosen[0]
        ranges += [
            OwnerRange(layer, name, start / parts, stop / parts)
            for name, (start, stop) in zip(chosen, pairwise(cuts), strict=True)
        ]
    return replace(plan, state_owners=tuple(owners), owner_ranges=tuple(ranges))


def _on_hosts(rng: random.Random, plan: Plan, profile: ModelProfile) -> Plan:
    """The plan with any of what a stage may keep on its host there; half of them let hosts step."""
    steps = rng.random() < 0.5

    def drawn(stage: Stage) -> Stage:
        possible = {OPTIMIZER_STATES}
        if any(movable_bytes(profile, layer) for layer in range(*stage.layers)):
            possible.add(FROZEN_WEIGHTS)
        if saved_bytes_on_host(profile, *stage.layers) and not stage.recompute:
            possible.add(SAVED_ACTIVATIONS)
        words = {word for word in OFFLOADS if rng.random() < 0.6 and word in possible}
        words |= {OPTIMIZER_STEP} if steps and OPTIMIZER_STATES in words else set()
        return replace(stage, offload=tuple(word for word in OFFLOADS if word in words))

    return replace(
        plan,
        pipelines=tuple(
            replace(pipeline, stages=tuple(map(drawn, pipeline.stages))) for pipeline in plan.pipelines
        ),
    )


def profile_of(rng: random.Random, model: str) -> ModelProfile:
    """The model's layers with made-up sizes, and times that decide the order on shared devices."""
    chain = chain_of(model)
    homes: dict[str, int] = {}
    layers, times = [], []
    for index, name in enumerate(chain.layer_names):
        tied = [info.name for info in chain.parameters(index) if info.tied]
        home = min((homes.setdefault(entry, index) for entry in tied), default=index)
        tied_to = chain.layer_names[home] if home != index else None
        layers.append(
            LayerProfile(
                name, 16.0, 4.0, 8.0, tied_to=tied_to, tied_bytes=8.0 if tied_to else 0.0,
                unreached_bytes=8.0 if model == FROZEN else 0.0,
            )
        )  # fmt: skip
        forward_s = rng.uniform(1e-3, 1e-2)
        times.append(LayerTimes((forward_s,), (2 * forward_s,)))
    kind = KindProfile("measured", (1,), tuple(times))
    return ModelProfile(model, 8, "float64", tuple(layers), {CPU: kind})


@cache
def chain_of(model: str) -> ChainModel:
    if model in (FROZEN, "pairs"):
        build = _build_frozen if model == FROZEN else _build_pairs
        return ChainModel.from_module(build, torch.zeros(1, 8, NUM_FEATURES), name=model)
    return ChainModel.from_spec(model_spec(model).shrunk())


def loss_of(model: str) -> Loss:
    return _squared_error if model in (FROZEN, "pairs") else partial(loss_sum, model_spec(model).task)


def batch_of(
    model: str, step: int, num_samples: int, sequence_length: int
) -> tuple[Mapping[str, Tensor], Tensor, float]:
    """Inputs by name and labels, [samples, sequence, ...], and the weight of a token's loss."""
    draws = torch.Generator().manual_seed(step)
    shape = (num_samples, sequence_length)
    if model in (FROZEN, "pairs"):
        x = torch.randn(*shape, NUM_FEATURES, generator=draws, dtype=torch.float64)
        return {"x": x}, torch.sin(x), 1 / x.numel()
    ids = torch.randint(0, 128, shape, generator=draws)
    if model == "gpt2-tiny":
        return {"input_ids": ids}, ids, 1 / (num_samples * (sequence_length - 1))
    scored = torch.rand(shape, generator=draws) < 0.4
    scored[0, 0] = True
    return {"input_ids": ids}, ids.where(scored, torch.tensor(-100)), 1 / int(scored.sum())


def _squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - target).square().sum()


class _Mark(nn.Module):
    """Adds which entries were positive: two tensors travel from here, one of them of integers."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, (x[..., 0] > 0).long()


class _Mix(nn.Module):
    """A linear layer, dropout and a row for each mark."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.rows = nn.Embedding(2, NUM_FEATURES)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mark = pair
        return F.dropout(torch.tanh(self.linear(x)), 0.2, self.training) + self.rows(mark), mark


class _Shift(nn.Module):
    """No parameters; the marks change."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mark = pair
        return torch.tanh(x), 1 - mark


class _Out(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, NUM_FEATURES)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return self.linear(pair[0])


class _Beside(nn.Module):
    """A frozen linear layer and a trained one, whose products are added."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.base.requires_grad_(False)
        self.side = nn.Linear(NUM_FEATURES, NUM_FEATURES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(torch.tanh(self.base(x)), 0.2, self.training) + torch.tanh(self.side(x))


def _build_frozen() -> nn.Module:
    return nn.Sequential(*(_Beside() for _ in range(NUM_LAYERS)))


def _build_pairs() -> nn.Module:
    """The second and the fifth layer share a matrix."""
    shared = nn.Linear(NUM_FEATURES, NUM_FEATURES)
    own = nn.Linear(NUM_FEATURES, NUM_FEATURES)
    return nn.Sequential(_Mark(), _Mix(shared), _Shift(), _Mix(own), _Mix(shared), _Out())
