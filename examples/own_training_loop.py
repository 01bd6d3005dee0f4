"""A training loop of one's own over a plan: python examples/own_training_loop.py

`hetpipe.execute` runs one step of a program on this rank; everything around it, the processes, the
optimizer, the learning rate, when to stop, is yours. The script starts its two ranks itself, which meet over
loopback; on GPUs torchrun would start them, and the backend would be "cpu:gloo,cuda:nccl".
"""

import functools
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn

import hetpipe

NUM_FEATURES, WIDTH, BATCH, STEPS = 16, 64, 32, 30

CLUSTER = """
name = "two"
[network]
bandwidth = "10 Gbit/s"
latency = "50 us"
[[nodes]]
name = "here"
devices = [{ kind = "cpu", count = 2, memory = "1 GiB" }]
"""


def build() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    return nn.Sequential(nn.Linear(NUM_FEATURES, WIDTH), *blocks, nn.Linear(WIDTH, 1))


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """Summed over the samples: `execute` divides by the samples of the whole step."""
    return (prediction - target).square().sum()


def batch(first: int, count: int) -> tuple[dict[str, Tensor], Tensor]:
    """Samples [first, first + count): inputs by name, labels. The same on every rank."""
    x = torch.empty(count, NUM_FEATURES)
    for index in range(count):
        x[index].normal_(generator=torch.Generator().manual_seed(first + index))
    return {"x": x}, x[:, :4].sum(1, keepdim=True)


def train(
    rank: int, store: str, program: hetpipe.Program, profile: hetpipe.ModelProfile, cluster: hetpipe.Cluster
):
    """What each rank runs; rank r drives program.device_names[r]."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    chain = hetpipe.ChainModel.from_module(build, torch.zeros(1, NUM_FEATURES))
    stages = hetpipe.RankStages(program, chain, squared_error, profile=profile, cluster=cluster, seed=0)
    optimizer = torch.optim.SGD(stages.parameters(), lr=0.02, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for step in range(STEPS):
        inputs, labels = batch(step * BATCH, BATCH)
        outcome = hetpipe.execute(
            program, stages, inputs, labels, optimizer=optimizer, step=step, clip_norm=1.0
        )
        schedule.step()
        if rank == 0 and (step + 1) % 10 == 0:
            print(
                f"step {step + 1}: loss {outcome.loss:.3f}, gradient norm {outcome.gradient_norm:.2f}",
                flush=True,
            )
    trace = hetpipe.trace_of(program, outcome)  # of the last step, from all ranks
    if rank == 0:
        print(f"last step: {trace.makespan_s * 1e3:.1f} ms, bubble {trace.bubble:.0%}", flush=True)
    stages.close()
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        cluster_file = Path(name) / "cluster.toml"
        cluster_file.write_text(CLUSTER)
        cluster = hetpipe.read_cluster(cluster_file)
        task = hetpipe.own_task(build, batch, squared_error)
        profile = hetpipe.profile_model("mine", cluster, 1, budget_s=2.0, microbatch_sizes=(8,), task=task)
        stages = (
            hetpipe.Stage(("here/0",), (0, 2), in_flight=2),
            hetpipe.Stage(("here/1",), (2, 6), in_flight=1),
        )
        plan = hetpipe.Plan("manual", "mine", BATCH, (hetpipe.Pipeline(8, BATCH, stages),))
        program = hetpipe.lower(plan, profile, cluster)
        hetpipe.verify(program, profile, cluster)
        run = functools.partial(
            train, store=str(Path(name) / "store"), program=program, profile=profile, cluster=cluster
        )
        multiprocessing.spawn(run, nprocs=2)


if __name__ == "__main__":
    main()
