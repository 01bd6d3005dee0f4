"""A model of your own, an nn.Sequential, trained over unequal devices: python examples/sequential.py

`hetpipe.Trainer` takes the module, the data by index, an optimizer of torch, and the loss as a sum. Two
things travel between the layers here, the state and what the first layer saw (a tuple), so a cut between any
two of them sends both.
"""

import functools
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import hetpipe

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
    """Summed over the samples, not averaged: it is divided by the samples of the whole step."""
    return (prediction - target).square().sum()


class Sums(torch.utils.data.Dataset):
    """Random x [features] and the sum of four of them [1]: the same each time that an index is read."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(NUM_FEATURES, generator=torch.Generator().manual_seed(index))
        return x, x[:4].sum(0, keepdim=True)


def constant(step: int) -> float:
    """The learning rate of each step, as a multiple of the optimizer's."""
    return 1.0


class Print(hetpipe.Callback):
    """Called in this process while the ranks wait."""

    def on_step_end(self, metrics):
        print(f"step {metrics['step']}: loss {metrics['loss']:.3f}")

    def on_end(self, report):
        print(f"measured: {report.measured_step_s * 1e3:.1f} ms a step")


def main() -> None:
    torch.manual_seed(0)
    model = build()
    with tempfile.TemporaryDirectory() as name:
        cluster_file = Path(name) / "cluster.toml"
        cluster_file.write_text(CLUSTER)
        trainer = hetpipe.Trainer(
            model,
            Sums(),
            functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9),
            squared_error,
            cluster=cluster_file,
            batch_size=32,
            folder=Path(name) / "run",
            callbacks=[Print()],
            progress=False,  # that callback prints
            rate_schedule=constant,
            save=False,  # the folder is thrown away
        )
        print(f"predicted: {trainer.prepare().step_s * 1e3:.1f} ms a step")
        for stage in trainer.plan.pipelines[0].stages:
            print(f"{', '.join(stage.devices)}: layers {list(stage.layers)}")
        trainer.fit(steps=20)


if __name__ == "__main__":
    main()
