"""What the ranks run: one random plan after another, each step compared with one process."""

import ctypes
import gc
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cost_model.collectives import Collective
from hetpipe.models.chain import ChainModel
from hetpipe.models.keyed_dropout import KeyedDropout
from hetpipe.models.partial_model import LayerModel
from hetpipe.program.costs import ProgramCosts
from hetpipe.program.gradient_buckets import gradient_buckets
from hetpipe.program.instructions import Schedule
from hetpipe.program.sync_starts import inner_syncs
from hetpipe.runtime.bucket_parameters import (
    absent_names,
    counted_names,
    owned_parts,
    part_of,
    parted_names,
    parts_in,
)
from hetpipe.runtime.executor import Executor
from hetpipe.runtime.host_activations import activations_on_host
from hetpipe.runtime.host_staging import Staging
from hetpipe.runtime.host_states import HostStates
from hetpipe.runtime.host_steps import HostSteps
from hetpipe.runtime.host_weights import HostWeights, names_on_host
from hetpipe.runtime.optimizer import Optimizer
from hetpipe.runtime.pace import Pace
from hetpipe.runtime.rank_setup import boundaries_of, offloaded_names, slices, sync_of
from hetpipe.runtime.stage_runner import StageRunner
from hetpipe.runtime.step_outcome import StepOutcome
from hetpipe.runtime.transport import DistributedTransport
from hetpipe.training.meeting import gather
from partition.plan import OFFLOADS
from random_cases import MODELS, Case, batch_of, chain_of, loss_of, random_case

SEED = 3
WEIGHT_DECAY = 0.01
EPSILON = 1e-8
LEARNING_RATE, LARGE_EPSILON, CLIP_NORM = 0.01, 0.01, 1.0
"""With these a weight changes by as much as its gradient, about: with its usual epsilon AdamW goes as far for
a gradient that is nothing but rounding as for any other, so that no two ways of adding would agree."""
TIMEOUT_S = 120.0
MIB = 2**20

Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of a case: its layers, and what runs them."""

    case: Case
    model: LayerModel
    optimizer: "RecordingOptimizer | RecordingHostStates | RecordingHostSteps"
    executor: Executor

    @classmethod
    def open(cls, case: Case, rank: int, timeout_s: float = TIMEOUT_S, *, epsilon: float = EPSILON) -> "Rank":
        program, chain = case.program, chain_of(case.model)
        layers = program.plan.layers_of(program.device_names[rank])
        absent = absent_names(program, rank, chain)
        away = names_on_host(program.plan, program.device_names[rank], chain)
        model = chain.materialise(
            layers, SEED, torch.float64, absent=absent,
            on_host={name for names in away.values() for name in names},
        )  # fmt: skip
        for name in absent:
            model.owned_parameters()[name].requires_grad_(True)
        train_what_is_trained(chain, model)
        counted, trained = counted_names(program, rank, chain), trained_parameters(model)
        sharded = program.plan.state_owners is not None
        stepped = {name: value for name, value in trained.items() if name in counted or not sharded}
        stepped |= owned_parts(program, rank, chain, trained)
        model.absent |= parted_names(program, rank, chain)
        offloaded = offloaded_names(program.plan, program.device_names[rank], chain, stepped)
        optimizer: RecordingOptimizer | RecordingHostStates | RecordingHostSteps
        if offloaded:
            kept = RecordingHostSteps if offloaded.by_host else RecordingHostStates
            optimizer = kept(stepped, counted, WEIGHT_DECAY, offloaded=offloaded.names, epsilon=epsilon)
        else:
            optimizer = RecordingOptimizer(stepped, counted, WEIGHT_DECAY, epsilon=epsilon)
        weights = HostWeights(model, away, torch.device("cpu")) if away else None
        return cls(case, model, optimizer, executor_of(case, rank, model, optimizer, timeout_s, weights))

    def step(self, step: int, sequence_length: int, learning_rate: float, clip_norm: float) -> StepOutcome:
        """One step; the optimizer has its gradients then."""
        self.executor.prepare()
        program = self.case.program
        count = program.plan.global_batch_size
        batch = batch_of(self.case.model, step, count, sequence_length)
        return self.executor.step(
            step,
            slices(program, step, *batch),
            start_s=time.monotonic(),
            learning_rate=learning_rate,
            clip_norm=clip_norm,
        )

    def weights(self) -> dict[str, Tensor]:
        """The trained weights that this rank has between steps, whole or in parts."""
        held = self.model.held_parameters()
        parts = parts_in(self.optimizer.parameters)
        held |= {key: self.optimizer.parameters[key] for key, part in parts.items() if part.name not in held}
        return {name: value.detach() for name, value in held.items() if value.requires_grad}


class RecordingOptimizer(Optimizer):
    """Keeps a copy of the gradients of the last step, clipped: parameters may travel in their memory."""

    gradients: dict[str, Tensor]

    def step(self, learning_rate: float, scale: float, loss_scale: float = 1.0) -> None:
        super().step(learning_rate, scale, loss_scale)
        self.gradients = copied_gradients(self.parameters)


class RecordingHostStates(HostStates):
    """The same with states on the host."""

    gradients: dict[str, Tensor]

    def step(self, learning_rate: float, scale: float, loss_scale: float = 1.0) -> None:
        super().step(learning_rate, scale, loss_scale)
        self.gradients = copied_gradients(self.parameters)


class RecordingHostSteps(HostSteps):
    """The same whose host steps."""

    gradients: dict[str, Tensor]

    def step(self, learning_rate: float, scale: float, loss_scale: float = 1.0) -> None:
        super().step(learning_rate, scale, loss_scale)
        self.gradients = copied_gradients(self.parameters)


def copied_gradients(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Copies of the gradients that are there."""
    found = {name: value.grad for name, value in parameters.items()}
    return {name: value.clone() for name, value in found.items() if value is not None}


