"""What the ranks of runtime tests run: whole steps of small models under plans by hand."""

import hashlib
import os
import random
import signal
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cost_model.cluster import CPU, Cluster, Device, Link, Node
from cost_model.collectives import Collective
from cost_model.network import Network
from hetpipe.program.collective_parts import Group, Operation, Part
from hetpipe.program.gradient_buckets import summed_by
from hetpipe.program.instructions import Compute, Norm, Schedule, Sync
from hetpipe.program.lowering import lower_as
from hetpipe.runtime.byte_counter import ByteCounter
from hetpipe.runtime.collectives import OnHost
from hetpipe.runtime.gradient_sync import GradientSync
from hetpipe.runtime.layer_sync import LayerSync
from hetpipe.runtime.rank_setup import slices
from hetpipe.training.meeting import from_first, gather
from partition.plan import Pipeline, Plan, Stage
from random_cases import Case, batch_of, profile_of
from rank_mains import limit_waits
from stress_ranks import OneProcess, Rank, compare, executor_of

Emit = Callable[[dict[str, Any]], None]


def case_of(
    model: str,
    *pipelines: Pipeline,
    collective: Collective = Collective.RING,
    most_bytes: float | None = None,
) -> Case:
    """The plan of these pipelines over devices n/0 to n/3. most_bytes: of a bucket."""
    total = sum(pipeline.num_samples for pipeline in pipelines)
    plan = Plan("manual", model, total, pipelines)
    profile = profile_of(random.Random(0), model)
    devices = tuple(Device(f"n/{index}", "nm"[index % 2], CPU, 1e12) for index in range(4))
    cluster = Cluster("four", Link(0.0, 1e9), (Node("n", devices[::2]), Node("m", devices[1::2])))
    program = lower_as(plan, profile, cluster, Schedule.ONE_F_ONE_B, most_bytes=most_bytes)
    buckets = tuple(summed_by(bucket, collective, plan, Network(cluster)) for bucket in program.buckets)
    return Case("by hand", replace(program, buckets=buckets), profile, cluster, (8,))


def stages(*entries: tuple[int, int, int, int], **recompute: Any) -> tuple[Stage, ...]:
    """(device, start, stop, in_flight) of each."""
    return tuple(
        Stage((f"n/{device}",), (start, stop), flight, **recompute) for device, start, stop, flight in entries
    )


def stop_in_a_step(case: Case, where: Sync | Norm, timeout_s: float, *, rank: int, emit: Emit) -> None:
    """In the second step the last rank that takes part stops at SYNC or NORM, and who does not is busy.

    timeout_s: of sums in that step; messages may take as long as a busy machine makes them.
    """
    runner = Rank.open(case, rank)
    ranks = case.program.buckets[where.bucket].ranks if isinstance(where, Sync) else range(3)
    runner.step(0, 8, 0.0, 1.0)
    sync = runner.executor._sync
    assert isinstance(sync, GradientSync)
    limit_waits(timeout_s, *(group for group in sync._groups.values() if group is not None))
    start, finish = sync.start, sync.finish

    def start_or_stop(bucket: int) -> None:
        if rank == ranks[-1] and Sync(bucket) == where:
            finish()  # the sums before, for which others would wait first
            os.kill(os.getpid(), signal.SIGSTOP)
        start(bucket)

    def finish_and_stop() -> list[int]:
        done = finish()
        if rank not in ranks:
            time.sleep(60)
        if rank == ranks[-1] and where == Norm():
            os.kill(os.getpid(), signal.SIGSTOP)
        return done

    sync.start, sync.finish = start_or_stop, finish_and_stop
    dist.barrier()
    runner.step(1, 8, 0.0, 1.0)


def stay_away(away: int, timeout_s: float, *, rank: int, emit: Emit) -> None:
    """One of two ranks never comes to a meeting between steps: rank 1 of that of all, rank 0 of its own."""
    limit_waits(timeout_s)
    if rank == away:
        time.sleep(60)
    elif away == 1:
        gather(rank)
    else:
        from_first(0)


def stop_before_a_meeting(stopped: int, timeout_s: float, *, rank: int, emit: Emit) -> None:
    """One rank is stopped by a signal, as by hand; the others wait for it between steps."""
    limit_waits(timeout_s)
    if rank == stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    gather(rank)


def train_under_all(
    cases: Sequence[Case], turns: Sequence[tuple[int, int]], *, rank: int, emit: Emit
) -> None:
    """One model under programs whose devices hold the same layers; a step for each (program, length)."""
    first = Rank.open(cases[0], rank)
    others = [
        replace(first, case=case, executor=executor_of(case, rank, first.model, first.optimizer))
        for case in cases[1:]
    ]
    runners = [first, *others]
    one = OneProcess(first.case.model) if rank == 0 else None
    differences = [
        compare(runners[index], one, step, length, 1e-3, 1.0) for step, (index, length) in enumerate(turns)
    ]
    for runner in runners:
        runner.executor.close()
    if rank == 0:
        emit({"event": "trained", "differences": differences})


def peak_bytes(cases: Sequence[Case], *, rank: int, emit: Emit) -> None:
    """The most bytes alive in the second step, above what is there before and after it."""
    for index, case in enumerate(cases):
        runner = Rank.open(case, rank)
        runner.step(0, 8, 0.0, 1.0)
        runner.executor.prepare()
        program = case.program
        inputs, labels, weight = batch_of(case.model, 1, program.plan.global_batch_size, 8)
        counter = ByteCounter()
        held = (*runner.optimizer.parameters.values(), *runner.optimizer.state_tensors())
        for tensor in (*held, *runner.executor.gradient_buffers(), *inputs.values(), labels):
            counter.add(tensor)
        before = counter.live_bytes
        with counter:
            runner.executor.step(
                1,
                slices(program, 1, inputs, labels, weight),
                start_s=time.monotonic(),
                learning_rate=0.0,
                clip_norm=1.0,
            )
        emit({"event": "peak", "case": index, "rank": rank, "bytes": counter.peak_bytes - before})
        runner.executor.close()


