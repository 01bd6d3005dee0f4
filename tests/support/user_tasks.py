"""Models of a user's own, with data that are a pure function of the sample's index."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetpipe.data.task import TrainingTask
from hetpipe.models.chain import ChainModel
from hetpipe.models.mixed_precision import weight_dtype
from hetpipe.runs.run_folder import RunFolder
from hetpipe.runs.settings import TaskSettings

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


def task_of(settings: TaskSettings, factory: object, bad: range = range(0)) -> TrainingTask:
    dtype = weight_dtype(settings.dtype)

    def batch(first_sample: int, num_samples: int) -> tuple[dict[str, Tensor], Tensor]:
        x = torch.empty(num_samples, NUM_FEATURES, dtype=dtype)
        for row, sample in enumerate(range(first_sample, first_sample + num_samples)):
            x[row].normal_(generator=torch.Generator().manual_seed(sample))
            if sample in bad:
                x[row, 0] = 100.0
        return {"x": x}, torch.sin(x[:, :NUM_OUTPUTS])

    chain = ChainModel.from_module(factory, {"x": torch.zeros(1, NUM_FEATURES)}, name=settings.model)
    return TrainingTask(chain, squared_error, batch, num_loss_tokens=lambda count: count)


def mixed_task(folder: RunFolder, settings: TaskSettings) -> TrainingTask:
    return task_of(settings, build)


def linear_task(folder: RunFolder, settings: TaskSettings) -> TrainingTask:
    return task_of(settings, build_linear)


def spiky_task(folder: RunFolder, settings: TaskSettings) -> TrainingTask:
    return task_of(settings, build_spiky, BAD_SAMPLES)


def overflowing_task(folder: RunFolder, settings: TaskSettings) -> TrainingTask:
    """Three linear layers; gradients of bad samples, times 2**16, leave float16's range at the last one."""
    return task_of(settings, build_linear, BAD_SAMPLES)


def build_plain() -> nn.Module:
    """Five layers without dropout, the second without parameters: what a plain loop of torch computes too."""
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, 16), nn.Tanh(), nn.Linear(16, 12), nn.GELU(), nn.Linear(12, NUM_OUTPUTS)
    )


def samples(count: int = 40) -> list[tuple[Tensor, Tensor]]:
    """A data set of (x [features], y [outputs])."""
    xs = [
        torch.randn(NUM_FEATURES, generator=torch.Generator().manual_seed(k)).double() for k in range(count)
    ]
    return [(x, torch.sin(x[:NUM_OUTPUTS])) for x in xs]


def mean_squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - target).square().mean()


def entries(target: Tensor) -> int:
    return target.numel()


def halving(step: int) -> float:
    return 0.5**step


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adagrad_by_shape(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Two groups of different rates; a state that is a tensor of no dimension."""
    groups = [[p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() <= 1]]
    rates = (0.1, 0.02)
    return torch.optim.Adagrad(
        [{"params": group, "lr": rate} for group, rate in zip(groups, rates, strict=True) if group]
    )


class Counting(torch.optim.SGD):
    """Keeps a number for each parameter, and steps by it."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is not None:
                    state = self.state[value]
                    state["seen"] = state.get("seen", 0) + 1
                    value.data.add_(value.grad, alpha=-group["lr"] / state["seen"])


def counting(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Counting(parameters, lr=0.1)


class GroupCounting(torch.optim.SGD):
    """Keeps a number for its groups, which no checkpoint holds."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
        super().step()


def group_counting(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return GroupCounting(parameters, lr=0.1)


LENGTH, VOCABULARY = 6, 16


def build_gpt2() -> nn.Module:
    """Embeddings, two blocks and a tied head, without dropout."""
    from transformers.models.gpt2.configuration_gpt2 import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def gpt2_example() -> dict[str, Tensor]:
    return {"input_ids": torch.zeros(1, LENGTH, dtype=torch.long)}


def sequences(count: int) -> list[dict[str, Tensor]]:
    """Sequences that count up from their index."""
    rows = [(index + torch.arange(LENGTH)) % VOCABULARY for index in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def num_next_tokens(ids: Tensor) -> int:
    return ids[:, 1:].numel()


def constant(step: int) -> float:
    return 1.0


class Scaled(nn.Module):
    """Multiplies by a buffer that is saved with the weights."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 12))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def build_usual() -> nn.Module:
    """Layers that work in place, that are there twice, with weights and without, and one with a buffer."""
    activation, repeated = nn.ReLU(inplace=True), nn.Linear(12, 12)
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, 12), activation, repeated, activation, Scaled(), repeated,
        nn.Sequential(nn.ReLU(inplace=True), nn.Linear(12, NUM_OUTPUTS)),
    )  # fmt: skip


def build_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, NUM_OUTPUTS))


class Fragile(nn.Module):
    """Fails where an input is above 50."""

    def forward(self, x: Tensor) -> Tensor:
        if bool((x > 50).any()):
            raise KeyError("torn")
        return x


def build_failing() -> nn.Module:
    return nn.Sequential(Fragile(), nn.Linear(NUM_FEATURES, 16), nn.Linear(16, NUM_OUTPUTS))


def task_with_failing_data(folder: RunFolder, settings: TaskSettings) -> TrainingTask:
    """From sample 32 on, which is in the third step."""
    task = task_of(settings, build_failing)

    def batch(first_sample: int, num_samples: int) -> tuple[dict[str, Tensor], Tensor]:
        if first_sample + num_samples > 32:
            raise ValueError(f"sample {first_sample} is torn")
        return task.batch(first_sample, num_samples)

    return replace(task, batch=batch)


def task_with_failing_model(folder: RunFolder, settings: TaskSettings) -> TrainingTask:
    return task_of(settings, build_failing, BAD_SAMPLES)


class Residual(nn.Module):
    """A block with dropout, of few operations: a compiler is soon done."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(NUM_FEATURES, NUM_FEATURES), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)))


class Residuals(nn.Module):
    """Three blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(3))
        self.head = nn.Linear(NUM_FEATURES, NUM_OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def residual_task(folder: RunFolder, settings: TaskSettings) -> TrainingTask:
    return task_of(settings, Residuals)


failing_tasks = {"ValueError": task_with_failing_data, "KeyError": task_with_failing_model}
