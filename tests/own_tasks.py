"""Models of a user's own, with data that are a pure function of the sample's index."""

import torch
from torch import Tensor, nn

from hetpipe.autocast import weight_dtype
from hetpipe.run_folder import RunFolder
from hetpipe.settings import Settings
from hetpipe.splitting import ChainModel
from hetpipe.task import TrainingTask

NUM_FEATURES, NUM_OUTPUTS = 8, 4
BAD_SAMPLES = range(16, 32)  # step 1 at 16 samples a step


def build() -> nn.Module:
    """Six layers, three of them without parameters, the first among them."""
    return nn.Sequential(
        nn.Tanh(), nn.Linear(NUM_FEATURES, 16), nn.Dropout(0.2), nn.Linear(16, 12), nn.ReLU(),
        nn.Linear(12, NUM_OUTPUTS),
    )  # fmt: skip


def build_linear() -> nn.Module:
    return nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.Linear(16, 12), nn.Linear(12, NUM_OUTPUTS))


class Spike(nn.Module):
    """Scales its input; the gradient of the scale, and no other, is infinite where an input is above 50."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(NUM_FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.expand_as(x)
        if bool((x > 50).any()):
            scale.register_hook(lambda gradient: gradient * float("inf"))
        return torch.tanh(x * scale)


def build_spiky() -> nn.Module:
    return nn.Sequential(Spike(), nn.Linear(NUM_FEATURES, 16), nn.Linear(16, NUM_OUTPUTS))


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - target).square().sum()


def _task(settings: Settings, factory: object, bad: range = range(0)) -> TrainingTask:
    dtype = weight_dtype(settings.dtype)

    def batch(first_sample: int, num_samples: int) -> tuple[dict[str, Tensor], Tensor]:
        x = torch.empty(num_samples, NUM_FEATURES, dtype=dtype)
        for row, sample in enumerate(range(first_sample, first_sample + num_samples)):
            x[row].normal_(generator=torch.Generator().manual_seed(sample))
            if sample in bad:
                x[row, 0] = 100.0
        return {"x": x}, torch.sin(x[:, :NUM_OUTPUTS])

    chain = ChainModel.from_module(factory, torch.zeros(1, NUM_FEATURES), name=settings.model)
    return TrainingTask(chain, squared_error, batch, num_loss_tokens=lambda count: count)


def mixed_task(folder: RunFolder, settings: Settings) -> TrainingTask:
    return _task(settings, build)


def linear_task(folder: RunFolder, settings: Settings) -> TrainingTask:
    return _task(settings, build_linear)


def spiky_task(folder: RunFolder, settings: Settings) -> TrainingTask:
    return _task(settings, build_spiky, BAD_SAMPLES)
