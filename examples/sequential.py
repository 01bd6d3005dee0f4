"""A model of your own, an nn.Sequential, trained over unequal devices: python examples/sequential.py

What a `TrainingTask` needs: the chain of layers, the loss, and the data as a pure function of the sample's
index, so that every process makes just its own. Two things travel between the layers here, the state and
what the first layer saw (a tuple), so a cut between any two of them sends both.
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from cost_model.cluster_file import read_cluster
from hetpipe.autocast import weight_dtype
from hetpipe.planning import evaluator
from hetpipe.profiling import profile_model
from hetpipe.run_folder import RunFolder
from hetpipe.settings import Settings
from hetpipe.splitting import ChainModel
from hetpipe.task import TrainingTask
from hetpipe.training import train
from partition.plan import Pipeline, Plan, Stage

NUM_FEATURES, WIDTH, NUM_BLOCKS = 16, 64, 4

CLUSTER = """
name = "three-unequal"
[network]
bandwidth = "10 Gbit/s"
latency = "50 us"
[[nodes]]
name = "here"
devices = [
  { kind = "emulated", speed = 0.5, memory = "256 MiB" },
  { kind = "emulated", speed = 0.2, memory = "256 MiB" },
  { kind = "emulated", speed = 0.2, memory = "256 MiB" },
]
"""


class Begin(nn.Module):
    """x [samples, features] -> (state [samples, width], skip [samples, width])."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(NUM_FEATURES, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        state = self.inner(x)
        return state, torch.tanh(state)


class Block(nn.Module):
    """A residual block that also sees what the first layer saw."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))

    def forward(self, carried: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        state, skip = carried
        return state + self.inner(torch.cat([state, skip], dim=1)), skip


class End(nn.Module):
    """(state, skip) -> prediction [samples, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 1)

    def forward(self, carried: tuple[Tensor, Tensor]) -> Tensor:
        prediction: Tensor = self.inner(carried[0])
        return prediction


def build() -> nn.Module:
    return nn.Sequential(Begin(), *(Block() for _ in range(NUM_BLOCKS)), End())


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """Summed over the samples, not averaged: the runtime weighs it by the samples of the whole step."""
    return (prediction - target).square().sum()


def make_task(folder: RunFolder, settings: Settings) -> TrainingTask:
    """Called once in every process; importable, so at the top level of its module."""
    dtype = weight_dtype(settings.dtype)

    def batch(first_sample: int, num_samples: int) -> tuple[dict[str, Tensor], Tensor]:
        x = torch.empty(num_samples, NUM_FEATURES, dtype=dtype)
        for index in range(num_samples):
            generator = torch.Generator().manual_seed(1_000_003 * settings.seed + first_sample + index)
            x[index].normal_(generator=generator)
        return {"x": x}, torch.sin(x.sum(1, keepdim=True))

    chain = ChainModel.from_module(build, torch.zeros(1, NUM_FEATURES), name=settings.model)
    return TrainingTask(chain, squared_error, batch, num_loss_tokens=lambda num_samples: num_samples)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        cluster_file = Path(name) / "cluster.toml"
        cluster_file.write_text(CLUSTER)
        cluster = read_cluster(cluster_file)
        profile = profile_model("my-model", cluster, 1, budget_s=2.0, microbatch_sizes=(4, 8), task=make_task)
        # by hand here; `partition.solver.solve` finds the best one
        stages = (
            Stage(("here/0",), (0, 4), in_flight=3),
            Stage(("here/1",), (4, 5), in_flight=2),
            Stage(("here/2",), (5, 6), in_flight=1),
        )
        plan = Plan("manual", "my-model", 32, (Pipeline(8, 32, stages),))
        print(f"predicted: {evaluator(profile, cluster)(plan).step_s * 1e3:.1f} ms a step")
        settings = Settings("my-model", steps=20, global_batch_size=32, learning_rate=1e-2, sequence_length=1)
        report = train(
            settings,
            cluster_file,
            profile,
            plan,
            RunFolder(Path(name) / "run"),
            on_event=lambda event: print(f"step {event['step']}: loss {event['loss']:.3f}"),
            make_task=make_task,
        )
        print(f"measured: {report.measured_step_s * 1e3:.1f} ms a step")


if __name__ == "__main__":
    main()