def train_what_is_trained(chain: ChainModel, model: LayerModel) -> None:
    """Let frozen parameters be frozen, and the model train."""
    reached = {info.name for layer in model.layers for info in chain.parameters(layer) if info.reached}
    for name, value in model.owned_parameters().items():
        value.requires_grad_(name in reached)
    model.train()


def trained_parameters(model: LayerModel) -> dict[str, nn.Parameter]:
    return {name: value for name, value in model.owned_parameters().items() if value.requires_grad}


def staging_of(case: Case) -> Staging:
    """In half of the cases some ranks copy what they give and get, as those on GPUs do beside CPUs."""
    rng = random.Random(case.name)
    share = rng.choice([0.0, 0.5])
    return Staging(tuple(rng.random() < share for _ in case.program.ranks))


def executor_of(
    case: Case,
    rank: int,
    model: LayerModel,
    optimizer: Optimizer,
    timeout_s: float = TIMEOUT_S,
    weights: HostWeights | None = None,
) -> Executor:
    """An executor of the case's program; several may share a model."""
    program, chain, staging = case.program, chain_of(case.model), staging_of(case)
    stages = StageRunner(program, model, KeyedDropout(SEED), loss_of(case.model))
    if weights is not None:
        stages.saving = weights.saving
    stages.on_host = activations_on_host(
        program, rank, model, chain.layer_names, torch.device("cpu"), weights
    )
    return Executor(
        ProgramCosts(program, case.profile, case.cluster),
        rank,
        stages=stages,
        transport=DistributedTransport(program, rank, torch.device("cpu"), timeout_s, staging),
        sync=sync_of(program)(
            program, rank, chain, trained_parameters(model) | optimizer.parameters, timeout_s, staging
        ),
        optimizer=optimizer,
        boundaries=boundaries_of(chain, torch.float64),
        pace=Pace(),
        board=None,
    )