def inner_starts(case: Case, *, rank: int, emit: Emit) -> None:
    """In which backward each sum of two steps begins, if in one; how far gradients are from one process's."""
    runner = Rank.open(case, rank)
    one = OneProcess(case.model) if rank == 0 else None
    stages, sync = runner.executor._stages, runner.executor._sync
    running: list[Compute] = []
    starts: list[tuple[int, str]] = []
    backward, start = stages.backward, sync.start

    def watched_backward(compute: Compute, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        running.append(compute)
        try:
            return backward(compute, gradients)
        finally:
            running.pop()

    def watched_start(bucket: int) -> None:
        starts.append((bucket, str(running[-1]) if running else ""))
        start(bucket)

    stages.backward, sync.start = watched_backward, watched_start
    worst = max(compare(runner, one, step, 8, 0.0, 1e30) for step in range(2))
    runner.executor.close()
    emit({"event": "starts", "rank": rank, "starts": starts, "worst": worst})


def lowered_again(case: Case, plan: Plan) -> Case:
    """The case of another plan."""
    return replace(case, program=lower_as(plan, case.profile, case.cluster, Schedule.ONE_F_ONE_B))


def rounded_sums(cases: Sequence[Case], *, rank: int, emit: Emit) -> None:
    """Sum random gradients of all magnitudes; emit, by bucket, how far from exact over what is summed.

    Of magnitudes: the error of a sum over the sum of what was given without its signs. Infinite where two
    owners that get the sum disagree.
    """
    for case in cases:
        runner, program = Rank.open(case, rank), case.program
        sync = runner.executor._sync
        generator = torch.Generator().manual_seed(rank)
        worst = []
        for index, bucket in enumerate(program.buckets):
            buffer = sync._buffers[index]
            sizes = 10.0 ** torch.randint(-6, 7, buffer.shape, generator=generator)
            buffer.copy_(torch.randn(buffer.shape, generator=generator).double() * sizes)
            given = _of_all(buffer if rank in bucket.ranks else None)
            sync.start(index)
            sync.finish()
            summed = bucket.state_owner in (None, rank) and rank in bucket.ranks
            found = _of_all(buffer if summed else None)
            alike = all(torch.equal(found[0], other) for other in found)
            exact, whole = torch.stack(given).sum(0), torch.stack(given).abs().sum(0)
            worst.append(float(((found[0] - exact).abs() / whole).max()) if alike else float("inf"))
        runner.executor.close()
        if rank == 0:
            emit({"event": "rounded", "case": case.name, "worst": worst})


def _of_all(mine: Tensor | None) -> list[Tensor]:
    """The tensors of all ranks that have one."""
    found: list[Tensor | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, None if mine is None else mine.clone())
    return [value for value in found if value is not None]


def train_rounded(cases: Sequence[Case], *, rank: int, emit: Emit) -> None:
    """Two steps of each case; emit the largest `difference` from one process."""
    for case in cases:
        runner = Rank.open(case, rank)
        one = OneProcess(case.model) if rank == 0 else None
        worst = max(compare(runner, one, step, 8, 0.0, 1e30) for step in range(2))
        runner.executor.close()
        if rank == 0:
            emit({"event": "trained", "case": case.name, "worst": worst})


def summed_gradients(case: Case, *, rank: int, emit: Emit) -> None:
    """Digests of the bytes of this rank's summed gradients in two steps; how far from one process's."""
    runner = Rank.open(case, rank)
    one = OneProcess(case.model) if rank == 0 else None
    steps, worst = [], 0.0
    for step in range(2):
        worst = max(worst, compare(runner, one, step, 8, 0.0, 1e30))
        buffers = runner.executor.gradient_buffers()
        steps.append([hashlib.sha256(buffer.numpy().tobytes()).hexdigest() for buffer in buffers])
    runner.executor.close()
    emit({"event": "summed", "rank": rank, "steps": steps, "worst": worst})


def messages_handed_in(case: Case, evaluations: int, *, rank: int, emit: Emit) -> None:
    """How many messages of weights a rank holds after each evaluation of a batch, and after a step."""
    runner = Rank.open(case, rank)
    program, forwards, counts = case.program, runner.executor.forwards(), list[int]()
    sync = runner.executor._sync
    assert isinstance(sync, LayerSync) and sync._served is not None
    microbatch = slices(program, 0, *batch_of(case.model, 0, program.plan.global_batch_size, 8))
    for _ in range(evaluations):
        forwards.loss(microbatch)
        counts.append(len(sync._served._sent))
    runner.step(0, 8, 0.0, 1.0)
    counts.append(len(sync._served._sent))
    runner.executor.close()
    emit({"event": "handed in", "rank": rank, "counts": counts})


def buffers_still_held(rounds: int, *, rank: int, emit: Emit) -> None:
    """How many buffers of collectives outlive the last reference that a rank has to them."""
    pair, held = Group((0, 1), on_host=True), 0
    for index in range(rounds):
        operation = (Operation.ALL_REDUCE, Operation.REDUCE, Operation.BROADCAST)[index % 3]
        buffer = torch.ones(20_000)
        work = OnHost(Part(0, operation, pair, 0), buffer, {pair: None})
        work.wait()
        if operation is Operation.ALL_REDUCE or (operation is Operation.REDUCE and rank == 0):
            assert buffer[-1] == 2
        memory = weakref.ref(buffer.untyped_storage())
        del buffer, work
        held += memory() is not None
    emit({"event": "held", "rank": rank, "held": held})
