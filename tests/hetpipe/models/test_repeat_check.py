"""A layer whose result depends on how often it runs, or on where a plan cuts, is refused by its name."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import user_tasks
from cost_model.cluster import CPU
from cost_model.cluster_file import read_cluster
from cost_model.errors import InputError
from hetpipe.data.task import TrainingTask
from hetpipe.models.chain import ChainModel
from hetpipe.models.keyed_dropout import KeyedDropout
from hetpipe.models.repeat_check import check_repeatable
from hetpipe.profiling.layer_profiler import profile_task
from hetpipe.program.instructions import Compute, Pass
from hetpipe.runs.settings import TaskSettings
from hetpipe.runtime.stage_runner import Microbatch, StageRunner
from hetpipe.simulation.schedule_selection import lower
from hetpipe.training.user_loop import RankStages, execute
from runs import RECOMPUTE, chain_plan, cluster_file, made_up_profile_of

WIDTH = 8


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x *= 2.0
        return x


class PastAutograd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.data.mul_(2.0)
        return x + 1.0


class Average(nn.Module):
    """Scales by a moving average, as of quantization-aware training."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.abs().mean())
        return x / self.mean


class LastMean(nn.Module):
    """Keeps what it saw last, for others to read."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = x.detach().mean()
        return x * 1.5


class Bounded(nn.Module):
    """Keeps its weights small, past autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1)
        out: Tensor = self.linear(x)
        return out


class Remembering(nn.Module):
    """Counts its forwards, and computes by that."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1.0 + 1.0 / self.calls)


class GrownTable(nn.Module):
    """Keeps a table for the sizes that it has met, as models do with positions: the same whenever made."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.table) < x.shape[-1]:
            self.table = torch.linspace(0.5, 1.5, x.shape[-1], dtype=x.dtype)
        return x * self.table


def around(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, nn.Dropout(0.5), nn.Linear(WIDTH, 4))


def check(module: nn.Module, layer: int) -> None:
    example = torch.ones(1, WIDTH)
    chain = ChainModel.from_module(module, {"x": example})
    model = chain.materialise(range(chain.num_layers), 0).train()
    inputs = {"x": torch.cat([example, example * 3])}
    carried = () if layer == 0 else (torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1)),)
    check_repeatable(model, layer, chain.layer_names[layer], inputs, carried, dropout=KeyedDropout(0))


IN_PLACE = r"layer '1' works in place on what the layer before it gives"
REFUSED = [
    (InPlace(), IN_PLACE),
    (PastAutograd(), IN_PLACE),
    (Average(), r"layer '1' changes its buffer '1\.mean' in forward"),
    (LastMean(), r"layer '1' changes its buffer '1\.mean' in forward"),
    (nn.BatchNorm1d(WIDTH), r"layer '1' changes its buffer '1\.\w+' in forward"),
    (Bounded(), r"layer '1' changes its parameter '1\.linear\.weight' in forward"),
    (Remembering(), "layer '1' gives another result when it is run again"),
]


@pytest.mark.parametrize(("layer", "message"), REFUSED, ids=lambda x: type(x).__name__)
def test_what_depends_on_the_plan_is_refused_with_the_layers_name(layer, message):
    with pytest.raises(InputError, match=message):
        check(around(layer), 1)


def test_in_place_work_on_the_inputs_of_a_step_is_refused():
    with pytest.raises(InputError, match="layer '0' works in place on input 'x'"):
        check(nn.Sequential(InPlace(), nn.Linear(WIDTH, 4)), 0)


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), GrownTable(), nn.ReLU(inplace=True)])
def test_what_can_be_run_again_is_not_refused(layer):
    """Dropout has the same masks again; what says that it is `inplace` is told not to be."""
    check(around(layer), 1)


class Block(nn.Module):
    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.in_place = in_place

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mask = mask.add_(0.5) if self.in_place else mask + 0.5
        return x + self.linear(x) + mask


class Masked(nn.Module):
    """Blocks that share a mask, which a stage makes anew for its own blocks."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(in_place=in_place) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden, mask = x + 0.0, torch.ones(WIDTH, dtype=x.dtype)
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.head(hidden)


def test_a_block_that_changes_the_mask_of_the_next_is_refused():
    check(Masked(in_place=False), 2)
    with pytest.raises(InputError, match="layer 'block1' works in place on its argument 1"):
        check(Masked(in_place=True), 2)


def gradients(layer: nn.Module, folder: Any, recompute: dict[str, Any]) -> Tensor:
    """Of the first layer, by a stage that is not checked."""
    torch.manual_seed(0)
    chain = ChainModel.from_module(around(layer), torch.ones(1, WIDTH))
    cluster = read_cluster(cluster_file(folder))
    profile = made_up_profile_of(chain, "mine", CPU, 1e-4, sequence_length=1)
    program = lower(chain_plan("mine", [0, 4], 2, batch=2, **recompute), profile, cluster)
    model = chain.materialise(range(4), 0).train()
    runner = StageRunner(program, model, KeyedDropout(0), user_tasks.squared_error)
    inputs = {"x": torch.linspace(-1.0, 2.0, 2 * WIDTH).view(2, WIDTH)}
    data = Microbatch(0, (0, 1), inputs, torch.ones(2, 4), 0.5)
    runner.forward(Compute(Pass.FORWARD, 0, 0, 0), data, ())
    runner.backward(Compute(Pass.BACKWARD, 0, 0, 0), ())
    gradient = model.owned_parameters()["0.weight"].grad
    assert gradient is not None
    return gradient


@pytest.mark.parametrize("make", [Average, Remembering])
def test_what_is_refused_would_have_had_other_gradients_under_recompute(tmp_path, make):
    plain, again = (gradients(make(), tmp_path, options) for options in RECOMPUTE[:2])
    assert (plain - again).norm() > 0.01 * plain.norm()
    plain, again = (gradients(GrownTable(), tmp_path, options) for options in RECOMPUTE[:2])
    torch.testing.assert_close(plain, again, rtol=1e-6, atol=1e-7)


def task_of(module: nn.Module) -> TrainingTask:
    def batch(first: int, count: int) -> tuple[dict[str, Tensor], Tensor]:
        return {"input0": torch.linspace(-1, 1, count * WIDTH).view(count, WIDTH)}, torch.ones(count, 4)

    chain = ChainModel.from_module(module, torch.ones(1, WIDTH), name="mine")
    return TrainingTask(chain, user_tasks.squared_error, batch, num_loss_tokens=lambda count: count)


def test_profiling_refuses_such_a_layer():
    settings = TaskSettings("mine", 1)
    with pytest.raises(InputError, match=IN_PLACE):
        profile_task(task_of(around(InPlace())), settings, CPU, (2,), 0.01, device=torch.device("cpu"))


def test_the_first_step_refuses_such_a_layer_whatever_was_profiled(tmp_path):
    task = task_of(around(Average()))
    cluster = read_cluster(cluster_file(tmp_path))
    profile = made_up_profile_of(task.chain, "mine", CPU, 1e-4, sequence_length=1)
    program = lower(chain_plan("mine", [0, 4], 2, batch=4), profile, cluster)
    stages = RankStages(program, task.chain, task.loss, profile=profile, cluster=cluster)
    with pytest.raises(InputError, match=r"layer '1' changes its buffer '1\.mean'"):
        execute(program, stages, *task.batch(0, 4))
    stages.close()