class OneProcess:
    """The same training on the whole model and batch, with nothing of the runtime but the dropout's keys."""

    def __init__(self, model: str, *, epsilon: float = EPSILON) -> None:
        self._name = model
        self._model = chain_of(model).materialise(range(chain_of(model).num_layers), SEED, torch.float64)
        train_what_is_trained(chain_of(model), self._model)
        self._dropout = KeyedDropout(SEED)
        self._model.on_layer = self._dropout.enter_layer
        self._parameters = trained_parameters(self._model)
        values = self._parameters.values()
        groups = [
            {"params": [value for value in values if value.dim() > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [value for value in values if value.dim() <= 1], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(groups, eps=epsilon)

    def weights(self) -> dict[str, Tensor]:
        """The trained weights."""
        return {name: value.detach() for name, value in self._parameters.items()}

    def step(
        self, step: int, num_samples: int, sequence_length: int, learning_rate: float, clip_norm: float
    ) -> tuple[float, float, dict[str, Tensor]]:
        """(loss, norm of the gradients, gradients after clipping)."""
        inputs, labels, weight = batch_of(self._name, step, num_samples, sequence_length)
        self._dropout.at(step, range(num_samples))
        with self._dropout:
            (logits,) = self._model.run(0, self._model.num_layers, inputs)
        loss = loss_of(self._name)(logits, labels) * weight
        self._adamw.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), clip_norm)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        gradients = {name: value.grad for name, value in self._parameters.items()}
        return loss.item(), norm.item(), {k: v for k, v in gradients.items() if v is not None}


def difference(
    outcome: StepOutcome,
    found: Iterable[Mapping[str, Tensor]],
    expected: tuple[float, float, Mapping[str, Tensor]],
) -> float:
    """The largest difference of a step of all ranks from one process, in units of the largest gradient; of
    loss and norm in units of their own. Infinite where owners of a parameter disagree, or one is missing.
    """
    loss, norm, gradients = expected
    largest = max(float(value.abs().max()) for value in gradients.values())
    worst = max(abs(outcome.loss - loss) / abs(loss), abs(outcome.gradient_norm - norm) / norm)
    return max(worst, largest_difference(found, gradients) / largest)


def largest_difference(found: Iterable[Mapping[str, Tensor]], expected: Mapping[str, Tensor]) -> float:
    """The largest difference of what any rank has, whole or in parts; infinite where ranks that have the same
    disagree, or a number is nobody's.
    """
    worst, seen = 0.0, dict[str, Tensor]()
    for rank in found:
        parts = parts_in(rank)
        for name, value in rank.items():
            if not torch.equal(seen.setdefault(name, value), value):
                return float("inf")
            whole = expected[parts[name].name if name in parts else name]
            here = parts[name].of(whole) if name in parts else whole
            worst = max(worst, float((value - here).abs().max()))
    counts = Counter[str]()
    for name, value in seen.items():
        part = part_of(name)
        counts[name if part is None else part.name] += value.numel()
    return worst if counts == {name: value.numel() for name, value in expected.items()} else float("inf")


def compare(
    runner: Rank, one: OneProcess | None, step: int, sequence_length: int, learning_rate: float, clip: float
) -> float:
    """Run a step on all ranks; `difference` on rank 0, which has the one process, 0 on the others."""
    outcome = runner.step(step, sequence_length, learning_rate, clip)
    found: list[Any] = [runner.optimizer.gradients]
    if dist.is_initialized():
        found *= dist.get_world_size()
        dist.all_gather_object(found, runner.optimizer.gradients)
    if one is None:
        return 0.0
    count = runner.case.program.plan.global_batch_size
    return difference(outcome, found, one.step(step, count, sequence_length, learning_rate, clip))


def weight_difference(runner: Rank, one: OneProcess | None, learning_rate: float) -> float:
    """The largest difference of a weight of any rank from that of one process, in units of a step's change.

    Infinite where ranks that hold it disagree, or nobody does; 0 on ranks without the one process.
    """
    found: list[Any] = [runner.weights()]
    if dist.is_initialized():
        found *= dist.get_world_size()
        dist.all_gather_object(found, runner.weights())
    if one is None:
        return 0.0
    return largest_difference(found, one.weights()) / learning_rate


def check_cases(
    seeds: Sequence[int],
    num_ranks: int,
    over_nodes: bool = False,
    zero: int | None = None,
    hosts: bool = False,
    *,
    rank: int,
    emit: Emit,
) -> None:
    """Steps of some plans; rank 0 emits each plan's largest difference, of gradients and of final weights.

    over_nodes, zero, hosts: see `random_case`.
    """
    for seed in seeds:
        case = random_case(seed, num_ranks, over_nodes=over_nodes, zero=zero, hosts=hosts)
        try:
            runner = Rank.open(case, rank, epsilon=LARGE_EPSILON)
            one = OneProcess(case.model, epsilon=LARGE_EPSILON) if rank == 0 else None
            steps = [
                compare(runner, one, step, length, LEARNING_RATE, CLIP_NORM)
                for step, length in enumerate(case.sequence_lengths)
            ]
            worst = max(*steps, weight_difference(runner, one, LEARNING_RATE))
            runner.executor.close()
        except Exception as error:
            raise AssertionError(f"{case.name}: {type(error).__name__}: {error}") from error
        if rank == 0:
            emit({"event": "case", "name": case.name, "worst": worst, **features(case)})


def features(case: Case) -> dict[str, bool]:
    """What a plan has, to see that the random ones have everything."""
    program, on_gpu = case.program, staging_of(case).on_gpu
    plan = program.plan
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    places = plan.places.values()
    collectives = {str(bucket.collective) for bucket in program.buckets}
    return {
        "several pipelines": len(plan.pipelines) > 1,
        "device in several pipelines": any(len({p for p, _ in row}) > 1 for row in places),
        "device at several stages": any(len(row) > len({p for p, _ in row}) for row in places),
        "stages in a row": bool(program.local_boundaries),
        "short last microbatch": any(p.num_samples % p.microbatch_size for p in plan.pipelines),
        **{word: any(word in stage.offload for stage in stages) for word in OFFLOADS},
        "recompute": any(stage.recompute for stage in stages),
        "recompute by segments": any(stage.recompute and len(stage.segments) > 1 for stage in stages),
        "weights fetched apart": plan.fetches_apart and bool(program.buckets),
        "layers in ranges": any(bucket.is_part for bucket in program.buckets),
        "sharded by layer": plan.layer_zero is not None and bool(program.buckets),
        "states sharded": any(bucket.state_owner is not None for bucket in program.buckets),
        "copied through the host": any(on_gpu) and not all(on_gpu),
        "sums begin inside a backward": any(inner_syncs(program, rank) for rank in range(len(program.ranks))),
        "sums cut": len(program.buckets) > len(gradient_buckets(plan, case.profile)),
        "tied over ranks": any(bucket.tied for bucket in program.buckets),
        **{str(name): name in collectives for name in Collective},
        "over nodes, one with several": any(
            1 < len(bucket.nodes) < len(bucket.ranks) for bucket in program.buckets
        ),
        **{
            str(schedule): program.schedule is schedule
            for schedule in Schedule
            if schedule is not Schedule.AUTO
        },
    }


def stress(
    steps: int, steps_of_plan: int, every: int, num_ranks: int, first_seed: int, *, rank: int, emit: Emit
) -> None:
    """Train under one plan after another; every so many steps rank 0 emits what all ranks hold."""
    worst = 0.0
    for model in MODELS:
        chain_of(model)  # described once, kept for all plans
    for done in range(0, steps, steps_of_plan):
        case = random_case(first_seed + done // steps_of_plan, num_ranks)
        try:
            runner = Rank.open(case, rank)
            one = OneProcess(case.model) if rank == 0 else None
            for step in range(steps_of_plan):
                length = case.sequence_lengths[step % len(case.sequence_lengths)]
                worst = max(worst, compare(runner, one, step, length, 1e-3, 1.0))
            runner.executor.close()
        except Exception as error:
            raise AssertionError(f"{case.name}: {type(error).__name__}: {error}") from error
        del runner, one
        if (done + steps_of_plan) % every == 0:
            held = gather(census())
            if rank == 0:
                emit({"event": "census", "steps": done + steps_of_plan, "worst": worst, "ranks": held})
                worst = 0.0


def census() -> dict[str, float]:
    """What this process holds, after free memory went back to the system (glibc keeps some for later)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss_mib": pages * os.sysconf("SC_PAGE_SIZE") / MIB,
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "tensors": sum(issubclass(type(entry), Tensor) for entry in gc.get_objects()),
    }
